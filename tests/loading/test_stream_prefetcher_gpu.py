"""The prefetcher on a CUDA device: values, streams, memory and overlap as the hardware shows them."""

import gc
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.stream_prefetcher import CUDADataPrefetcher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda", 0)


class Numbered(Dataset):
    """Sample k is filled with k, so that a batch's sum names its samples."""

    def __init__(self, num_samples: int, num_elements: int) -> None:
        self.num_samples, self.num_elements = num_samples, num_elements

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((self.num_elements,), float(index)), index


class Pageable:
    """Fresh pageable batches."""

    def __init__(self, num_batches: int, num_elements: int) -> None:
        self.num_batches, self.num_elements = num_batches, num_elements

    def __iter__(self):
        return ([torch.full((self.num_elements,), float(k)), torch.tensor([k])] for k in range(self.num_batches))


class Pinned(Pageable):
    """The same page-locked by torch."""

    def __iter__(self):
        return ([leaf.pin_memory() for leaf in batch] for batch in Pageable.__iter__(self))


def pooled(num_batches: int, num_elements: int, num_workers: int = 2, batch_size: int = 1) -> PooledLoader:
    loader = DataLoader(
        Numbered(num_batches * batch_size, num_elements), batch_size=batch_size, num_workers=num_workers
    )
    slot_bytes = (4 * num_elements * batch_size + 511) // 512 * 512 + 512
    num_slots = max(1, num_workers) * ((loader.prefetch_factor or 1) + 2)
    return PooledLoader(loader, DEVICE, num_slots * slot_bytes + 4096, slot_bytes=slot_bytes)


def scribble(num_elements: int) -> None:
    """Take memory of a packed batch's size and write into it: it is the batch's own if that went back too early."""
    torch.full(((4 * num_elements + 511) // 512 * 512 + 512,), 255, dtype=torch.uint8, device=DEVICE)


def slow_kernel(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * 1.5e6))


@pytest.mark.parametrize("source", [Pageable, Pinned])
def test_a_consumer_that_drops_its_batch_in_its_first_operation_gets_the_right_values(source):
    sums = []
    prefetcher = CUDADataPrefetcher(source(300, 250_000), DEVICE)
    for values, _ in prefetcher:
        total = values.double().sum()
        del values
        torch.full((250_000,), float("nan"), device=DEVICE)  # reuses the block if it was given back too early
        sums.append(total)
    expected = [250_000.0 * k for k in range(300)]
    assert torch.stack(sums).cpu().tolist() == expected
    assert prefetcher.stats().num_pageable_batches == (300 if source is Pageable else 0)


def test_ten_thousand_steps_whose_batch_is_dropped_at_once_keep_their_values():
    num_steps, num_elements = 10_000, 4096
    sums = torch.zeros(num_steps, dtype=torch.float64, device=DEVICE)
    with pooled(num_steps, num_elements, num_workers=4) as loader, CUDADataPrefetcher(loader, DEVICE) as prefetcher:
        for step, batch in enumerate(prefetcher):
            torch.sum(batch.pop(0).double(), dim=(0, 1), out=sums[step])
            del batch
            scribble(num_elements)
        assert prefetcher.stats().num_pageable_batches == 0
    assert torch.equal(sums.cpu(), num_elements * torch.arange(num_steps, dtype=torch.float64))


@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_consumer_on_other_streams_gets_the_right_values(num_streams):
    streams = [torch.cuda.Stream() for _ in range(num_streams)]
    sums = []
    with pooled(200, 500_000) as loader, CUDADataPrefetcher(loader, DEVICE) as prefetcher:
        batches = iter(prefetcher)
        for step in range(200):
            with torch.cuda.stream(streams[step % num_streams]):
                values, _ = next(batches)
                slow_kernel(0.1)
                total = values.double().sum()
                del values
                scribble(500_000)
                sums.append(total)
    torch.cuda.synchronize()
    assert torch.stack(sums).cpu().tolist() == [500_000.0 * k for k in range(200)]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_slots_that_wait_for_slow_steps_are_never_refilled_too_early(num_workers):
    with pooled(60, 1_000_000, num_workers) as loader, CUDADataPrefetcher(loader, DEVICE) as prefetcher:
        seen = []
        for values, labels in prefetcher:
            slow_kernel(3)  # the copies of the next batches wait behind it while the workers ask for slots
            seen.append(((values == values[0, 0]).all(), values[0, 0].clone(), labels[0].clone()))
        assert all(bool(same) for same, _, _ in seen)
        assert [int(value) for _, value, _ in seen] == [int(label) for _, _, label in seen] == list(range(60))


def test_reserved_device_memory_is_flat_over_forty_epochs_even_with_a_new_prefetcher_each():
    reserved = []
    with pooled(12, 2_000_000) as loader:
        for _ in range(40):
            with CUDADataPrefetcher(loader, DEVICE) as prefetcher:
                for values, _ in prefetcher:
                    values.mul_(2).sum()
            del values
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved(DEVICE))
    assert len(set(reserved[2:])) == 1, reserved


