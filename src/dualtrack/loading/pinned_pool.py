"""A pool of page-locked slots under a hard byte cap: when it is full the producer waits, and it never grows.

Accounting rule: the pool owns exactly the slab, `slab_bytes` <= `cap_bytes`, from construction to `close()`; `current_bytes` and
`peak_bytes` count those real bytes. The state bytes beside it (one page) are bookkeeping, like the Python objects of the pool.
"""

import itertools
import mmap
import os
import threading
import time
import weakref
from collections import deque
from types import TracebackType
from typing import Self

import torch

from dualtrack.facts.errors import CapacityError, PoolError
from dualtrack.loading.batch_layout import aligned
from dualtrack.loading.page_locking import CopyEvent
from dualtrack.loading.pinned_budget import PinnedBudget
from dualtrack.loading.pinned_slab import PinnedSlab, PoolSettings
from dualtrack.loading.slot_states import SlotState, SlotStates

__all__ = ["Lease", "PinnedBudget", "PinnedPool", "PoolSettings"]

LAST_COPY_SECONDS = (
    10.0  # one copy takes under a second at PCIe rates; at interpreter exit a longer wait would look like a hang
)
HELD = (SlotState.FILLING, SlotState.LEASED)


class PinnedPool:
    """Equal slots in one slab. Each of `num_producers` processes fills its own range of slots, so no lock crosses processes."""

    def __init__(
        self,
        cap_bytes: int,
        slot_bytes: int,
        *,
        num_slots: int | None = None,
        num_producers: int = 1,
        settings: PoolSettings | None = None,
    ) -> None:
        """Reserve, allocate and page-lock the slab.

        Args:
            cap_bytes: The most the pool may ever own.
            slot_bytes: The largest batch, rounded up to a multiple of 512.
            num_slots: The most slots that are of use; None takes all that the cap allows.
            num_producers: Processes that fill slots; each gets the same number, at least one.
            settings: Name, deadline, budget and page lock.

        Raises:
            CapacityError: The cap is below one slot per producer, or the budget or the machine can't give the bytes.
            PoolError: The pages could not be locked.
        """
        if slot_bytes <= 0:
            raise ValueError(f"expected slot_bytes above 0, got {slot_bytes}")
        self.settings = settings or PoolSettings()
        self.cap_bytes = cap_bytes
        self.slot_bytes = aligned(slot_bytes)
        num_fitting = (cap_bytes - cap_bytes % mmap.PAGESIZE) // self.slot_bytes
        if num_fitting < num_producers:
            smallest_bytes = _whole_pages(num_producers * self.slot_bytes)
            raise CapacityError(
                f"pool {self.settings.name!r}: one batch takes {self.slot_bytes:,} bytes and each of {num_producers} producers needs a slot; "
                f"expected cap_bytes of at least {smallest_bytes:,}, got {cap_bytes:,}"
            )
        wanted = num_fitting if num_slots is None else max(num_slots, num_producers)
        self.num_producers = num_producers
        self.slots_per_producer = min(num_fitting, wanted) // num_producers
        self.num_slots = self.slots_per_producer * num_producers
        self.slab_bytes = _whole_pages(self.num_slots * self.slot_bytes)
        self.slab = PinnedSlab(self.slab_bytes, self.settings)
        self.states = SlotStates(self.num_slots, num_producers)
        self.peak_bytes = self.slab_bytes
        self.pinned_peak_bytes = self.pinned_bytes
        self._tickets = [0] * self.num_slots
        self._new_tickets = itertools.count(1)
        self._in_flight: deque[tuple[CopyEvent, int]] = deque()
        self._claim_lock, self._reap_lock = threading.Lock(), threading.Lock()
        self._is_closing = False
        self._free = weakref.finalize(self, _free_at_exit, self.slab, self.states, self._in_flight)

    @property
    def is_open(self) -> bool:
        """False after `close`."""
        return self.slab.is_open

    @property
    def current_bytes(self) -> int:
        """Bytes that the pool owns now: the slab, or 0 after `close`."""
        return self.slab_bytes if self.is_open else 0

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes now."""
        return self.slab_bytes if self.is_open and self.slab.is_page_locked else 0

    @property
    def num_slots_in_use(self) -> int:
        """Slots that are not free now."""
        return self.num_slots - self.states.count(SlotState.FREE) if self.is_open else 0

    @property
    def producer_wait_seconds(self) -> float:
        """Seconds that producers have waited for a free slot so far."""
        return self.states.producer_wait_seconds()

    def slots_of(self, producer: int) -> range:
        """Return the slots that one producer fills."""
        return range(producer * self.slots_per_producer, (producer + 1) * self.slots_per_producer)

    def acquire(self, num_bytes: int) -> "Lease":
        """Take a free slot for filling in this process, waiting for one if the pool is full.

        Raises:
            CapacityError: `num_bytes` is above the slot size; slots don't grow.
            PoolError: No slot came free within `wait_seconds`, or the pool was closed.
        """
        if num_bytes > self.slot_bytes:
            raise CapacityError(
                f"pool {self.settings.name!r}: expected at most {self.slot_bytes:,} bytes a slot, got {num_bytes:,}"
            )
        self.check_open()
        slot = self.states.wait(self._claim_any, 0, self.on_local_wait)
        return Lease(self, slot)

    def _claim_any(self) -> int | None:
        with self._claim_lock:
            self.check_open()
            return self.states.claim(range(self.num_slots))

    def on_local_wait(self, waited_seconds: float) -> None:
        """Serve one poll of a wait in the trainer: take back finished copies, and end the wait at its deadline.

        Raises:
            PoolError: The deadline has passed, or the pool was closed.
        """
        self.check_open()
        self.reap()
        if waited_seconds > self.settings.wait_seconds:
            raise PoolError(f"no slot came free within {self.settings.wait_seconds:g} s; {self.describe()}")

    def describe(self) -> str:
        """Say who holds the slots, and what to do about it."""
        counts = ", ".join(f"{self.states.count(state)} {state.name.lower()}" for state in SlotState)
        return (
            f"pool {self.settings.name!r} has {self.num_slots} slots: {counts}; release host batches before asking for more, "
            "or raise cap_bytes or wait_seconds"
        )

    def check_open(self) -> None:
        """Raise `PoolError` when the pool is closed or closing."""
        if self._is_closing or not self.is_open:
            raise PoolError(f"pool {self.settings.name!r} is closed; open a new loader to go on")

    def adopt(self, slot: int) -> "Lease":
        """Lease a slot whose description has arrived from its producer."""
        self.states.move(slot, (SlotState.READY,), SlotState.LEASED)
        return Lease(self, slot)

    def reap(self) -> None:
        """Free the slots whose copies have completed; never blocks."""
        if not self._in_flight or not self._reap_lock.acquire(blocking=False):
            return
        try:
            for _ in range(len(self._in_flight)):
                event, slot = self._in_flight[0]
                if event.query():
                    self._in_flight.popleft()
                    self.states.move(slot, (SlotState.IN_FLIGHT,), SlotState.FREE)
                else:
                    self._in_flight.rotate(-1)
        finally:
            self._reap_lock.release()

    @property
    def has_copies_in_flight(self) -> bool:
        """True while a copy is not known to have completed."""
        return bool(self._in_flight)

    def reclaim(self) -> None:
        """Free every slot that a producer filled or was filling; all producers must have stopped."""
        for slot in range(self.num_slots):
            if self.states[slot] in (SlotState.FILLING, SlotState.READY):
                self.states.move(slot, (SlotState.FILLING, SlotState.READY), SlotState.FREE)

    def begin_close(self) -> None:
        """Let every wait for this pool end with an error from now on."""
        self._is_closing = True

    def close(self) -> None:
        """Wait for copies in flight, unlock and free the slab. Views that still live keep its pages, unlocked, until they are gone.

        Raises:
            PoolError: A copy did not complete within `wait_seconds`; the slab stays, since the device may still read it.
        """
        if not self.is_open:
            return
        self.begin_close()
        deadline = time.monotonic() + self.settings.wait_seconds
        self.reap()
        while self._in_flight:
            if time.monotonic() > deadline:
                raise PoolError(
                    f"{len(self._in_flight)} copies did not complete within {self.settings.wait_seconds:g} s; is the device hung?"
                )
            time.sleep(1e-3)
            self.reap()
        self.slab.free()
        self.states.close()
        self._free.detach()  # last: an interrupt in the middle leaves the rest to the next call or to the interpreter's exit

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_ticket(self, slot: int) -> int:
        self._tickets[slot] = next(self._new_tickets)
        return self._tickets[slot]

    def _give_back(self, slot: int, ticket: int, event: CopyEvent | None) -> None:
        """End the lease `ticket`; a lease that has ended already is left alone."""
        if self._tickets[slot] != ticket or not self.is_open:
            return
        self._tickets[slot] = 0
        if event is None:
            self.states.move(slot, HELD, SlotState.FREE)
        else:
            self.states.move(slot, HELD, SlotState.IN_FLIGHT)
            self._in_flight.append((event, slot))


class Lease:
    """One slot in the hands of one user, until it is released or the last tensor over it is gone."""

    def __init__(self, pool: PinnedPool, slot: int) -> None:
        """Take the slot over; it is FILLING or LEASED already."""
        self.slot = slot
        self._pool = pool
        self._ticket = pool._open_ticket(slot)
        exporter = pool.slab.cut(slot * pool.slot_bytes, pool.slot_bytes)
        last_view_gone = weakref.finalize(exporter, _free_unseen, weakref.ref(pool), slot, self._ticket, os.getpid())
        last_view_gone.atexit = False
        self._tensor: torch.Tensor | None = torch.frombuffer(exporter, dtype=torch.uint8)

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """Return the first `num_bytes` of the slot, uint8 `[num_bytes]`.

        Raises:
            PoolError: The lease has ended.
        """
        if self._tensor is None:
            raise PoolError(
                f"slot {self.slot}: expected a living lease, it was released; read a batch before you release it"
            )
        return self._tensor[:num_bytes]

    def release(self) -> None:
        """Give the slot back now: no copy reads it. Twice is fine."""
        self._tensor = None
        self._pool._give_back(self.slot, self._ticket, None)

    def release_after(self, event: CopyEvent) -> None:
        """Give the slot back when `event`, recorded after the last copy from it, has completed."""
        self._pool._give_back(
            self.slot, self._ticket, event
        )  # first: the last view's end frees a slot that is not yet in flight
        self._tensor = None


def _free_unseen(pool_reference: "weakref.ref[PinnedPool]", slot: int, ticket: int, owner: int) -> None:
    """Free a slot whose last view is gone. A forked child drops its copies of the trainer's views; that frees nothing."""
    pool = pool_reference()
    if pool is not None and os.getpid() == owner:
        pool._give_back(slot, ticket, None)


def _free_at_exit(slab: PinnedSlab, states: SlotStates, in_flight: deque[tuple[CopyEvent, int]]) -> None:
    """Free a pool that was closed, forgotten, or is open when the interpreter exits; a slab under a copy that hangs is left alone."""
    deadline = time.monotonic() + LAST_COPY_SECONDS
    while in_flight and time.monotonic() < deadline:
        if in_flight[0][0].query():
            in_flight.popleft()
        else:
            time.sleep(1e-3)
    if not in_flight:
        slab.free()
        states.close()


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
