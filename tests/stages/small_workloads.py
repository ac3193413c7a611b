"""Workloads that stages have to refuse or to judge rightly; each is digits with one thing wrong."""

import itertools
from typing import Any

import torch
from torch.utils.data import DataLoader

from dualtrack.workloads.digits import Digits, DigitsDataset


class Plain(Digits):
    """Digits in few batches and without workers, so that a test is quick."""

    def legacy_loader(self, split: Any) -> DataLoader[Any]:
        """Load 256 samples in four batches."""
        return DataLoader(
            torch.utils.data.Subset(DigitsDataset(split), range(256)),
            batch_size=64,
            shuffle=split == "train",
            num_workers=0,
        )


class NanLoss(Plain):
    """A training that diverges."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return NaN."""
        return super().loss(model, batch) * float("nan")


class NotDeterministic(Plain):
    """A model that differs from process to process."""

    def model(self) -> torch.nn.Module:
        """Build a model from the operating system's randomness."""
        model = super().model()
        with torch.no_grad():
            for value in model.parameters():
                value += float(torch.tensor(list(__import__("os").urandom(2))).sum()) * 1e-4
        return model


class OtherBatchesEachTime(Plain):
    """A loader whose order does not follow from the seed."""

    def legacy_loader(self, split: Any) -> DataLoader[Any]:
        """Shuffle by the operating system's randomness."""
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(__import__("os").urandom(4), "little"))
        return DataLoader(
            torch.utils.data.Subset(DigitsDataset(split), range(256)), batch_size=64, shuffle=True, generator=generator
        )


class OwnBatchClass(Plain):
    """A loader whose batches are of a class that no file can rebuild."""

    def legacy_loader(self, split: Any) -> DataLoader[Any]:
        """Collate into an object of our own."""
        return DataLoader(DigitsDataset(split), batch_size=64, collate_fn=OwnBatch)


class OwnBatch:
    """A batch that is not a container."""

    def __init__(self, samples: Any) -> None:
        """Keep the samples."""
        self.samples = samples


class Empty(Plain):
    """A loader without a batch."""

    def legacy_loader(self, split: Any) -> Any:
        """Return nothing to iterate."""
        return itertools.chain()


plain, nan_loss, not_deterministic = Plain, NanLoss, NotDeterministic
other_batches, own_batch_class, empty = OtherBatchesEachTime, OwnBatchClass, Empty
