"""Faults put in on purpose: the negative control of the dual track. A gate that never saw one of these caught proves little."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch

from dualtrack.loading.batch_compare import list_entries
from dualtrack.loading.batch_layout import map_leaves
from dualtrack.loading.transfer_source import PlainHostBatch, host_batches

FaultKind = Literal["error", "hang", "bit flip", "early end", "extra batch", "swapped batches", "worker killed"]


class PlantedError(Exception):
    """The error that was planted."""


class FaultyLoader:
    """A candidate loader with one fault at one batch of one epoch; otherwise the wrapped loader."""

    def __init__(
        self, loader: Any, kind: FaultKind, position: int, epoch: int = 0, hang_seconds: float = 3600.0
    ) -> None:
        """Plant a fault.

        Args:
            loader: A `PooledLoader` or any iterable.
            kind: `error` raises, `hang` sleeps, `bit flip` changes the lowest bit of the first byte, `early end` leaves out the rest, `extra
                batch` gives a batch twice, `swapped batches` changes the place of two, `worker killed` sends SIGKILL to a loader worker.
            position: The batch in the epoch.
            epoch: Counted from 0 in this object.
            hang_seconds: How long `hang` sleeps.
        """
        if kind not in get_args(FaultKind):
            raise ValueError(f"expected one of {', '.join(get_args(FaultKind))}, got {kind!r}")
        self.loader = loader
        self._kind, self._position, self._epoch, self._hang_seconds = kind, position, epoch, hang_seconds
        self._num_epochs = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return (host.views() for host in self.host_batches())

    def host_batches(self) -> Iterator[Any]:
        """Start an epoch of the wrapped loader; see `PooledLoader`."""
        is_faulty = self._num_epochs == self._epoch
        self._num_epochs += 1
        before = {child.pid for child in multiprocessing.active_children()}
        batches = host_batches(self.loader)
        workers = [child.pid for child in multiprocessing.active_children() if child.pid not in before]
        return self._spoil(batches, [pid for pid in workers if pid is not None]) if is_faulty else batches

    def _spoil(self, batches: Iterator[Any], workers: list[int]) -> Iterator[Any]:
        for position, host in enumerate(batches):
            if position != self._position:
                yield host
            elif self._kind == "early end":
                host.release()
                return
            elif self._kind == "swapped batches":
                yield from (*[other for other in [next(batches, None)] if other is not None], host)
            else:
                yield from self._strike(host, workers)

    def _strike(self, host: Any, workers: list[int]) -> Iterator[Any]:
        if self._kind == "error":
            host.release()
            raise PlantedError(f"planted at batch {self._position}")
        if self._kind == "hang":
            time.sleep(self._hang_seconds)
        if self._kind == "worker killed":
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
        if self._kind == "extra batch":
            yield PlainHostBatch(host.index, map_leaves(_copy, host.views()))
        yield _flip(host) if self._kind == "bit flip" else host


def _flip(host: Any) -> Any:
    if host.packed is not None and host.num_bytes:
        host.packed[0] ^= 1
        return host
    batch = map_leaves(_copy, host.views())
    first = next(entry.content for entry in list_entries(batch) if entry.kind == "tensor")
    first.view(-1).view(torch.uint8)[0] ^= 1
    return PlainHostBatch(host.index, batch)


def _copy(leaf: Any) -> Any:
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, torch.Tensor) else leaf
