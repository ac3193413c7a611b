"""Faults of memory pool and loader that practitioners report, each with its right behaviour."""

import gc
import multiprocessing
import random
import threading
import time
from typing import Any

import psutil
import pytest
import torch
from example_datasets import AugmentedDataset, Images, Opaque, SizedBatches
from pool_fakes import FakeEvent, FakePageLock, num_open_descriptors, same, seed_all
from torch.utils.data import DataLoader

from dualtrack.facts.errors import CapacityError, PoolError
from dualtrack.loading.pinned_budget import PinnedBudget
from dualtrack.loading.pooled_loader import PooledLoader


def one_by_one(samples: list[Any]) -> Any:
    """Collate for `batch_size=1`: the sample is the batch."""
    return samples[0]


def tiny_loader(num_samples: int = 40, num_workers: int = 0, **options: Any) -> PooledLoader:
    legacy = DataLoader(Images(num_samples), batch_size=4, num_workers=num_workers)
    return PooledLoader(legacy, "cpu", options.pop("cap_bytes", 1 << 18), **{"slot_bytes": 4096, **options})


@pytest.mark.parametrize("num_workers", [2, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 16 worker:UserWarning")
def test_a_sleeping_consumer_makes_producers_wait_and_the_wait_is_reported(num_workers: int) -> None:
    legacy = DataLoader(Images(4 * 40 * num_workers), batch_size=4, num_workers=num_workers, prefetch_factor=8)
    cap_bytes = num_workers * 3 * 4096
    with PooledLoader(legacy, "cpu", cap_bytes, slot_bytes=4096) as loader:
        iterator = loader.host_batches()
        next(iterator).release()
        time.sleep(0.5)
        stats = loader.stats()
        assert stats.slots_in_use_bytes == cap_bytes
        assert stats.producer_wait_seconds > 0.2
        assert len([batch.release() for batch in iterator]) > 0
        assert loader.stats().pool_peak_bytes <= cap_bytes
        assert loader.stats().slots_in_use_bytes == 0


def test_fifty_epochs_of_random_sizes_allocate_nothing_and_stay_flat() -> None:
    sizes = [random.Random(5).randrange(1, 2000) for _ in range(100)]
    legacy = DataLoader(SizedBatches(sizes), batch_size=1, collate_fn=one_by_one)
    with PooledLoader(legacy, "cpu", 1 << 18, slot_bytes=8000) as loader:
        list(loader)
        before, descriptors, resident = loader.stats(), num_open_descriptors(), psutil.Process().memory_info().rss
        for _ in range(50):
            for size, batch in zip(sizes, loader, strict=True):
                assert batch.shape == (size,)
        after = loader.stats()
    assert after.num_batches == before.num_batches + 5000
    assert after.num_allocations_after_warmup == before.num_allocations_after_warmup
    assert after.pool_peak_bytes == before.pool_peak_bytes == before.pool_current_bytes
    assert num_open_descriptors() <= descriptors
    assert psutil.Process().memory_info().rss - resident < 8 << 20
    assert len(after.queue_depth) <= 512


def test_a_cap_above_the_machine_is_refused_with_the_figures_and_never_tried(machine_with: Any) -> None:
    lock = FakePageLock()
    budget = PinnedBudget(1 << 40, read_limits=lambda: machine_with(1 << 30))
    with pytest.raises(CapacityError, match=r"headroom 1,073,741,824 bytes \(available"):
        PooledLoader(DataLoader(Images(4)), "cpu", 3 << 30, budget=budget, page_lock=lock)
    assert lock.num_calls == 0
    assert budget.reserved_bytes == 0


def test_pools_of_one_budget_together_stay_under_its_figure() -> None:
    budget = PinnedBudget(100_000)
    train = tiny_loader(budget=budget, cap_bytes=60_000, name="train")
    with train, pytest.raises(CapacityError, match=r"pool 'eval': expected at most .* pools that hold the rest: train"):
        tiny_loader(budget=budget, cap_bytes=200_000, name="eval", slot_bytes=32_768)
    with tiny_loader(budget=budget, cap_bytes=60_000, name="eval"):
        assert 0 < budget.reserved_bytes <= 60_000


def test_page_locking_that_fails_goes_on_pageable_and_counted_if_asked() -> None:
    seed_all()
    expected = list(DataLoader(Images(12), batch_size=4))
    legacy = DataLoader(Images(12), batch_size=4)
    lock = FakePageLock(fail_at_call=1)
    with PooledLoader(legacy, "cpu", 1 << 16, page_lock=lock, on_lock_failure="pageable") as loader:
        assert same(list(loader), expected)
        stats = loader.stats()
    assert (stats.num_batches, stats.num_pageable_batches, stats.pinned_peak_bytes) == (3, 3, 0)
    assert "refuses" in str(stats.lock_failure)
    with pytest.raises(PoolError, match="refuses"):
        PooledLoader(legacy, "cpu", 1 << 16, page_lock=FakePageLock(largest_bytes=1000))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_one_huge_sample_takes_the_counted_pageable_path_and_slots_do_not_grow(num_workers: int, position: int) -> None:
    sizes = [100] * 8
    sizes[position] = 5000
    legacy = DataLoader(SizedBatches(sizes), batch_size=1, num_workers=num_workers)
    expected = list(legacy)
    with PooledLoader(legacy, "cpu", 1 << 17, slot_bytes=1024) as loader:
        assert same(list(loader), expected)
        stats = loader.stats()
        for batch in loader.host_batches():
            assert batch.is_pageable == (batch.packed is None) == (batch.index == position)
            if batch.is_pageable:
                with pytest.raises(PoolError, match=r"is pageable .it takes 20,480 bytes"):
                    batch.unpack(torch.empty(0, dtype=torch.uint8))
    assert (stats.num_over_cap_batches, stats.num_pageable_batches, stats.slot_bytes) == (1, 1, 1024)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_huge_sample_is_an_error_at_its_place_if_asked(num_workers: int) -> None:
    legacy = DataLoader(SizedBatches([100, 100, 5000, 100]), batch_size=1, num_workers=num_workers)
    with PooledLoader(legacy, "cpu", 1 << 17, slot_bytes=1024, over_size="error") as loader:
        iterator = iter(loader)
        assert len([next(iterator), next(iterator)]) == 2
        with pytest.raises(CapacityError, match="pass slot_bytes=20480"):
            next(iterator)
        assert next(iterator)[0, 0] == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cap_below_one_batch_names_the_batch_and_the_smallest_cap_that_works(num_workers: int) -> None:
    legacy = DataLoader(Images(40, num_bytes=5000), batch_size=4, num_workers=num_workers)
    with (
        PooledLoader(legacy, "cpu", 16_384) as loader,
        pytest.raises(CapacityError, match=r"one batch takes 20,480 bytes") as caught,
    ):
        next(iter(loader))
    smallest = max(1, num_workers) * 20_480
    assert f"smallest cap that works is {smallest:,}" in str(caught.value)
    with PooledLoader(legacy, "cpu", smallest, slot_bytes=20_480) as loader:
        assert same(list(loader), list(legacy))


def test_an_evaluation_loader_opened_during_training_has_its_own_pool() -> None:
    with tiny_loader(num_workers=2, name="train") as train:
        training = iter(train)
        first = next(training)
        with tiny_loader(num_samples=8, name="eval", cap_bytes=8192) as evaluation:
            before = train.stats()
            assert len(list(evaluation)) == 2
            assert train.stats().num_batches == before.num_batches
            assert evaluation.stats().pool_peak_bytes <= 8192
        assert 1 + len(list(training)) == 10
        assert first[0, 0] == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_close_while_producers_wait_on_a_full_pool_returns_within_a_second(num_workers: int) -> None:
    budget, lock = PinnedBudget(1 << 20), FakePageLock()
    loader = tiny_loader(400, num_workers, budget=budget, page_lock=lock, cap_bytes=8192 * max(1, num_workers))
    iterator = loader.host_batches()
    held = [next(iterator) for _ in range(2)]
    time.sleep(0.2)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 1
    assert loader.stats().pool_current_bytes == budget.reserved_bytes == 0
    assert not lock.locked
    del held, iterator


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_slot_is_not_handed_out_again_before_its_copy_has_finished(num_workers: int) -> None:
    num_slots = max(1, num_workers)
    legacy = DataLoader(Images(16), batch_size=1, num_workers=num_workers)
    with PooledLoader(legacy, "cpu", 4096 * num_slots, slot_bytes=4096) as loader:
        received = []

        def copy_slowly(source: torch.Tensor, event: FakeEvent) -> None:
            time.sleep(0.03)
            received.append(source.clone())
            event.complete()

        for batch in loader.host_batches():
            event = FakeEvent()
            assert batch.packed is not None
            threading.Thread(target=copy_slowly, args=(batch.packed, event)).start()
            batch.release_after(event)
    assert [copied[:1000].unique().tolist() for copied in sorted(received, key=lambda copied: int(copied[0]))] == [
        [index] for index in range(16)
    ]


def test_a_thousand_abandoned_iterators_leave_everything_flat() -> None:
    with tiny_loader() as loader:
        next(iter(loader))
        gc.collect()
        descriptors, threads = num_open_descriptors(), threading.active_count()
        for _ in range(1000):
            next(iter(loader))
        gc.collect()
        assert num_open_descriptors() == descriptors
        assert threading.active_count() == threads
        assert loader.stats().slots_in_use_bytes == 0


def test_abandoned_iterators_with_workers_leave_no_process_behind() -> None:
    with tiny_loader(num_workers=2) as loader:
        next(iter(loader))
        gc.collect()
        descriptors = num_open_descriptors()
        for _ in range(15):
            next(iter(loader))
        gc.collect()
        assert multiprocessing.active_children() == []
        assert num_open_descriptors() == descriptors
        assert loader.stats().slots_in_use_bytes == 0


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_batches_kept_in_a_list_never_change_and_never_starve_the_pool(num_workers: int, slots: int) -> None:
    legacy = DataLoader(Images(60), batch_size=4, num_workers=num_workers)
    with PooledLoader(legacy, "cpu", slots * max(1, num_workers) * 4096, slot_bytes=4096) as loader:
        kept = list(loader)
        assert same(kept, list(legacy))
        assert loader.stats().num_copied_views > 0
        del kept
        gc.collect()
        assert loader.stats().slots_in_use_bytes == 0


def test_a_view_of_a_view_of_a_kept_batch_keeps_its_slot() -> None:
    with tiny_loader(num_workers=2) as loader:
        iterator = iter(loader)
        kept = next(iterator)[1:2].numpy()[0, 10:20]
        for _ in iterator:
            pass
        assert (kept == 1).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_break_at_batch_three_then_iterate_again_starts_at_zero(num_workers: int) -> None:
    with tiny_loader(num_workers=num_workers) as loader:
        for number, _ in enumerate(loader):
            if number == 3:
                break
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 40, 4))


