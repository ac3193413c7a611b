"""Handwritten digits: 1,797 real 8 x 8 images, a small CNN, and the legacy pipeline as people write it.

The pipeline is the *legacy* side of every comparison and is never improved. The model has no BatchNorm and no dropout, so that many
ranks can equal one.
"""

import csv
import gzip
import importlib.resources
import io
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dualtrack.training.workload import Split

NUM_TRAIN_SAMPLES = 1437  # four fifths of the 1,797, in file order


class DigitsDataset(Dataset[tuple[torch.Tensor, int]]):
    """Images with random shift, gain and noise, drawn in the worker from `random`, `numpy.random` and `torch`."""

    def __init__(self, split: Split) -> None:
        """Read the bundled CSV and keep the rows of `split`."""
        packed = importlib.resources.files("dualtrack.workloads").joinpath("data/optdigits.csv.gz").read_bytes()
        rows = np.array(list(csv.reader(io.StringIO(gzip.decompress(packed).decode()))), dtype=np.int64)
        rows = rows[:NUM_TRAIN_SAMPLES] if split == "train" else rows[NUM_TRAIN_SAMPLES:]
        self.images = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 8, 8).astype(np.float32) / 16)
        self.labels = rows[:, -1].tolist()
        self.augment = split == "train"

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return one image `[1, 8, 8]` float32 and its class 0..9."""
        image = self.images[index]
        if self.augment:
            image = torch.roll(image, shifts=(random.randint(-1, 1), random.randint(-1, 1)), dims=(1, 2))
            image = image * float(np.random.uniform(0.9, 1.1)) + 0.02 * torch.randn(1, 8, 8)
        return image, self.labels[index]


class Digits:
    """The bundled digits job: batch 64, two loader workers, SGD."""

    name = "digits"

    def legacy_loader(self, split: Split) -> DataLoader[Any]:
        """Build the old synchronous loader; pageable memory, new workers every epoch."""
        return DataLoader(DigitsDataset(split), batch_size=64, shuffle=split == "train", num_workers=2)

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Copy images `[B, 1, 8, 8]` and classes `[B]` with two blocking copies."""
        images, labels = batch
        return [images.to(device), labels.to(device)]

    def model(self) -> nn.Module:
        """Build a CNN of 25,826 parameters with GroupNorm."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 40), nn.ReLU(), nn.Linear(40, 10),
        )  # fmt: skip

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build SGD with momentum 0.9."""
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean cross entropy over the batch."""
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)


def create() -> Digits:
    """Build the workload; `load_workload("digits")` calls this."""
    return Digits()
