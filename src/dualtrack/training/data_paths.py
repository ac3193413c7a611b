"""The ways from a workload's legacy loader to device batches, by name.

`legacy` is the old trainer's own; `pinned` is what people try first; `pooled` is stage 1 and `prefetched` stage 2; `cached` hands out one
batch again and again, the most that any loader could win. Only `legacy` is a baseline.
"""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader

from dualtrack.facts.errors import LoaderError
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.stream_prefetcher import CUDADataPrefetcher
from dualtrack.training.workload import Split, Workload

DEFAULT_CAP_BYTES = 64 * 2**20


def poolable_loader(workload: Workload, loader: Any) -> DataLoader[Any]:
    """Return `loader` if a pool can go around it.

    Raises:
        LoaderError: It is no torch `DataLoader`.
    """
    if not isinstance(loader, DataLoader):
        raise LoaderError(
            f"expected a torch DataLoader from {workload.name}.legacy_loader(), got {type(loader).__name__}; only that can be pooled"
        )
    return loader


class DataPath(ABC):
    """Delivers an epoch of device batches after another; owns its pool, stream and workers until closed."""

    def __init__(self, workload: Workload, device: torch.device, split: Split) -> None:
        """Build the workload's legacy loader; the caller has seeded the generators."""
        self.workload, self.device = workload, device
        self.loader = workload.legacy_loader(split)

    @abstractmethod
    def epoch(self) -> Generator[Any, None, None]:
        """Iterate over one epoch of device batches."""

    def stats(self) -> dict[str, Any]:
        """Return the path's own counters as plain data; empty where there are none."""
        return {}

    def pool_bytes(self) -> int | None:
        """Return bytes of pool slots in use now, or None for a path without a pool."""
        return None

    def close(self) -> None:  # noqa: B027 (a path without resources has nothing to close)
        """Give everything back; twice is fine."""


class LegacyPath(DataPath):
    """The old trainer's path: its loader and its own copy."""

    def epoch(self) -> Generator[Any, None, None]:
        """Iterate over one epoch of device batches."""
        for batch in self.loader:
            yield self.workload.to_device(batch, self.device)


class PinnedPath(DataPath):
    """The usual first attempt: `pin_memory=True` and `non_blocking=True`; needs CUDA."""

    def epoch(self) -> Generator[Any, None, None]:
        """Iterate over one epoch of device batches."""
        if self.device.type != "cuda" or not isinstance(self.loader, DataLoader):
            raise ValueError(
                "the pinned path needs a CUDA device and a torch DataLoader; measure it on a machine with both"
            )
        loader = copy.copy(self.loader)
        loader.pin_memory = True
        for batch in loader:
            yield torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda leaf: leaf.to(self.device, non_blocking=True), batch
            )


class PooledPath(DataPath):
    """Stage 1: the bounded pool and one packed copy on the consumer's stream."""

    def __init__(
        self, workload: Workload, device: torch.device, split: Split, cap_bytes: int, slot_bytes: int | None
    ) -> None:
        """Wrap the legacy loader in a pool of at most `cap_bytes`."""
        super().__init__(workload, device, split)
        self.pooled = PooledLoader(
            poolable_loader(workload, self.loader),
            device=device,
            cap_bytes=cap_bytes,
            slot_bytes=slot_bytes,
            name=split,
        )

    def epoch(self) -> Generator[Any, None, None]:
        """Iterate over one epoch of device batches."""
        yield from self.pooled

    def stats(self) -> dict[str, Any]:
        """Return the pool's record."""
        return self.pooled.stats().model_dump(mode="json")

    def pool_bytes(self) -> int | None:
        """Return bytes of pool slots in use now."""
        return self.pooled.stats().slots_in_use_bytes

    def close(self) -> None:
        """Close the pool; twice is fine."""
        self.pooled.close()


class PrefetchedPath(PooledPath):
    """Stage 2: the pool, and the copy of batch t+1 on its own stream while step t computes."""

    def __init__(
        self, workload: Workload, device: torch.device, split: Split, cap_bytes: int, slot_bytes: int | None
    ) -> None:
        """Put the prefetcher on top of the pool."""
        super().__init__(workload, device, split, cap_bytes, slot_bytes)
        self.prefetcher = CUDADataPrefetcher(self.pooled, device)

    def epoch(self) -> Generator[Any, None, None]:
        """Iterate over one epoch of device batches."""
        yield from self.prefetcher

    def stats(self) -> dict[str, Any]:
        """Return the pool's record and the prefetcher's under `prefetcher`."""
        return {**super().stats(), "prefetcher": self.prefetcher.stats().model_dump(mode="json")}

    def close(self) -> None:
        """Close the prefetcher, then the pool."""
        self.prefetcher.close()
        super().close()


class CachedPath(DataPath):
    """One device batch for ever: the ceiling of what a data path can deliver, not a way to train."""

    def epoch(self) -> Generator[Any, None, None]:
        """Iterate over as many batches as the legacy epoch has, all the same one."""
        batch = self.workload.to_device(next(iter(self.loader)), self.device)
        for _ in range(len(self.loader) if isinstance(self.loader, Sized) else 1):
            yield batch


@contextlib.contextmanager
def open_data_path(
    name: str,
    workload: Workload,
    device: torch.device,
    *,
    split: Split = "train",
    cap_bytes: int = DEFAULT_CAP_BYTES,
    slot_bytes: int | None = None,
) -> Iterator[DataPath]:
    """Open the path called `name` and close it afterwards.

    Args:
        name: `legacy`, `pinned`, `pooled`, `prefetched` or `cached`.
        workload: The training job.
        device: Where batches go.
        split: `train` or `eval`.
        cap_bytes: Most bytes of page-locked memory that the path may hold; only for paths with a pool.
        slot_bytes: Bytes of one slot, from the freeze's largest batch; None divides the cap.

    Raises:
        ValueError: The name is unknown.
        CapacityError: The cap is below one batch or above what the machine has.
    """
    plain: dict[str, type[DataPath]] = {"legacy": LegacyPath, "pinned": PinnedPath, "cached": CachedPath}
    pooled: dict[str, type[PooledPath]] = {"pooled": PooledPath, "prefetched": PrefetchedPath}
    if name not in {**plain, **pooled}:
        raise ValueError(f"expected one of {', '.join([*plain, *pooled])}, got {name!r}")
    path = (
        plain[name](workload, device, split)
        if name in plain
        else pooled[name](workload, device, split, cap_bytes, slot_bytes)
    )
    try:
        yield path
    finally:
        path.close()
