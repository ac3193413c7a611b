"""The state byte of every slot, in memory shared by trainer and workers, and the only moves between states.

    free -> filling -> ready -> leased -> in flight -> free

`free -> filling -> ready` is the producer's side: a slot range has one producer (a worker, or the trainer itself), so a claim needs no
lock that a killed process could hold. All other moves are the trainer's. A wait for a free slot has no clock of its own, since a sleeping
consumer is no fault: it ends when a slot is free, when the trainer is gone or when the iteration was abandoned. The consumer's wait for a
batch carries the deadline.
"""

import multiprocessing
import time
from collections.abc import Callable
from enum import IntEnum

from dualtrack.facts.errors import PoolError
from dualtrack.loading.shared_slab import SharedBytes

WORD_BYTES = 8  # the generation's number, then one float64 clock per producer
FIRST_POLL_SECONDS = 5e-5
LONGEST_POLL_SECONDS = 0.01  # while a consumer sleeps, a waiting worker wakes 100 times a second
LIVENESS_CHECK_SECONDS = 1.0


class SlotState(IntEnum):
    """Who may touch a slot's bytes."""

    FREE = 0
    FILLING = 1
    """A producer writes."""
    READY = 2
    """Filled; its description is on the way to the trainer."""
    LEASED = 3
    """The consumer holds it; no copy is known to run."""
    IN_FLIGHT = 4
    """A copy reads it until its event has completed."""


class SlotStates:
    """State bytes `[num_slots]`, one clock of waited seconds per producer, and the number of the current iteration."""

    def __init__(self, num_slots: int, num_producers: int) -> None:
        """Start with every slot free."""
        self.num_slots = num_slots
        self.num_producers = num_producers
        self._first_slot = WORD_BYTES * (num_producers + 1)
        self._shared = SharedBytes(self._first_slot + num_slots, "slot-states")

    def __getitem__(self, slot: int) -> SlotState:
        return SlotState(self._shared.map[self._first_slot + slot])

    def count(self, state: SlotState, slots: range | None = None) -> int:
        """Return how many slots (of a range) are in `state`."""
        first, stop = (0, self.num_slots) if slots is None else (slots.start, slots.stop)
        return self._shared.map[self._first_slot + first : self._first_slot + stop].count(state)

    def move(self, slot: int, expected: tuple[SlotState, ...], new: SlotState) -> None:
        """Move one slot to `new`.

        Raises:
            PoolError: The slot is not in one of the `expected` states.
        """
        found = self._shared.map[self._first_slot + slot]
        if found not in expected:
            names = " or ".join(state.name for state in expected)
            raise PoolError(
                f"slot {slot}: expected {names} before {new.name}, found {SlotState(found).name}; a slot has one user at a time"
            )
        self._shared.map[self._first_slot + slot] = new

    def claim(self, slots: range) -> int | None:
        """Take a free slot of the producer's own range for filling; None when there is none."""
        found = self._shared.map.find(b"\0", self._first_slot + slots.start, self._first_slot + slots.stop)
        if found < 0:
            return None
        self._shared.map[found] = SlotState.FILLING
        return found - self._first_slot

    def wait(self, claim: Callable[[], int | None], producer: int, on_wait: Callable[[float], None]) -> int:
        """Return what `claim` gives, polling it until it gives a slot.

        Args:
            claim: Takes a free slot for filling, or returns None.
            producer: Whose clock the waited seconds go to.
            on_wait: Called before each poll with the seconds waited; raises to end the wait.
        """
        slot = claim()
        if slot is not None:
            return slot
        started, pause = time.monotonic(), FIRST_POLL_SECONDS
        waited_before = self._clocks()[producer]
        while slot is None:
            time.sleep(pause)
            waited = time.monotonic() - started
            self._clocks()[producer] = waited_before + waited
            on_wait(waited)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
            slot = claim()
        return slot

    @property
    def generation(self) -> int:
        """Number of the iteration that workers may still wait for."""
        return int.from_bytes(self._shared.map[:WORD_BYTES], "little")

    def abandon_waits(self) -> None:
        """Start a new generation: every worker that waits for a slot of an older one gives up."""
        self._shared.map[:WORD_BYTES] = (self.generation + 1).to_bytes(WORD_BYTES, "little")

    def _clocks(self) -> "memoryview[float]":
        return memoryview(self._shared.map)[WORD_BYTES : self._first_slot].cast("d")

    def producer_wait_seconds(self) -> float:
        """Return the seconds that all producers together have waited for a free slot, those that wait now included."""
        return sum(self._clocks())

    def close(self) -> None:
        """Close the descriptor. The page stays mapped until the last user is gone: a thread may be in the middle of a poll."""
        self._shared.close_descriptor()


def stop_when_abandoned(states: SlotStates, generation: int) -> Callable[[float], None]:
    """Return the `on_wait` of one wait in a worker: it raises `PoolError` when nobody will ever free a slot for this worker.

    Args:
        states: The states that the worker polls.
        generation: Number of the iteration that the worker was started for.
    """
    next_check_seconds = LIVENESS_CHECK_SECONDS

    def check(waited_seconds: float) -> None:
        nonlocal next_check_seconds
        if states.generation != generation:
            raise PoolError("the iteration that this worker belongs to was abandoned; its batch is dropped")
        if waited_seconds >= next_check_seconds:
            next_check_seconds = waited_seconds + LIVENESS_CHECK_SECONDS
            trainer = multiprocessing.parent_process()
            if trainer is not None and not trainer.is_alive():
                raise PoolError("the trainer process is gone; this worker stops waiting for a slot")

    return check