def test_a_second_iterator_ends_the_first_with_a_clear_error() -> None:
    with tiny_loader(num_workers=2) as loader:
        first = iter(loader)
        next(first)
        second = iter(loader)
        assert next(second)[0, 0] == 0
        with pytest.raises(PoolError, match="a later iter"):
            next(first)
        assert len(list(second)) == 9


def test_persistent_workers_reclaim_the_slots_of_an_abandoned_epoch() -> None:
    legacy = DataLoader(Images(400), batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=4)
    with PooledLoader(legacy, "cpu", 4 * 4096, slot_bytes=4096, wait_seconds=20) as loader:
        for _ in range(5):
            iterator = iter(loader)
            assert [int(next(iterator)[0, 0]) for _ in range(3)] == [0, 4, 8]
            time.sleep(0.05)  # both workers fill all their slots and wait
        assert len(list(loader)) == 100
        assert loader.stats().slots_in_use_bytes == 0


def test_leases_that_are_all_held_end_in_an_error_that_says_so() -> None:
    for num_workers in (0, 2):
        with tiny_loader(num_workers=num_workers, cap_bytes=8192 * max(1, num_workers), wait_seconds=0.5) as loader:
            held = []
            with pytest.raises(Exception, match="release host batches before asking for more"):
                held.extend(loader.host_batches())
            assert len(held) == 2 * max(1, num_workers)


