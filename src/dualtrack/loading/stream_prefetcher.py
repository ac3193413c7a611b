"""Stage 2's drop-in: while step t computes, the copy of batch t+1 runs on its own CUDA stream.

It takes the leased slots of a `PooledLoader`, so that nothing is copied twice on the host, or the batches of any loader. It pins nothing
itself: a leaf in pageable memory is copied as it is and the batch counts as pageable. Without a CUDA device it hands the loader's batches on.
"""

import functools
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import torch

from dualtrack.facts.errors import PrefetchError
from dualtrack.loading.transfer_device import TransferDevice, open_transfer_device
from dualtrack.loading.transfer_pipeline import TransferPipeline
from dualtrack.loading.transfer_source import HostPuller, host_batches
from dualtrack.loading.transfer_stats import PrefetchStats, TransferClock, TransferCounts, describe_transfers

PASS_THROUGH = "pass-through: no CUDA device"
DEADLINE_SECONDS = 600.0  # legacy waits for ever, and a first batch may follow a long worker start


class CUDADataPrefetcher:
    """Overlaps the transfer of coming batches with computing, epoch after epoch.

    Iterate it for batches of any structure, or use the migration document's interface for pairs: `next()` gives `(input, target)` until the epoch is
    over, then `(None, None)`; `preload()` starts the next epoch. The loader stays the caller's to close.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str = "cuda",
        depth: int = 2,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        transfer: TransferDevice | None = None,
    ) -> None:
        """Prepare; the first `next` starts the loader, so constructing draws no random number and starts no process.

        Args:
            loader: A `PooledLoader`, or any iterable that starts an epoch at each `iter`.
            device: Where batches go; `cpu` hands them on unchanged and says so in `stats().mode`.
            depth: Batches in flight while a step computes; one hides a transfer, the second absorbs a late worker.
            deadline_seconds: The longest wait for one host batch.
            transfer: Replaces the operations of `device`, for tests.

        Raises:
            ValueError: The device is not there, or `depth` or the deadline is not positive.
        """
        if depth < 1:
            raise ValueError(
                f"expected depth of at least 1, got {depth}; for no look-ahead iterate the PooledLoader itself"
            )
        if deadline_seconds <= 0:
            raise ValueError(
                f"expected deadline_seconds above 0, got {deadline_seconds}; a wait without a deadline is not offered"
            )
        self.loader = loader
        self.depth = depth
        self._deadline_seconds = deadline_seconds
        self._device = transfer if transfer is not None else open_transfer_device(device)
        self.device = self._device.device
        self._passes_through = transfer is None and self.device.type == "cpu"
        self._clock = TransferClock(self._device)
        self._counts = TransferCounts()
        self._epoch: _Epoch | None = None
        self._look_ahead_note: str | None = None

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch; one that is still under way ends."""
        self._end_epoch()
        self._epoch = self._begin()
        return self._epoch

    def preload(self) -> None:
        """Queue the copies of coming batches, starting an epoch if none is under way.

        An error of the loader waits until `next` comes to its batch.
        """
        if self._epoch is None or self._epoch.is_over:
            iter(self)
        if self._epoch is not None:
            self._epoch.preload()

    def next(self) -> tuple[Any, Any]:
        """Return `(input, target)` on the device, or `(None, None)` when the epoch is over; `preload()` or `iter()` starts the next one.

        Raises:
            ValueError: The loader's batches are no pairs; iterate instead.
            PrefetchError: The batch's copy failed, or no host batch came in time.
            Exception: What the loader raised for this batch; every later call raises it again.
        """
        if self._epoch is None:
            iter(self)
        batch = next(self._epoch, _END) if self._epoch is not None else _END
        if batch is _END:
            return None, None
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            what = f"{type(batch).__qualname__}" + (f" of {len(batch)}" if hasattr(batch, "__len__") else "")
            raise ValueError(
                f"expected batches that are pairs (input, target), got a {what}; iterate over the prefetcher for other structures"
            )
        return batch[0], batch[1]

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type] # a loader without a length raises its own TypeError

    def stats(self) -> PrefetchStats:
        """Return what was seen so far, over all epochs."""
        pipeline = self._epoch.pipeline if self._epoch is not None else None
        in_flight: tuple[int, int, str | None] = (0, 0, self._look_ahead_note)
        if pipeline is not None:
            in_flight = (pipeline.num_in_flight, pipeline.look_ahead, pipeline.look_ahead_note)
        mode = PASS_THROUGH if self._passes_through else self._device.mode
        return describe_transfers(mode, self.depth, self._counts, self._clock, in_flight, self._why_unmeasured())

    def _why_unmeasured(self) -> str:
        return "no CUDA device" if self.device.type == "cpu" else "no batch was delivered and computed on yet"

    def _begin(self) -> "_Epoch":
        if self._passes_through:
            self._counts.num_epochs += 1
            return _Epoch(None, iter(self.loader), self._counts)
        puller = HostPuller(functools.partial(host_batches, self.loader), self._deadline_seconds, self.device)
        return _Epoch(TransferPipeline(puller, self._device, self.depth, self._clock, self._counts), None, self._counts)

    def _end_epoch(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            if epoch.pipeline is not None:
                self._look_ahead_note = epoch.pipeline.look_ahead_note
            epoch.close()

    def close(self) -> None:
        """End the epoch; copies in flight finish before their memory returns. Twice is fine."""
        self._end_epoch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_END = object()


class _Epoch(Iterator[Any]):
    """The batches of one epoch. It keeps no reference to a batch that it has handed out, so the consumer alone decides its life."""

    def __init__(self, pipeline: TransferPipeline | None, plain: Iterator[Any] | None, counts: TransferCounts) -> None:
        self.pipeline = pipeline
        self.is_over = False
        self._plain = plain
        self._counts = counts
        self._is_closed = False

    def preload(self) -> None:
        if self.pipeline is not None:
            self.pipeline.fill(max(1, self.pipeline.look_ahead))

    def __next__(self) -> Any:
        if self._is_closed:
            raise PrefetchError(
                "expected the newest iteration of this prefetcher; a later iter(), preload() or close() has ended this one"
            )
        if self.is_over:
            raise StopIteration
        if self._plain is not None:
            return self._pass_on(self._plain)
        staged = self.pipeline.next() if self.pipeline is not None else None
        if staged is None:
            self.is_over = True
            raise StopIteration
        return staged.batch

    def _pass_on(self, plain: Iterator[Any]) -> Any:
        try:
            batch = next(plain)
        except StopIteration:
            self.is_over = True
            raise
        self._counts.note_delivered(0, False, {})
        return batch

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._plain = None
            if self.pipeline is not None:
                self.pipeline.close()

    def __del__(self) -> None:
        if (
            not sys.is_finalizing()
        ):  # at exit daemon threads stand still, and joining one would only wait for its deadline
            self.close()
