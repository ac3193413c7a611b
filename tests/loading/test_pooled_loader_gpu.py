"""What only a GPU can show: real page-locking, real copies in flight, real driver errors."""

import gc
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from example_datasets import AugmentedDataset, Images, SizedBatches, custom_collate
from pool_fakes import FakePageLock, same, seed_all
from torch.utils.data import DataLoader

from dualtrack.facts.errors import PoolError
from dualtrack.loading.batch_layout import map_leaves
from dualtrack.loading.page_locking import CudaPageLock, drain_cuda_error
from dualtrack.loading.pinned_budget import PinnedBudget
from dualtrack.loading.pinned_pool import PinnedPool, PoolSettings
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.shared_slab import SharedBytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
CAP_BYTES = 64 << 20
SLOW_CYCLES = 40_000_000  # about 20 ms at 2 GHz


def to_cpu(batch: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, batch)


def is_registered(address: int, num_bytes: int) -> bool:
    """Ask the driver: unregistering succeeds for registered memory only, so register it again."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        drain_cuda_error()
        return False
    assert int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 1)) == 0
    return True


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate", [None, custom_collate])
def test_batches_on_the_device_are_bit_identical_to_legacy(num_workers: int, collate: Any) -> None:
    def build() -> "DataLoader[Any]":
        return DataLoader(AugmentedDataset(), batch_size=5, shuffle=True, num_workers=num_workers, collate_fn=collate)

    seed_all()
    legacy = build()
    expected = [batch for _ in range(3) for batch in legacy]
    seed_all()
    with PooledLoader(build(), "cuda", CAP_BYTES) as loader:
        found = [to_cpu(batch) for _ in range(3) for batch in loader]
    assert same(found, expected)


def test_the_slab_is_page_locked_in_real_bytes_and_absent_from_torchs_figure() -> None:
    slot_bytes = 33 * 2**20 + 1
    torch_before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    settings = PoolSettings(page_lock=CudaPageLock(torch.device("cuda")))
    with PinnedPool(3 * slot_bytes + 8192, slot_bytes, settings=settings) as pool:
        lease = pool.acquire(slot_bytes)
        assert lease.tensor(slot_bytes).is_pinned()
        assert pool.pinned_bytes == pool.slab_bytes
        assert pool.slab_bytes <= 3 * slot_bytes * 1.02
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == torch_before
        address = pool.slab.address
        assert is_registered(address, pool.slab_bytes)
        lease.release()
    assert pool.pinned_bytes == 0
    assert not is_registered(address, pool.slab_bytes)


def test_a_refused_page_lock_is_named_and_the_next_kernel_is_not_blamed() -> None:
    memory = SharedBytes(1 << 20, "test")
    address = torch.frombuffer(memory.map, dtype=torch.uint8).data_ptr()
    lock = CudaPageLock(torch.device("cuda"))
    lock.register(address, memory.num_bytes)
    with pytest.raises(PoolError, match="got cudaError"):
        lock.register(address, memory.num_bytes)
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
    torch.cuda.synchronize()
    assert not drain_cuda_error()
    lock.unregister(address)
    with pytest.raises(PoolError, match="got cudaError"):
        lock.unregister(address)
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
    memory.close()


def test_a_sticky_error_is_drained() -> None:
    assert int(torch.cuda.cudart().cudaHostUnregister(4096)) != 0
    drain_cuda_error()
    assert not drain_cuda_error()
    assert int((torch.arange(10, device="cuda") * 2).sum()) == 90


def test_going_on_without_a_page_lock_still_delivers_and_counts() -> None:
    legacy = DataLoader(Images(40), batch_size=4, num_workers=2)
    with PooledLoader(
        legacy, "cuda", CAP_BYTES, page_lock=FakePageLock(fail_at_call=1), on_lock_failure="pageable"
    ) as loader:
        assert same([to_cpu(batch) for batch in loader], list(legacy))
        stats = loader.stats()
    assert stats.num_pageable_batches == stats.num_batches == 10
    assert not stats.is_page_locked


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_slot_is_not_reused_before_its_slow_copy_has_finished(num_workers: int) -> None:
    num_bytes = 8 << 20
    legacy = DataLoader(Images(24, num_bytes), batch_size=1, num_workers=num_workers)
    with PooledLoader(legacy, "cuda", max(1, num_workers) * num_bytes, slot_bytes=num_bytes) as loader:
        assert loader.pool.slots_per_producer == 1
        iterator, kept = iter(loader), []
        while True:
            torch.cuda._sleep(SLOW_CYCLES)  # the copy is queued behind this, so its slot stays in flight
            batch = next(iterator, None)
            if batch is None:
                break
            kept.append(batch)
    for index, batch in enumerate(kept):
        assert bool((batch == index).all()), f"batch {index} was overwritten under its copy"


def test_rewriting_a_slot_under_its_copy_does_corrupt_it_so_the_test_above_can_fail() -> None:
    num_bytes = 256 << 20
    settings = PoolSettings(page_lock=CudaPageLock(torch.device("cuda")))
    with PinnedPool(num_bytes, num_bytes, settings=settings) as pool:
        source = pool.acquire(num_bytes).tensor(num_bytes).fill_(1)
        target = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(SLOW_CYCLES)
        target.copy_(source, non_blocking=True)
        source.fill_(2)
        torch.cuda.synchronize()
        assert bool((target == 2).any())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_kept_in_a_list_are_all_equal_at_the_end(num_workers: int) -> None:
    legacy = DataLoader(Images(400, 10_000), batch_size=4, num_workers=num_workers)
    with PooledLoader(legacy, "cuda", 8 * 40_960, slot_bytes=40_960) as loader:
        kept = list(loader)
        assert same([to_cpu(batch) for batch in kept], list(legacy))
        assert loader.stats().num_copied_views == 0


def test_strided_leaves_arrive_as_a_copy_to_the_device_would_lay_them_out() -> None:
    base = torch.randn(4, 6, 8, 10)
    leaves = [
        base.transpose(1, 2), base[:, ::2], base.flip(0), base.contiguous(memory_format=torch.channels_last),
        base[:, :1, :1, :1].expand(4, 6, 8, 10), base[1, 2, 3, 4], torch.empty(3, 0), base.to(torch.bfloat16),
        base.to(torch.float8_e4m3fn), base > 0, torch.view_as_complex(base.reshape(4, 6, 8, 5, 2)),
    ]  # fmt: skip
    expected = [leaf.to("cuda") for leaf in leaves]
    with PooledLoader(DataLoader([0], collate_fn=lambda _: leaves), "cuda", CAP_BYTES) as loader:
        found = next(iter(loader))
    assert same(to_cpu(found), to_cpu(expected))
    assert [leaf.stride() for leaf in found] == [leaf.stride() for leaf in expected]


def test_fifty_epochs_of_random_sizes_leave_every_figure_flat() -> None:
    sizes = torch.randint(1, 200_000, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    legacy = DataLoader(SizedBatches(sizes), batch_size=1, num_workers=2, persistent_workers=True)
    with PooledLoader(legacy, "cuda", CAP_BYTES, slot_bytes=800_256) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        torch.cuda.synchronize()
        before = (
            loader.stats(),
            torch.cuda.host_memory_stats()["allocated_bytes.current"],
            torch.cuda.memory_reserved(),
        )
        for _ in range(50):
            for _ in loader:
                pass
        torch.cuda.synchronize()
        after = (
            loader.stats(),
            torch.cuda.host_memory_stats()["allocated_bytes.current"],
            torch.cuda.memory_reserved(),
        )
    assert after[0].pinned_peak_bytes == before[0].pinned_peak_bytes == loader.pool.slab_bytes
    assert after[0].num_allocations_after_warmup == before[0].num_allocations_after_warmup == 0
    assert after[1:] == before[1:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_over_its_slot_arrives_by_the_counted_pageable_path(num_workers: int) -> None:
    legacy = DataLoader(SizedBatches([100, 50_000, 100]), batch_size=1, num_workers=num_workers)
    with PooledLoader(legacy, "cuda", CAP_BYTES, slot_bytes=1024) as loader:
        found = list(loader)
        assert all(batch.is_cuda for batch in found)
        assert same([to_cpu(batch) for batch in found], list(legacy))
        assert loader.stats().num_over_cap_batches == 1


def test_a_consumer_on_a_stream_of_its_own_sees_whole_batches() -> None:
    num_bytes = 4 << 20
    stream = torch.cuda.Stream()
    with PooledLoader(
        DataLoader(Images(30, num_bytes), num_workers=2), "cuda", 8 * num_bytes, slot_bytes=num_bytes
    ) as loader:
        with torch.cuda.stream(stream):
            sums = [batch.sum() for batch in loader]
        stream.synchronize()
    assert [int(value) for value in sums] == [index * num_bytes for index in range(30)]


def test_kept_labels_do_not_keep_the_images_alive() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack(samples), torch.arange(len(samples))

    legacy = DataLoader(Images(40, 4 << 20), batch_size=2, collate_fn=collate)
    with PooledLoader(legacy, "cuda", CAP_BYTES, slot_bytes=(8 << 20) + 512) as loader:
        kept = [labels for _, labels in loader]
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        assert [labels.tolist() for labels in kept] == [[0, 1]] * 20
        del kept
        gc.collect()
        assert before - torch.cuda.memory_allocated() < 1 << 20


def test_close_with_waiting_producers_and_copies_in_flight_unlocks_within_a_second() -> None:
    budget = PinnedBudget(CAP_BYTES)
    loader = PooledLoader(
        DataLoader(Images(4000, 1 << 20), num_workers=2), "cuda", 4 << 20, slot_bytes=1 << 20, budget=budget
    )
    iterator = iter(loader)
    for _ in range(3):
        torch.cuda._sleep(SLOW_CYCLES)
        next(iterator)
    address, num_bytes = loader.pool.slab.address, loader.pool.slab_bytes
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 1.5
    assert not is_registered(address, num_bytes)
    assert loader.stats().pool_current_bytes == budget.reserved_bytes == 0
    assert int(torch.ones(10, device="cuda").sum()) == 10


def test_pools_open_and_close_again_and_again_without_a_mapping_left_behind() -> None:
    source = torch.ones(1 << 20)
    for _ in range(30):
        with PooledLoader(DataLoader(Images(8), batch_size=4), "cuda", 1 << 20) as loader:
            list(loader)
        assert bool((source.to("cuda") == 1).all())
    for _ in range(10):
        forgotten = PooledLoader(DataLoader(Images(8), batch_size=4), "cuda", 1 << 20)
        list(forgotten)
        del forgotten
        gc.collect()
        assert bool((source.to("cuda") == 1).all())


def test_the_interpreter_exits_cleanly_with_a_loader_open() -> None:
    script = """
        import sys, torch
        from torch.utils.data import DataLoader
        from example_datasets import Images
        from dualtrack.loading.pooled_loader import PooledLoader
        loader = PooledLoader(DataLoader(Images(4000, 1 << 20), num_workers=2), "cuda", 1 << 24, slot_bytes=1 << 20)
        iterator = iter(loader)
        print(int(next(iterator).sum()), int(next(iterator)[0, 0]))
    """
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0 1"), done.stderr


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_pool_serves_the_device_it_was_opened_for() -> None:
    legacy = DataLoader(Images(40), batch_size=4, num_workers=2)
    with PooledLoader(legacy, "cuda:1", CAP_BYTES) as loader:
        found = list(loader)
    assert {batch.device for batch in found} == {torch.device("cuda:1")}
    assert same([to_cpu(batch) for batch in found], list(legacy))