def test_what_cannot_be_staged_is_listed_and_passes_through() -> None:
    def collate(samples: list[Any]) -> Any:
        return {"dense": torch.stack(samples), "sparse": torch.eye(3).to_sparse(), "opaque": Opaque(1), "none": None}

    with PooledLoader(DataLoader(Images(8), batch_size=4, collate_fn=collate), "cpu", 1 << 18) as loader:
        batch = next(iter(loader))
        assert batch["sparse"].is_sparse and batch["none"] is None
        assert loader.stats().passed_through == {"tensor of layout torch.sparse_coo": 1, "example_datasets.Opaque": 1}


def test_a_container_that_holds_itself_takes_the_pageable_path() -> None:
    def collate(samples: list[Any]) -> Any:
        batch: list[Any] = [torch.stack(samples)]
        batch.append(batch)
        return batch

    with PooledLoader(DataLoader(Images(8), batch_size=4, collate_fn=collate), "cpu", 1 << 18) as loader:
        assert all(batch.is_pageable and torch.is_tensor(batch.views()[0]) for batch in loader.host_batches())


def test_a_legacy_run_beside_the_candidate_draws_as_without_it() -> None:
    def legacy_run(beside: bool) -> list[Any]:
        seed_all()
        candidate = PooledLoader(
            DataLoader(AugmentedDataset(8), batch_size=2, num_workers=2, generator=torch.Generator()), "cpu", 1 << 18
        )
        with candidate:
            shadow = iter(candidate) if beside else None
            drawn = []
            for batch in DataLoader(AugmentedDataset(8), batch_size=2, shuffle=True):
                drawn.append(batch["image"])
                if shadow is not None:
                    next(shadow)
            return drawn

    assert same(legacy_run(True), legacy_run(False))
