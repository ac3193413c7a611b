"""The pool as a state machine: slots have one user at a time, bytes never exceed the cap, nothing is reused under a copy."""

import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pool_fakes import FakeEvent, FakePageLock, num_open_descriptors

from dualtrack.facts.errors import CapacityError, PoolError
from dualtrack.loading.pinned_budget import PinnedBudget
from dualtrack.loading.pinned_pool import Lease, PinnedPool, PoolSettings
from dualtrack.loading.slot_states import SlotState


def open_pool(num_slots: int = 3, slot_bytes: int = 4096, **options: Any) -> PinnedPool:
    options = {"wait_seconds": 0.2, **options}
    return PinnedPool(num_slots * slot_bytes, slot_bytes, settings=PoolSettings(**options))


class PoolMachine(RuleBasedStateMachine):
    """Leases are filled with a pattern of their own; whoever still may read a slot must find its pattern.

    Rules pass numbers, since hypothesis keeps every value that it has drawn and would keep a lease alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.budget = PinnedBudget(1 << 20)
        self.lock = FakePageLock()
        self.pool = open_pool(3, budget=self.budget, page_lock=self.lock, wait_seconds=0.01)
        self.held: dict[int, Lease] = {}
        self.views: dict[int, torch.Tensor] = {}
        self.flying: dict[int, tuple[FakeEvent, int]] = {}
        self.pattern = 0

    @property
    def num_busy(self) -> int:
        return len(self.held) + len(self.flying) + len(self.views)

    @precondition(lambda self: self.num_busy < 3)
    @rule()
    def acquire(self) -> None:
        lease = self.pool.acquire(4096)
        self.pattern = self.pattern % 255 + 1
        assert lease.slot not in {other.slot for other in self.held.values()} | {
            slot for _, slot in self.flying.values()
        }
        lease.tensor(4096).fill_(self.pattern)
        self.held[self.pattern] = lease

    @precondition(lambda self: self.num_busy == 3)
    @rule()
    def a_full_pool_makes_the_producer_wait_until_its_deadline(self) -> None:
        started = time.monotonic()
        with pytest.raises(PoolError, match="no slot came free"):
            self.pool.acquire(1)
        assert time.monotonic() - started >= 0.01

    @rule(size=st.integers(4097, 10_000))
    def a_larger_slot_than_there_is_is_refused(self, size: int) -> None:
        with pytest.raises(CapacityError, match="4,096 bytes a slot"):
            self.pool.acquire(size)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        lease.release()
        lease.release()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget_a_lease_but_keep_a_view(self, data: st.DataObject) -> None:
        pattern = data.draw(st.sampled_from(sorted(self.held)))
        self.views[pattern] = self.held.pop(pattern).tensor(4096)[7:9]

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def drop_a_view(self, data: st.DataObject) -> None:
        del self.views[data.draw(st.sampled_from(sorted(self.views)))]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        pattern = data.draw(st.sampled_from(sorted(self.held)))
        lease, event = self.held.pop(pattern), FakeEvent()
        self.flying[pattern] = (event, lease.slot)
        lease.release_after(event)
        lease.release()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete_a_copy(self, data: st.DataObject) -> None:
        event, slot = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying))))
        event.complete()
        self.pool.reap()
        assert self.pool.states[slot] is SlotState.FREE

    @invariant()
    def nobody_writes_where_somebody_reads(self) -> None:
        for pattern, lease in self.held.items():
            assert lease.tensor(4096).eq(pattern).all()
        for pattern, view in self.views.items():
            assert view.eq(pattern).all()
        for pattern, (_, slot) in self.flying.items():
            assert self.pool.states[slot] is SlotState.IN_FLIGHT
            assert set(bytes(self.pool.slab.cut(slot * 4096, 4096))) == {pattern}

    @invariant()
    def every_slot_has_one_user(self) -> None:
        assert self.pool.num_slots_in_use == self.num_busy

    @invariant()
    def bytes_stay_under_the_cap_and_are_all_accounted_for(self) -> None:
        assert (
            self.pool.current_bytes
            == self.pool.peak_bytes
            == self.budget.reserved_bytes
            == sum(self.lock.locked.values())
        )
        assert self.pool.peak_bytes <= self.pool.cap_bytes

    def teardown(self) -> None:
        for event, _ in self.flying.values():
            event.complete()
        self.pool.close()
        self.pool.close()
        assert self.pool.current_bytes == self.budget.reserved_bytes == 0
        assert not self.lock.locked


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


@given(st.integers(1, 1 << 22), st.integers(1, 1 << 20), st.integers(1, 5), st.none() | st.integers(1, 40))
def test_the_slab_never_exceeds_the_cap(
    cap_bytes: int, slot_bytes: int, num_producers: int, num_slots: int | None
) -> None:
    try:
        pool = PinnedPool(cap_bytes, slot_bytes, num_slots=num_slots, num_producers=num_producers)
    except CapacityError as error:
        assert cap_bytes < num_producers * (slot_bytes + 511) + 4096
        assert f"{cap_bytes:,}" in str(error)
        return
    with pool:
        assert pool.slab_bytes <= cap_bytes
        assert pool.num_slots * pool.slot_bytes <= pool.slab_bytes
        assert pool.num_slots % num_producers == 0 < pool.num_slots


@pytest.mark.parametrize("slot_bytes", [2**20 + 1, 2**25 + 1, 9_634_304, 70_000])
def test_a_slot_just_above_a_power_of_two_wastes_at_most_two_per_cent(slot_bytes: int) -> None:
    with PinnedPool(5 * slot_bytes + 4096, slot_bytes) as pool:
        assert (pool.slab_bytes - pool.num_slots * slot_bytes) / pool.slab_bytes <= 0.02


def test_a_cap_below_one_slot_names_the_batch_and_the_smallest_cap_that_works() -> None:
    with pytest.raises(
        CapacityError, match=r"one batch takes 10,240 bytes.* 3 producers .* at least 32,768, got 20,000"
    ):
        PinnedPool(20_000, 10_000, num_producers=3)
    with PinnedPool(32_768, 10_000, num_producers=3) as pool:
        assert pool.num_slots == 3


def test_a_failed_page_lock_is_an_error_and_leaves_nothing_behind() -> None:
    budget, before = PinnedBudget(1 << 20), num_open_descriptors()
    with pytest.raises(PoolError, match="fake driver refuses"):
        open_pool(budget=budget, page_lock=FakePageLock(fail_at_call=1))
    assert budget.reserved_bytes == 0
    assert num_open_descriptors() == before


def test_a_failed_page_lock_can_be_gone_on_without() -> None:
    with open_pool(page_lock=FakePageLock(largest_bytes=1000), on_lock_failure="pageable") as pool:
        assert pool.pinned_bytes == 0
        assert "refuses" in str(pool.slab.lock_failure)
        pool.acquire(10).tensor(10).fill_(1)


def test_close_waits_for_the_copy_in_flight_before_it_unlocks() -> None:
    lock, event = FakePageLock(), FakeEvent()
    pool = open_pool(page_lock=lock, wait_seconds=5)
    pool.acquire(1).release_after(event)
    closing = threading.Thread(target=pool.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive() and lock.locked
    event.complete()
    closing.join(5)
    assert not lock.locked and not pool.is_open


def test_close_gives_up_on_a_copy_that_hangs_and_keeps_the_pages_it_may_read() -> None:
    lock, event = FakePageLock(), FakeEvent()
    pool = open_pool(page_lock=lock)
    pool.acquire(1).release_after(event)
    with pytest.raises(PoolError, match=r"1 copies did not complete within 0.2 s"):
        pool.close()
    assert lock.locked
    event.complete()
    pool.close()
    assert not lock.locked


class InterruptedLock(FakePageLock):
    """A driver call in which Ctrl-C arrives, once."""

    def unregister(self, address: int) -> None:
        self.num_calls += 1
        if self.num_calls == 2:
            raise KeyboardInterrupt
        super().unregister(address)


def test_an_interrupt_inside_close_leaves_the_rest_to_the_next_close() -> None:
    budget, lock, before = PinnedBudget(1 << 20), InterruptedLock(), num_open_descriptors()
    pool = open_pool(budget=budget, page_lock=lock)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert lock.locked and pool.is_open
    pool.close()
    assert not lock.locked and not pool.is_open
    assert budget.reserved_bytes == 0
    del pool
    assert num_open_descriptors() == before


def test_a_driver_that_refuses_to_unlock_is_named_once_and_the_memory_is_returned() -> None:
    budget, lock = PinnedBudget(1 << 20), FakePageLock()
    pool = open_pool(budget=budget, page_lock=lock)
    lock.refuse_to_unlock = True
    with pytest.raises(PoolError, match="refuses to unlock"):
        pool.close()
    pool.close()
    assert budget.reserved_bytes == pool.current_bytes == 0


def test_a_waiting_producer_learns_of_close_within_a_second() -> None:
    pool = open_pool(1, wait_seconds=60)
    held = pool.acquire(1)
    errors: list[BaseException] = []

    def produce() -> None:
        try:
            pool.acquire(1)
        except PoolError as error:
            errors.append(error)

    producer = threading.Thread(target=produce)
    producer.start()
    time.sleep(0.05)
    started = time.monotonic()
    pool.close()
    producer.join(5)
    assert time.monotonic() - started < 1
    assert "is closed" in str(errors[0])
    assert pool.producer_wait_seconds > 0.02
    held.release()


def test_a_slot_freed_by_another_thread_ends_the_wait() -> None:
    with open_pool(1, wait_seconds=10) as pool:
        held = pool.acquire(1)
        threading.Timer(0.05, held.release).start()
        assert pool.acquire(1).slot == 0
        assert pool.producer_wait_seconds >= 0.04


def test_many_threads_never_share_a_slot() -> None:
    with open_pool(4, wait_seconds=30) as pool:
        clashes: list[int] = []

        def work(mark: int) -> None:
            for _ in range(50):
                lease = pool.acquire(64)
                view = lease.tensor(64).fill_(mark)
                time.sleep(0)
                if not view.eq(mark).all():
                    clashes.append(mark)
                lease.release()

        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not clashes
        assert pool.num_slots_in_use == 0


def test_a_released_lease_cannot_be_read() -> None:
    with open_pool() as pool:
        lease = pool.acquire(1)
        lease.release()
        with pytest.raises(PoolError, match="it was released"):
            lease.tensor(1)


def test_a_late_view_of_a_released_lease_does_not_free_the_next_lease_of_its_slot() -> None:
    with open_pool(1) as pool:
        first = pool.acquire(1)
        view = first.tensor(1)
        first.release()
        second = pool.acquire(1)
        del view, first
        gc.collect()
        assert pool.states[second.slot] is SlotState.FILLING


def test_a_forked_child_that_drops_its_copies_of_the_views_frees_nothing() -> None:
    with open_pool(1) as pool:
        lease = pool.acquire(1)
        child = os.fork()
        if child == 0:
            del lease
            gc.collect()
            pool.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.states[lease.slot] is SlotState.FILLING
        assert pool.is_open


def test_views_outlive_a_closed_pool() -> None:
    pool = open_pool()
    lease = pool.acquire(4)
    view = lease.tensor(4).fill_(9)
    pool.close()
    del pool, lease
    gc.collect()
    assert view.tolist() == [9, 9, 9, 9]


def test_a_forgotten_pool_gives_everything_back() -> None:
    budget, lock, before = PinnedBudget(1 << 20), FakePageLock(), num_open_descriptors()
    pool = open_pool(budget=budget, page_lock=lock)
    pool.acquire(1).release_after(done := FakeEvent())
    done.complete()
    del pool
    gc.collect()
    assert budget.reserved_bytes == 0
    assert not lock.locked
    assert num_open_descriptors() == before


def test_a_thousand_pools_leave_descriptors_and_budget_flat() -> None:
    budget, before = PinnedBudget(1 << 20), num_open_descriptors()
    for _ in range(1000):
        with open_pool(2, budget=budget) as pool:
            pool.acquire(1)
    del pool  # the page of its states lives as long as it does
    assert num_open_descriptors() == before
    assert budget.reserved_bytes == 0


def test_settings_without_a_deadline_are_refused() -> None:
    with pytest.raises(ValueError, match="wait_seconds above 0"):
        PoolSettings(wait_seconds=0)
    with pytest.raises(ValueError, match="on_lock_failure"):
        PoolSettings(on_lock_failure="ignore")  # type: ignore[arg-type]


def test_moving_a_slot_out_of_turn_names_both_states() -> None:
    with open_pool() as pool, pytest.raises(PoolError, match="expected READY before LEASED, found FREE"):
        pool.adopt(0)
