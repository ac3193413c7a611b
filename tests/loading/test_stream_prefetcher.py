"""The prefetcher on fakes and real loaders: order, errors at their batch, stream discipline, deadlines, generators, figures."""

import collections
import gc
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from fake_transfer_device import FakeTransferDevice, join_helper_threads
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dualtrack.facts.errors import PrefetchError
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.stream_prefetcher import PASS_THROUGH, CUDADataPrefetcher
from dualtrack.loading.transfer_device import DeadlinePassed, HostTransferDevice
from dualtrack.loading.transfer_pipeline import LOOK_AHEAD_DRAWS
from dualtrack.loading.transfer_source import HostPuller
from dualtrack.training.workload import seed_everything
from dualtrack.workloads.digits import create


def pairs(num_batches: int) -> list[list[torch.Tensor]]:
    return [[torch.full((3, 2), float(k)), torch.tensor([k, k, k])] for k in range(num_batches)]


def faulty(num_batches: int, position: int, error: BaseException):
    for k, batch in enumerate(pairs(num_batches)):
        if k == position:
            raise error
        yield batch


class Drawing(Dataset):
    """Draws from all three global generators where it runs."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(2) + random.random() + float(np.random.rand()), index


def numbers(batches) -> list[int]:
    return [int(target[0]) for _, target in batches]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("num_batches", [0, 1, 2, 7])
def test_every_batch_arrives_once_and_in_order(depth, num_batches):
    prefetcher = CUDADataPrefetcher(pairs(num_batches), depth=depth, transfer=FakeTransferDevice(num_polls=3))
    for _ in range(3):
        got = list(prefetcher)
        assert numbers(got) == list(range(num_batches))
        assert all(torch.equal(source, torch.full((3, 2), float(k))) for k, (source, _) in enumerate(got))
    assert len(prefetcher) == num_batches


def test_a_dataset_of_k_batches_and_one_sample_gives_every_sample_once():
    loader = DataLoader(TensorDataset(torch.arange(4 * 5 + 1)), batch_size=5)
    got = torch.cat([batch[0] for batch in CUDADataPrefetcher(loader, transfer=FakeTransferDevice())])
    assert got.tolist() == list(range(21))


def test_next_gives_pairs_and_then_none_none_until_an_epoch_is_started():
    prefetcher = CUDADataPrefetcher(pairs(2), transfer=FakeTransferDevice())
    assert [int(prefetcher.next()[1][0]) for _ in range(2)] == [0, 1]
    assert prefetcher.next() == (None, None)
    assert prefetcher.next() == (None, None)
    prefetcher.preload()
    assert int(prefetcher.next()[1][0]) == 0
    iter(prefetcher)
    assert int(prefetcher.next()[1][0]) == 0


def test_next_refuses_batches_that_are_no_pairs_and_iteration_takes_them():
    batches = [{"x": torch.ones(2)}]
    with pytest.raises(ValueError, match="got a dict of 1; iterate"):
        CUDADataPrefetcher(batches, transfer=FakeTransferDevice()).next()
    assert next(iter(CUDADataPrefetcher(batches, transfer=FakeTransferDevice())))["x"].tolist() == [1, 1]


def test_structures_and_types_survive():
    point = collections.namedtuple("point", "x y")
    batch = collections.OrderedDict(a=point(torch.ones(2), "name"), b=[None, 3, torch.zeros((), dtype=torch.bfloat16)])
    (got,) = CUDADataPrefetcher([batch], transfer=FakeTransferDevice())
    assert type(got) is collections.OrderedDict and type(got["a"]) is point and got["a"].y == "name"
    assert got["b"][0] is None and got["b"][1] == 3 and got["b"][2].dtype is torch.bfloat16
    assert got["a"].x is not batch["a"].x


def test_preload_queues_the_copy_before_next_asks_for_it():
    device = FakeTransferDevice()
    prefetcher = CUDADataPrefetcher(pairs(3), transfer=device)
    prefetcher.preload()
    assert device.calls["copy"] == 1
    assert prefetcher.stats().queue_depth == 1
    prefetcher.next()
    assert device.calls["copy"] == 1, "the first batch was there already"
    prefetcher.next()
    assert device.calls["copy"] == 3, "from the second batch on it looks ahead"


@pytest.mark.parametrize(
    "error", [ValueError("bad"), MemoryError("full"), KeyboardInterrupt(), KeyError(3), SystemExit(1)], ids=repr
)
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_an_error_of_the_source_arrives_at_its_batch_within_a_second_with_its_traceback(error, position):
    class Loader:
        def __iter__(self):
            return faulty(4, position, error)

    prefetcher = CUDADataPrefetcher(Loader(), transfer=FakeTransferDevice())
    started = time.monotonic()
    got = [prefetcher.next() for _ in range(position)]
    assert numbers(got) == list(range(position))
    for _ in range(2):  # never the batch before it, and never the one behind it
        with pytest.raises(type(error)) as caught:
            prefetcher.next()
        assert caught.value is error
    assert time.monotonic() - started < 1
    assert "faulty" in [entry.name for entry in caught.traceback]
    assert any(f"batch {position} of epoch 0" in note for note in error.__notes__)
    assert numbers(list(CUDADataPrefetcher(pairs(2), transfer=FakeTransferDevice()))) == [0, 1]


@pytest.mark.parametrize("operation", ["copy", "empty_like"])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_a_failing_copy_is_an_error_at_its_batch_and_never_the_batch_before(operation, position):
    call = position if operation == "copy" else 2 * position
    device = FakeTransferDevice(num_polls=2, fail_at={(operation, call): RuntimeError("device says no")})
    prefetcher = CUDADataPrefetcher(pairs(4), transfer=device)
    assert numbers([prefetcher.next() for _ in range(position)]) == list(range(position))
    for _ in range(2):
        with pytest.raises(
            PrefetchError, match=f"copy of batch {position} failed: RuntimeError: device says no"
        ) as caught:
            prefetcher.next()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert prefetcher.stats().num_errors == 1
    assert device.calls["copy"] <= position + 1, "nothing behind the failed copy is fetched or copied"


def test_a_new_epoch_after_an_error_starts_at_the_first_batch():
    device = FakeTransferDevice(fail_at={("copy", 1): RuntimeError("once")})
    prefetcher = CUDADataPrefetcher(pairs(3), transfer=device)
    with pytest.raises(PrefetchError):
        list(prefetcher)
    assert numbers(prefetcher) == [0, 1, 2]


def test_a_source_that_hangs_meets_the_deadline_and_close_does_not_wait_for_it():
    release, before = threading.Event(), threading.enumerate()

    def hanging():
        yield pairs(1)[0]
        release.wait(30)

    class Loader:
        def __iter__(self):
            return hanging()

    prefetcher = CUDADataPrefetcher(Loader(), transfer=FakeTransferDevice(), deadline_seconds=0.2)
    started = time.monotonic()
    assert int(prefetcher.next()[1][0]) == 0
    with pytest.raises(DeadlinePassed, match=r"no host batch came within 0.2 s"):
        prefetcher.next()
    prefetcher.close()
    assert time.monotonic() - started < 2
    release.set()
    join_helper_threads(before)


def test_an_interrupt_while_waiting_loses_repeats_and_runs_ahead_of_nothing():
    given = []

    def slow():
        for k in range(4):
            time.sleep(0.2 if k == 1 else 0)
            given.append(k)
            yield k

    def interrupt(number, frame):
        raise KeyboardInterrupt

    puller = HostPuller(slow, 5.0, torch.device("cpu"))
    assert puller.pull().content == 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            puller.pull()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert puller.pull().content == 1
    time.sleep(0.05)
    assert given == [0, 1], "the source works only while somebody waits for it"
    assert [puller.pull().content for _ in range(2)] == [2, 3]
    assert puller.pull().kind == "end"


def test_the_source_runs_with_the_consumers_grad_mode():
    seen = []

    def source():
        for batch in pairs(3):
            seen.append(torch.is_grad_enabled())
            yield batch

    class Loader:
        def __iter__(self):
            return source()

    prefetcher = CUDADataPrefetcher(Loader(), transfer=FakeTransferDevice(), depth=1)
    prefetcher.next()
    with torch.no_grad():
        prefetcher.next()
    assert seen == [True, False, False]


def test_a_puller_that_is_dropped_ends_its_thread():
    before = threading.enumerate()
    puller = HostPuller(lambda: iter(pairs(3)), 1.0, torch.device("cpu"))
    assert puller.pull().kind == "batch"
    del puller
    join_helper_threads(before, 5.0)
    assert set(threading.enumerate()) <= set(before)


def test_a_break_and_a_second_iteration_start_at_the_first_batch_and_the_older_iterator_is_an_error():
    prefetcher = CUDADataPrefetcher(pairs(5), transfer=FakeTransferDevice())
    older = iter(prefetcher)
    for target in (0, 1, 2):
        assert int(next(older)[1][0]) == target
    assert numbers(prefetcher) == [0, 1, 2, 3, 4]
    with pytest.raises(PrefetchError, match="expected the newest iteration"):
        next(older)


def test_a_thousand_abandoned_iterators_leave_no_thread_behind():
    before = threading.active_count()
    prefetcher = CUDADataPrefetcher(pairs(3), transfer=FakeTransferDevice())
    for _ in range(1000):
        next(iter(prefetcher))
    del prefetcher
    gc.collect()
    time.sleep(0.1)
    assert threading.active_count() <= before


def test_close_ends_the_epoch_and_twice_is_fine():
    before = threading.active_count()
    with CUDADataPrefetcher(pairs(3), transfer=FakeTransferDevice()) as prefetcher:
        prefetcher.next()
        prefetcher.close()
    assert threading.active_count() == before


def test_destinations_belong_to_the_consumers_stream_and_the_side_stream_waits_for_it():
    device = FakeTransferDevice()
    device.stream = "a stream of the user"
    list(CUDADataPrefetcher([pairs(1)[0][0]], transfer=device))
    assert device.log == [
        ("allocate", "a stream of the user"),
        ("side waits for", "a stream of the user"),
        ("waits for copy", "a stream of the user"),
    ]


def test_the_consumers_stream_is_read_at_each_next_and_a_change_holds_the_block():
    device = FakeTransferDevice()
    prefetcher = CUDADataPrefetcher(pairs(5), transfer=device, depth=1)
    prefetcher.next()
    prefetcher.next()
    device.log.clear()
    device.stream = "another"
    prefetcher.next()
    prefetcher.next()
    assert [entry for entry in device.log if entry[0] == "waits for copy"] == [("waits for copy", "another")] * 2
    assert [entry for entry in device.log if entry[0] == "record_stream"] == [("record_stream", "another", 2)], (
        "only for the one in flight"
    )


def test_batches_in_flight_at_close_are_dropped_behind_their_copies():
    device = FakeTransferDevice()
    prefetcher = CUDADataPrefetcher(pairs(5), transfer=device)
    prefetcher.next()
    prefetcher.next()
    num_waits = device.calls["deliver"]
    assert prefetcher.stats().queue_depth == 2
    prefetcher.close()
    assert device.calls["deliver"] == num_waits + 2


@pytest.mark.parametrize("num_polls", [0, 5, 200])
def test_a_slot_is_never_refilled_while_a_slow_copy_reads_it(num_polls):
    loader = DataLoader(TensorDataset(torch.arange(400.0).reshape(100, 4)), batch_size=2)
    expected = [batch[0].clone() for batch in loader]
    with PooledLoader(loader, device="cpu", cap_bytes=4096, slot_bytes=512, wait_seconds=5) as pooled:
        with CUDADataPrefetcher(pooled, transfer=FakeTransferDevice(num_polls=num_polls), depth=1) as prefetcher:
            got = [batch[0] for batch in prefetcher]
    assert len(got) == 50
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


def test_a_failing_copy_gives_its_slot_back():
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4)
    with PooledLoader(loader, device="cpu", cap_bytes=4096, slot_bytes=512) as pooled:
        prefetcher = CUDADataPrefetcher(pooled, transfer=FakeTransferDevice(fail_at={("copy", 3): RuntimeError("no")}))
        with pytest.raises(PrefetchError):
            list(prefetcher)
        prefetcher.close()
        gc.collect()
        pooled.pool.reap()
        assert pooled.pool.num_slots_in_use == 0


def test_a_pooled_loader_with_workers_gives_legacys_batches_over_three_epochs():
    workload = create()
    seed_everything(7)
    legacy = workload.legacy_loader("train")
    expected = [[[leaf.clone() for leaf in batch] for batch in legacy] for _ in range(3)]
    seed_everything(7)
    with PooledLoader(workload.legacy_loader("train"), device="cpu", cap_bytes=2**20) as pooled:
        with CUDADataPrefetcher(pooled, transfer=HostTransferDevice(torch.device("cpu"))) as prefetcher:
            for epoch in expected:
                got = list(prefetcher)
                assert len(got) == len(epoch)
                assert all(
                    torch.equal(a, b)
                    for one, other in zip(epoch, got, strict=True)
                    for a, b in zip(one, other, strict=True)
                )
            assert prefetcher.stats().look_ahead_batches == 2


def test_a_loader_that_draws_in_this_process_is_not_fetched_ahead_and_keeps_legacys_draws():
    def run(wrap) -> tuple[list[torch.Tensor], float]:
        seed_everything(3)
        got = []
        for batch in wrap(DataLoader(Drawing(), batch_size=3, shuffle=True)):
            got.append(batch[0] + torch.rand(()) + random.random() + float(np.random.rand()))  # the step draws, too
        return got, random.random()

    prefetchers = []

    def prefetched(loader):
        prefetchers.append(CUDADataPrefetcher(loader, transfer=FakeTransferDevice()))
        return prefetchers[0]

    expected, got = run(lambda loader: loader), run(prefetched)
    assert all(torch.equal(one, other) for one, other in zip(expected[0], got[0], strict=True))
    assert expected[1] == got[1]
    stats = prefetchers[0].stats()
    assert (stats.look_ahead_batches, stats.look_ahead_note) == (0, LOOK_AHEAD_DRAWS)


def test_an_iterable_dataset_with_workers_keeps_its_sequence_and_length():
    class Odd(IterableDataset):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info().id
            yield from (torch.tensor(100 * worker + k) for k in range(3 + 4 * worker))

        def __len__(self):
            return 10

    def build():
        return DataLoader(Odd(), batch_size=2, num_workers=2)

    expected = [batch.tolist() for batch in build()]
    prefetcher = CUDADataPrefetcher(build(), transfer=FakeTransferDevice())
    assert [batch.tolist() for batch in prefetcher] == expected
    assert len(prefetcher) == len(build())


def test_on_a_cpu_the_loaders_own_batches_pass_through_and_stats_say_so():
    batches = pairs(3)
    with CUDADataPrefetcher(batches, "cpu") as prefetcher:
        assert [prefetcher.next()[0] is batch[0] for batch in batches] == [True] * 3
        assert prefetcher.next() == (None, None)
        assert [got is batch for got, batch in zip(prefetcher, batches, strict=True)] == [True] * 3
        stats = prefetcher.stats()
    assert stats.mode == PASS_THROUGH == "pass-through: no CUDA device"
    assert (stats.num_batches, stats.num_epochs) == (6, 2)
    assert stats.copy_seconds is stats.exposed_transfer_seconds is stats.overlap_ratio is None
    assert stats.unmeasured_reason == "no CUDA device"


def test_bad_arguments_are_refused_before_anything_starts():
    with pytest.raises(ValueError, match="depth of at least 1, got 0"):
        CUDADataPrefetcher([], "cpu", depth=0)
    with pytest.raises(ValueError, match="deadline_seconds above 0"):
        CUDADataPrefetcher([], "cpu", deadline_seconds=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="expected a CUDA device"):
            CUDADataPrefetcher([])
    with pytest.raises(ValueError, match="expected a cuda or cpu device"):
        CUDADataPrefetcher([], "meta")


def test_leaves_in_pageable_memory_are_counted_not_hidden():
    device = FakeTransferDevice()
    device.sources_are_asynchronous = False
    prefetcher = CUDADataPrefetcher(pairs(3), transfer=device)
    list(prefetcher)
    assert prefetcher.stats().num_pageable_batches == 3


def run_steps(copy_seconds: float, step_seconds: float, num_steps: int, depth: int = 2):
    device = FakeTransferDevice(copy_seconds=copy_seconds)
    prefetcher = CUDADataPrefetcher(pairs(num_steps), transfer=device, depth=depth)
    for _ in prefetcher:
        device.compute(step_seconds)
    return prefetcher.stats()


def test_a_copy_behind_a_longer_step_is_hidden_but_for_the_first_two():
    stats = run_steps(copy_seconds=4, step_seconds=10, num_steps=10)
    assert stats.copy_seconds == 40
    assert stats.exposed_transfer_seconds == 8, "looking ahead starts with the second batch"
    assert stats.overlap_ratio == pytest.approx(0.8)
    assert stats.num_measured_batches == 10


def test_a_copy_longer_than_the_step_shows_what_is_exposed():
    stats = run_steps(copy_seconds=10, step_seconds=4, num_steps=10, depth=1)
    assert stats.copy_seconds == 100
    assert 0 < stats.overlap_ratio < 0.5


def test_the_timeline_shows_copies_beside_the_step_before():
    timeline = run_steps(copy_seconds=4, step_seconds=10, num_steps=6).timeline
    assert [entry.batch for entry in timeline] == list(range(6))
    later = timeline[3]
    assert timeline[2].compute_start_seconds >= timeline[3].copy_end_seconds, (
        "its copy ended before the step before it began"
    )
    assert later.compute_end_seconds - later.compute_start_seconds == 10
    assert later.copy_end_seconds - later.copy_start_seconds == 4
