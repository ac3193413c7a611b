"""What a pooled loader saw so far, as one JSON-able record."""

import time

import torch

from dualtrack.facts.observations import Fact

SERIES_LENGTH = 512


class LoaderStats(Fact):
    """Figures of one pooled loader at one moment; None is "not measured", never zero."""

    cap_bytes: int
    pool_current_bytes: int
    """Host bytes that the pool owns now: its slab, or 0 after `close`."""
    pool_peak_bytes: int
    pinned_peak_bytes: int | None
    """Page-locked bytes of the pool at their peak; None without page-locking. torch's own figure does not contain them."""
    torch_pinned_peak_bytes: int | None
    """Peak of what torch's pinned allocator owned in this process, rounded by it to powers of two; None without CUDA."""
    is_page_locked: bool
    lock_failure: str | None
    """What the driver said when page-locking failed and the pool went on pageable."""
    num_slots: int
    slot_bytes: int
    slab_overhead: float
    """(slab - slots x slot bytes) / slab."""
    slots_in_use_bytes: int
    slots_in_use_peak_bytes: int
    producer_wait_seconds: float
    """All producers together, waiting for a free slot."""
    consumer_wait_seconds: float
    num_batches: int
    num_over_cap_batches: int
    """Batches over their slot; they took the pageable path."""
    num_pageable_batches: int
    """Batches whose copy to the device was pageable: over their slot, not packable, or from a pool without its page lock."""
    num_copied_views: int
    """CPU device: batches that were copied out of their slot because no spare slot was left to lend."""
    num_allocations_after_warmup: int
    """Host buffers made for batches after the first one: slabs, copied views, batches on the pageable path."""
    slot_fill_ratio: float | None
    """Mean used share of a filled slot; None before the first."""
    passed_through: dict[str, int]
    """What could not be staged: description -> how many."""
    queue_depth: tuple[tuple[float, int], ...]
    """Seconds since the loader was made, filled slots that wait for the consumer; at most 512 points, evenly thinned."""
    slots_in_use: tuple[tuple[float, int], ...]
    """The same for slots that are not free."""


class ThinnedSeries:
    """A figure over time in bounded memory: when it is full, every second point goes and the step doubles."""

    def __init__(self, length: int = SERIES_LENGTH) -> None:
        """Keep at most `length` points."""
        self._length = length
        self._points: list[tuple[float, int]] = []
        self._stride = 1
        self._num_seen = 0
        self._started = time.monotonic()

    def add(self, value: int) -> None:
        """Note the figure now."""
        if self._num_seen % self._stride == 0 and len(self._points) == self._length:
            del self._points[1::2]
            self._stride *= 2
        if self._num_seen % self._stride == 0:
            self._points.append((round(time.monotonic() - self._started, 6), value))
        self._num_seen += 1

    def points(self) -> tuple[tuple[float, int], ...]:
        """Return the points kept."""
        return tuple(self._points)


class LoaderCounts:
    """The counters behind `LoaderStats`, written by the thread that iterates."""

    def __init__(self) -> None:
        """Start at zero."""
        self.num_batches = 0
        self.num_over_cap_batches = 0
        self.num_pageable_batches = 0
        self.num_copied_views = 0
        self.num_allocations_after_warmup = 0
        self.num_filled_slots = 0
        self.filled_bytes = 0
        self.most_slots_in_use = 0
        self.passed_through: dict[str, int] = {}
        self.queue_depth = ThinnedSeries()
        self.slots_in_use = ThinnedSeries()

    def note_allocation(self) -> None:
        """Count one host buffer; those of the first batch are warm-up."""
        if self.num_batches > 1:
            self.num_allocations_after_warmup += 1

    def note_passed_through(self, listed: dict[str, int]) -> None:
        """Add what one batch did not stage."""
        for reason, num in listed.items():
            self.passed_through[reason] = self.passed_through.get(reason, 0) + num

    def note_slots(self, num_ready: int, num_in_use: int) -> None:
        """Note the queue's depth and the slots in use when a batch is asked for."""
        self.queue_depth.add(num_ready)
        self.slots_in_use.add(num_in_use)
        self.most_slots_in_use = max(self.most_slots_in_use, num_in_use)


def torch_pinned_peak_bytes() -> int | None:
    """Return the peak of torch's own pinned allocator in this process; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
