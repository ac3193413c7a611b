"""What a prefetcher saw: how long copies took, how much of them the training step had to wait for, and when each ran.

Times come from CUDA events on the two streams and are read only after they have completed, so measuring waits for nothing. Where there are
no such events a figure is None, never zero.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dualtrack.facts.observations import Fact
from dualtrack.loading.transfer_device import Transfer, TransferDevice

TIMELINE_LENGTH = 64
MOST_PENDING = 1024  # CUDA's launch queue is about as long: more unread events than this can't pile up in a healthy run


class BatchTimes(Fact):
    """One batch on the timeline; seconds since the first copy shown."""

    batch: int
    """Position among all batches delivered so far, over epochs."""
    copy_start_seconds: float
    copy_end_seconds: float
    compute_start_seconds: float
    """The consumer's stream goes on with this batch."""
    compute_end_seconds: float
    """All that the consumer queued with this batch is done."""


class PrefetchStats(Fact):
    """Figures of one prefetcher at one moment; None is "not measured", never zero."""

    mode: str
    """`CUDA side stream`, or `pass-through: no CUDA device`."""
    depth: int
    look_ahead_batches: int
    """Batches that are in flight while a step computes: `depth`, or 0 while look-ahead would change what the loader draws."""
    look_ahead_note: str | None
    """Why look-ahead is off."""
    num_epochs: int
    num_batches: int
    """Delivered batches."""
    num_bytes: int
    """Bytes copied for them."""
    num_pageable_batches: int
    """Batches with at least one leaf that was not copied asynchronously from page-locked memory."""
    num_errors: int
    passed_through: dict[str, int]
    """What was not copied by the side stream: description -> how many."""
    stall_seconds: float
    """Host time in which the consumer waited for host batches."""
    queue_depth: int
    """Batches in flight now."""
    mean_queue_depth: float | None
    """Batches in flight when the consumer asked for the next one."""
    copy_seconds: float | None
    """Device time of the copies of the measured batches."""
    exposed_transfer_seconds: float | None
    """The part of it in which the consumer's stream had nothing left to do but wait."""
    overlap_ratio: float | None
    """1 - exposed / copy: the share of the transfer that computing hid."""
    num_measured_batches: int
    unmeasured_reason: str | None = None
    timeline: tuple[BatchTimes, ...] = ()
    """The last batches."""


@dataclass
class TransferCounts:
    """Sums over the epochs of one owner."""

    num_epochs: int = 0
    num_batches: int = 0
    num_bytes: int = 0
    num_pageable_batches: int = 0
    num_errors: int = 0
    stall_seconds: float = 0.0
    queue_depths: int = 0
    num_asked: int = 0
    passed_through: Counter[str] = field(default_factory=Counter)

    def note_delivered(self, num_bytes: int, is_pageable: bool, passed_through: dict[str, int]) -> None:
        """Count one delivered batch."""
        self.num_batches += 1
        self.num_bytes += num_bytes
        self.num_pageable_batches += is_pageable
        self.passed_through.update(passed_through)


class _Times(NamedTuple):
    batch: int
    transfer: Transfer
    ready: Any
    """On the consumer's stream before it waits for the copy."""
    begin: Any
    """Behind the wait."""


class TransferClock:
    """Pairs the events of each delivered batch and adds them up once they have completed."""

    def __init__(self, device: TransferDevice) -> None:
        """Measure on `device`."""
        self._device = device
        self._open: _Times | None = None
        self._pending: deque[tuple[_Times, Any]] = deque()
        self._recent: deque[tuple[_Times, Any]] = deque(maxlen=TIMELINE_LENGTH)
        self._num_delivered = 0
        self.copy_seconds = 0.0
        self.exposed_seconds = 0.0
        self.num_measured = 0

    def before_wait(self) -> Any:
        """Mark the consumer's stream when it asks for a batch: here the step before ends."""
        done = self._device.mark()
        if self._open is not None and done is not None and len(self._pending) < MOST_PENDING:
            self._pending.append((self._open, done))
        self._open = None
        self._collect()
        return done

    def after_wait(self, transfer: Transfer, ready: Any) -> None:
        """Mark the consumer's stream behind its wait for the copy."""
        if transfer.start is not None and ready is not None:
            self._open = _Times(self._num_delivered, transfer, ready, self._device.mark())
        self._num_delivered += 1

    def _collect(self) -> None:
        while self._pending:
            times, done = self._pending[0]
            # a consumer that changes its stream may complete the later of two events first
            events = (done, times.begin, times.ready, times.transfer.end, times.transfer.start)
            if not all(event.query() for event in events):
                return
            self._pending.popleft()
            seconds = self._device.seconds_between
            copy = seconds(times.transfer.start, times.transfer.end)
            self.copy_seconds += copy
            self.exposed_seconds += max(0.0, min(copy, seconds(times.ready, times.transfer.end)))
            self.num_measured += 1
            self._recent.append((times, done))

    def timeline(self) -> tuple[BatchTimes, ...]:
        """Return the last measured batches."""
        self._collect()
        if not self._recent:
            return ()
        origin = self._recent[0][0].transfer.start
        return tuple(
            BatchTimes(
                batch=times.batch,
                copy_start_seconds=self._device.seconds_between(origin, times.transfer.start),
                copy_end_seconds=self._device.seconds_between(origin, times.transfer.end),
                compute_start_seconds=self._device.seconds_between(origin, times.begin),
                compute_end_seconds=self._device.seconds_between(origin, done),
            )
            for times, done in self._recent
        )


def describe_transfers(
    mode: str,
    depth: int,
    counts: TransferCounts,
    clock: TransferClock,
    in_flight: tuple[int, int, str | None],
    unmeasured_reason: str,
) -> PrefetchStats:
    """Join counts and clock into one record.

    Args:
        mode: Kind of transfer, in words.
        depth: As the prefetcher was asked for.
        counts: Sums so far.
        clock: Times so far.
        in_flight: Batches in flight now, batches it looks ahead, and why it does not look ahead.
        unmeasured_reason: Why there are no times, if there are none.
    """
    timeline = clock.timeline()  # reads what has completed since, so it comes before the sums
    is_measured = clock.num_measured > 0
    return PrefetchStats(
        mode=mode, depth=depth, queue_depth=in_flight[0], look_ahead_batches=in_flight[1], look_ahead_note=in_flight[2],
        num_epochs=counts.num_epochs, num_batches=counts.num_batches, num_bytes=counts.num_bytes,
        num_pageable_batches=counts.num_pageable_batches, num_errors=counts.num_errors, passed_through=dict(counts.passed_through),
        stall_seconds=counts.stall_seconds, mean_queue_depth=counts.queue_depths / counts.num_asked if counts.num_asked else None,
        copy_seconds=clock.copy_seconds if is_measured else None,
        exposed_transfer_seconds=clock.exposed_seconds if is_measured else None,
        overlap_ratio=1 - clock.exposed_seconds / clock.copy_seconds if clock.copy_seconds > 0 else None,
        num_measured_batches=clock.num_measured, unmeasured_reason=None if is_measured else unmeasured_reason, timeline=timeline,
    )  # fmt: skip
