"""What a prefetcher saw: how long copies took, how much of them the training step had to wait for, and when each ran.

Times come from CUDA events on the two streams and are read only after they have completed, so measuring waits for nothing. Where there are
no such events a figure is None, never zero.
"""

from collections import deque
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
        while self._pending and self._pending[0][1].query() and self._pending[0][0].transfer.end.query():
            times, done = self._pending.popleft()
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