def test_reserved_device_memory_is_flat_over_forty_epochs_of_one_prefetcher():
    reserved = []
    with pooled(12, 2_000_000) as loader, CUDADataPrefetcher(loader, DEVICE) as prefetcher:
        for _ in range(40):
            for values, _ in prefetcher:
                values.mul_(2).sum()
            del values
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved(DEVICE))
        assert loader.stats().pinned_peak_bytes <= loader.stats().cap_bytes
    assert len(set(reserved[2:])) == 1, reserved


def test_an_epoch_left_early_lets_no_copy_write_into_memory_that_was_handed_out_again():
    prefetcher = CUDADataPrefetcher(Pinned(8, 4_000_000), DEVICE)
    for _ in range(50):
        slow_kernel(2)
        for place, _ in enumerate(prefetcher):
            if place == 2:
                break
        prefetcher.close()
        guards = [torch.full((4_000_000,), 7.0, device=DEVICE) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(bool((guard == 7).all()) for guard in guards)


def test_a_copy_behind_a_longer_step_is_hidden_and_the_timeline_shows_it():
    with pooled(40, 1_000_000) as loader, CUDADataPrefetcher(loader, DEVICE) as prefetcher:
        for values, _ in prefetcher:
            values.sum()
            slow_kernel(20)
        torch.cuda.synchronize()
        stats = prefetcher.stats()
    assert stats.mode == "CUDA side stream"
    assert stats.num_measured_batches == 40
    assert stats.copy_seconds > 0
    assert stats.overlap_ratio > 0.8, stats
    later = stats.timeline[5:]
    assert all(
        entry.copy_start_seconds < entry.copy_end_seconds <= entry.compute_start_seconds < entry.compute_end_seconds
        for entry in later
    )
    hidden = [
        after for before, after in itertools.pairwise(later) if after.copy_end_seconds <= before.compute_end_seconds
    ]
    assert len(hidden) >= len(later) - 2, "a copy ends before the step before its own does"


def test_next_and_preload_work_on_the_device():
    prefetcher = CUDADataPrefetcher(DataLoader(TensorDataset(torch.arange(6.0), torch.arange(6))), DEVICE)
    prefetcher.preload()
    seen = []
    values, targets = prefetcher.next()
    while values is not None:
        assert values.device == targets.device == DEVICE
        seen.append(int(targets))
        values, targets = prefetcher.next()
    assert seen == list(range(6))
    assert prefetcher.next() == (None, None)


def test_structures_that_the_side_stream_can_not_carry_arrive_on_the_device_all_the_same():
    batch = {
        "sparse": torch.eye(3).to_sparse(),
        "leaf": torch.ones(2, requires_grad=True),
        "name": "x",
        "on device": torch.ones(2, device=DEVICE),
    }
    (got,) = CUDADataPrefetcher([batch], DEVICE)
    assert got["sparse"].device == got["leaf"].device == DEVICE
    assert got["leaf"].requires_grad and got["name"] == "x" and got["on device"] is batch["on device"]


def test_a_dropped_batch_frees_its_memory_at_once():
    with pooled(20, 1_000_000) as loader, CUDADataPrefetcher(loader, DEVICE) as prefetcher:
        before_bytes, labels = torch.cuda.memory_allocated(DEVICE), list[torch.Tensor]()
        for values, label in prefetcher:  # enumerate would keep the batch alive
            labels.append(label)
            del values
            gc.collect()
            if len(labels) > 4:
                taken_bytes = torch.cuda.memory_allocated(DEVICE) - before_bytes
                assert taken_bytes < 3 * 4_100_000 + 2**20, "kept labels hold no images"
        assert torch.cat(labels).tolist() == list(range(20))
