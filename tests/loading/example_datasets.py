"""Datasets and collates of the loader tests; in a module of their own, so that spawned workers can import them."""

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def augment(values: torch.Tensor) -> torch.Tensor:
    """Change a sample with all three generators that workers seed."""
    return values * random.random() + float(np.random.uniform()) + torch.rand(values.shape)


class AugmentedDataset(Dataset[Any]):
    """Map-style samples of several types, augmented from `random`, `numpy` and `torch`."""

    def __init__(self, num_samples: int = 37) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": augment(torch.full((3, 4, 5), float(index))),
            "label": index,
            "weight": index / 3,
            "array": np.arange(4, dtype=np.int16) + index,
            "scalar": np.float32(index),
            "name": f"sample-{index}",
            "pair": (torch.tensor([index]), [torch.tensor(index % 2 == 0)]),
        }


class AugmentedStream(IterableDataset[Any]):
    """Iterable samples, split between workers in strides, of odd number."""

    def __init__(self, num_samples: int = 37) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        samples = AugmentedDataset(self.num_samples)
        return (samples[index] for index in range(first, self.num_samples, step))


class WholeBatches(IterableDataset[Any]):
    """Yields ready batches, for `batch_size=None`."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first = 0 if worker is None else 100 * worker.id
        return (torch.full((5, 2), float(first + number)) for number in range(4))


class Images(Dataset[Any]):
    """Samples of a fixed number of bytes: `[num_bytes]` uint8 filled with the index modulo 251."""

    def __init__(self, num_samples: int, num_bytes: int = 1000) -> None:
        self.num_samples, self.num_bytes = num_samples, num_bytes

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.num_bytes,), index % 251, dtype=torch.uint8)


class SizedBatches(Dataset[Any]):
    """One sample is one batch of a given number of float32 values."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), float(index))


class Point(NamedTuple):
    """A named tuple as a batch."""

    x: Any
    y: Any


class TaggedTuple(Point):
    """A named tuple with an attribute of its own."""


class TaggedDict(dict[str, Any]):
    """A dict subclass with an attribute of its own."""

    source = "unset"


class TaggedList(list[Any]):
    """A list subclass with an attribute of its own."""

    source = "unset"


@dataclass(frozen=True)
class Pair:
    """A frozen dataclass as a batch."""

    left: Any
    right: Any


class Opaque:
    """An object that nobody knows how to copy with other contents."""

    def __init__(self, held: Any) -> None:
        self.held = held


def custom_collate(samples: list[Any]) -> Any:
    """Return a batch of unusual containers."""
    images = torch.stack([sample["image"] for sample in samples])
    labels = torch.tensor([sample["label"] for sample in samples])
    tagged = TaggedDict(images=images.transpose(1, 2), labels=labels)
    tagged.source = "custom"
    return OrderedDict(
        tagged=tagged,
        point=Point(images[:, 0], labels),
        pair=Pair(labels + 1, None),
        names=[sample["name"] for sample in samples],
    )


class FailsAt(Dataset[Any]):
    """Raises a given error at one index."""

    def __init__(self, error: Any, position: int = 2) -> None:
        self.error, self.position = error, position

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.position:
            raise self.error
        return torch.tensor([index])


class OddError(Exception):
    """An exception whose constructor takes no message."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"odd {code} at {place}")
        self.code, self.place = code, place
