"""Exact fallback: every kind of fault at every position gives each sample exactly once, in order, bit-identical to legacy alone."""

import json
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from dual_track_runs import (
    ALL_TRAFFIC,
    MODES,
    NUM_BATCHES,
    RETIRED,
    SHADOW,
    Drawing,
    assert_same_run,
    dual_loader,
    legacy_loader,
    legacy_run,
    pooled,
    train,
)
from fake_transfer_device import FakeTransferDevice, join_helper_threads
from torch.utils.data import DataLoader, IterableDataset

from dualtrack.loading.fallback import Journal, WorkerDeathsAsValues, read_from, rebuild_loader
from dualtrack.loading.routing import TrafficRamp
from dualtrack.loading.shadow_faults import FaultyLoader, PlantedError
from dualtrack.loading.shadow_generators import capture_generators, restore_generators
from dualtrack.training.workload import seed_everything

SOURCE_FAULTS = ["error", "bit flip", "early end", "extra batch", "swapped batches"]


def run_with_fault(settings, kind, position, num_epochs=3, build=legacy_loader, epoch=1):
    faulty = [kind]  # only the first candidate is faulty; the one that is built after it works

    def candidate():
        loader = pooled(build())
        return FaultyLoader(loader, faulty.pop(), position, epoch=epoch) if faulty else loader

    seed_everything(5)
    with dual_loader(build, candidate, settings) as loader:
        return train(loader, num_epochs), loader.evidence


# Without a comparison nobody can see wrong bytes (that is why both shadows run for 100 epochs first), and the transfer shadow compares two
# copies of one fetch: what the fetch gives is the loader shadow's to compare.
SEEN_FAULTS = [
    (mode, kind)
    for mode in MODES
    for kind in SOURCE_FAULTS
    if MODES[mode].loader_shadow or kind in ("error", "early end")
]


@pytest.mark.parametrize("position", range(NUM_BATCHES))
@pytest.mark.parametrize(("mode", "kind"), SEEN_FAULTS)
def test_every_fault_at_every_position_in_every_mode_gives_legacys_own_run(mode, kind, position):
    expected = legacy_run(3)
    got, evidence = run_with_fault(MODES[mode], kind, position)
    assert_same_run(expected, got)
    assert [entry.verdict for entry in evidence][1] == "dirty"
    assert evidence[0].verdict == ("clean" if mode in ("shadow", "half", "all traffic") else "not counted")
    assert all(entry.num_batches == NUM_BATCHES for entry in evidence)


@pytest.mark.parametrize("position", range(NUM_BATCHES))
@pytest.mark.parametrize("settings", [SHADOW, ALL_TRAFFIC, RETIRED], ids=["shadow", "all traffic", "retired"])
def test_a_failing_copy_falls_back_at_its_batch(settings, position):
    expected = legacy_run(1)
    seed_everything(5)
    device = FakeTransferDevice(num_polls=3, fail_at={("copy", position): RuntimeError("device says no")})
    with dual_loader(settings=settings, device=device) as loader:
        assert_same_run(expected, train(loader, 1))
        (evidence,) = loader.evidence
    assert evidence.fallback_position == position
    assert evidence.num_fallbacks == (0 if settings is SHADOW else 1)
    assert evidence.errors == (
        f"batch {position}: PrefetchError: the copy of batch {position} failed: RuntimeError: device says no",
    )


@pytest.mark.parametrize("settings", [SHADOW, RETIRED], ids=["shadow", "retired"])
@pytest.mark.parametrize("position", [0, 2])
def test_a_candidate_that_hangs_meets_its_deadline_and_legacy_goes_on(settings, position):
    expected, before = legacy_run(2), threading.enumerate()
    candidates = []

    def candidate():
        loader = pooled(legacy_loader())
        candidates.append(loader)
        return FaultyLoader(loader, "hang", position, hang_seconds=1.5) if len(candidates) == 1 else loader

    seed_everything(5)
    started = time.monotonic()
    with dual_loader(legacy_loader, candidate, settings.model_copy(update={"deadline_seconds": 0.3})) as loader:
        assert_same_run(expected, train(loader, 2))
        assert (loader.evidence[0].num_deadline, loader.evidence[0].num_errors) == (1, 1)
    assert time.monotonic() - started < 10
    join_helper_threads(before)


@pytest.mark.parametrize("error", [KeyError(3), MemoryError("full"), OSError(5, "disk")], ids=repr)
def test_errors_of_the_dataset_itself_are_the_candidates_only_there(error):
    class Failing(Drawing):
        def __getitem__(self, index):
            if index == 4:
                raise error
            return super().__getitem__(index)

    expected = legacy_run(1)
    seed_everything(5)
    with dual_loader(
        legacy_loader, lambda: pooled(DataLoader(Failing(), batch_size=3, shuffle=True)), RETIRED
    ) as loader:
        assert_same_run(expected, train(loader, 1))
        assert type(error).__name__ in loader.evidence[0].errors[0]


class SlowSecondBatch(Drawing):
    """A worker owes its second batch for most of a second."""

    num_given = 0

    def __getitem__(self, index):
        self.num_given += 1
        if self.num_given > 3:
            time.sleep(0.3)
        return super().__getitem__(index)


@pytest.mark.parametrize("mode", ["shadow", pytest.param("all traffic", marks=pytest.mark.full), "retired"])
def test_a_killed_worker_falls_back_exactly(mode):
    def build():
        return legacy_loader(num_workers=2)

    candidates = []

    def candidate():
        slow = DataLoader(SlowSecondBatch(), batch_size=3, shuffle=True, num_workers=2)
        candidates.append(FaultyLoader(pooled(slow), "worker killed", 0) if not candidates else pooled(build()))
        return candidates[-1]

    expected = legacy_run(2, build)
    seed_everything(5)
    with dual_loader(build, candidate, MODES[mode]) as loader:
        assert_same_run(expected, train(loader, 2))
        first = loader.evidence[0]
    assert (first.num_errors, first.fallback_position is not None, len(candidates)) == (1, True, 2)
    assert "died" in first.errors[0] or "exited unexpectedly" in first.errors[0]


class Suicidal(Drawing):
    """Kills its own worker at one sample."""

    def __getitem__(self, index):
        if index == 7 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("settings", [SHADOW, RETIRED], ids=["shadow", "retired"])
def test_a_worker_that_dies_while_the_training_step_runs_raises_nothing_there(settings):
    def build():
        return legacy_loader(num_workers=2)

    expected = legacy_run(1, build)
    seed_everything(5)
    with dual_loader(
        build, lambda: pooled(DataLoader(Suicidal(), batch_size=3, shuffle=True, num_workers=2)), settings
    ) as loader:
        epochs = [[]]
        generator = iter(loader)
        for images, labels in generator:
            for _ in range(20):
                time.sleep(0.01)  # a signal handler that raises would do it here
            epochs[0].append(one_step((images, labels)))
        assert_same_run(expected, (epochs, capture_generators()))
        assert loader.evidence[0].num_errors == 1
        assert loader.evidence[0].verdict == "dirty"


def test_an_error_that_a_signal_handler_injects_into_the_fallback_is_kept_as_a_value():
    def handler(number, frame):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with WorkerDeathsAsValues() as deaths:
            try:
                raise ConnectionResetError("the first error")
            except ConnectionResetError:
                os.kill(os.getpid(), signal.SIGCHLD)  # without the guard the second error arrives here
                time.sleep(0.01)
                handled = True
        assert handled
        assert deaths.seen == ["DataLoader worker (pid 1) is killed by signal: Killed."]
        assert signal.getsignal(signal.SIGCHLD) is handler, "the handler is put back"
        with pytest.raises(RuntimeError, match="killed by signal"):
            os.kill(os.getpid(), signal.SIGCHLD)
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_handler_that_torch_installs_later_is_wrapped_at_the_next_batch():
    before = signal.getsignal(signal.SIGCHLD)
    try:
        with WorkerDeathsAsValues() as deaths:
            signal.signal(signal.SIGCHLD, lambda number, frame: (_ for _ in ()).throw(RuntimeError("late")))
            deaths.refresh()
            os.kill(os.getpid(), signal.SIGCHLD)
            time.sleep(0.01)
        assert deaths.seen == ["late"]
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_guard_does_nothing_outside_the_main_thread():
    seen = []

    def work():
        with WorkerDeathsAsValues() as deaths:
            deaths.refresh()
            seen.append(signal.getsignal(signal.SIGCHLD))

    before = signal.getsignal(signal.SIGCHLD)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True])
def test_legacy_is_rebuilt_at_any_position_of_a_later_epoch(num_workers, own_generator):
    def build():
        generator = torch.Generator().manual_seed(9) if own_generator else None
        return legacy_loader(num_workers, generator=generator)

    seed_everything(5)
    journal = Journal(capture_generators())
    loader = build()
    for _ in range(2):
        journal.begin_epoch(capture_generators(), loader, None)
        expected = []
        for place, batch in enumerate(loader):
            expected.append([leaf.clone() for leaf in batch])
            torch.rand(1)
            journal.current.fetch_states[place + 1] = capture_generators()
    for position in range(1, NUM_BATCHES):
        before = capture_generators()
        rebuilt = rebuild_loader(build, journal)
        iterator = read_from(rebuilt, journal.current, position, iter)
        assert before.equals(capture_generators())
        if num_workers == 0:
            restore_generators(journal.current.fetch_states[position])
        found = next(iterator)
        assert all(torch.equal(a, b) for a, b in zip(expected[position], found, strict=True))


@pytest.mark.parametrize("settings", [SHADOW, RETIRED], ids=["shadow", "retired"])
def test_persistent_workers_keep_their_generators_through_a_fallback_in_a_later_epoch(settings):
    def build():
        return legacy_loader(num_workers=2, persistent_workers=True)

    expected = legacy_run(4, build)
    got, evidence = run_with_fault(settings, "error", 2, num_epochs=4, build=build, epoch=2)
    assert_same_run(expected, got)
    assert evidence[2].verdict == "dirty"
    assert evidence[3].verdict == "clean", evidence[3].reasons


def test_the_second_error_while_the_candidate_is_closed_is_counted_and_stops_nothing():
    class Closing(FaultyLoader):
        def close(self):
            raise RuntimeError("and close fails, too")

    expected = legacy_run(1)
    seed_everything(5)
    loader = dual_loader(legacy_loader, lambda: Closing(legacy_loader(), "error", 1), RETIRED)
    assert_same_run(expected, train(loader, 1))
    assert loader.evidence[0].errors == (
        "batch 1: PlantedError: planted at batch 1",
        "batch 1: RuntimeError: and close fails, too",
    )


def test_a_candidate_that_can_not_be_built_again_leaves_legacy_alone():
    candidates = [lambda: FaultyLoader(legacy_loader(), "error", 1)]

    def candidate():
        if not candidates:
            raise PlantedError("no second candidate")
        return candidates.pop()()

    expected = legacy_run(3)
    seed_everything(5)
    with dual_loader(legacy_loader, candidate, SHADOW) as loader:
        assert_same_run(expected, train(loader, 3))
        assert [entry.verdict for entry in loader.evidence] == ["dirty"] * 3
        assert loader.evidence[2].errors == ("batch 0: PlantedError: no second candidate",)
        assert loader.evidence[2].loader_shadow.num_skipped == NUM_BATCHES


class Shuffling(IterableDataset):
    """Shuffles through a buffer in this process: what it gives depends on every draw before, those of the training steps included."""

    def __iter__(self):
        waiting = list(range(100))
        for index in range(100, 112):
            yield torch.tensor([float(waiting.pop(random.randrange(len(waiting))))]), index
            waiting.append(index)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("settings", [SHADOW, RETIRED], ids=["shadow", "retired"])
def test_a_dataset_that_carries_draws_from_batch_to_batch_falls_back_exactly(settings, position):
    def build():
        return DataLoader(Shuffling(), batch_size=3)

    expected = legacy_run(3, build)
    got, evidence = run_with_fault(settings, "error", position, build=build)
    assert_same_run(expected, got)
    assert evidence[1].fallback_position == position


def test_a_handler_that_is_installed_while_the_epoch_runs_raises_nothing_in_the_step():
    def late(number, frame):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    before = signal.getsignal(signal.SIGCHLD)
    try:
        with dual_loader() as loader:
            batches = iter(loader)
            next(batches)
            signal.signal(signal.SIGCHLD, late)  # as torch does when the first worker starts
            next(batches)
            os.kill(os.getpid(), signal.SIGCHLD)
            time.sleep(0.01)
            assert len(list(batches)) == NUM_BATCHES - 2
        assert signal.getsignal(signal.SIGCHLD) is late
    finally:
        signal.signal(signal.SIGCHLD, before)


WITH_WORKERS = pytest.param(2, marks=pytest.mark.full)


@pytest.mark.parametrize("num_workers", [0, WITH_WORKERS])
@pytest.mark.parametrize("settings", [SHADOW, RETIRED], ids=["shadow", "retired"])
@pytest.mark.parametrize("position", [0, 1, 3, 4])
def test_killed_at_a_batch_and_resumed_the_next_samples_are_the_same(settings, position, num_workers):
    def build():
        return legacy_loader(num_workers)

    expected, last = legacy_run(3, build)
    seed_everything(5)
    got = []
    with dual_loader(build, settings=settings) as first:
        got += train(first, 1)[0]
        partial = []
        batches = iter(first)
        for _ in range(position):
            partial.append(one_step(next(batches)))
        state = json.loads(json.dumps(first.state_dict()))
    seed_everything(99)  # another process stands elsewhere
    with dual_loader(build, settings=settings) as second:
        second.load_state_dict(state)
        partial += [one_step(batch) for batch in second] if position else []
        got += [partial] if position else train(second, 1)[0]
        rest, states = train(second, 1)
        got += rest
        assert_same_run((expected, last), (got, states))
        assert second.evidence[0].verdict == ("not counted" if settings is RETIRED or position > 0 else "clean")


def one_step(batch):
    images, labels = batch
    return images.clone(), labels.clone(), torch.rand(()) + random.random() + float(np.random.rand())


def test_a_ramp_falls_to_its_first_rung_after_a_fault_and_a_retired_path_to_probation():
    ramp = TrafficRamp(shares=(0.0, 0.5, 1.0), num_clean_epochs_per_rung=1)
    seed_everything(5)
    with dual_loader(
        legacy_loader,
        lambda: FaultyLoader(pooled(legacy_loader()), "error", 1, epoch=2),
        SHADOW.model_copy(update={"ramp": ramp}),
    ) as loader:
        for _ in range(5):
            list(loader)
        assert [entry.traffic_share for entry in loader.evidence] == [0.0, 0.5, 1.0, 0.0, 0.5]
        assert [entry.verdict for entry in loader.evidence] == ["clean", "clean", "dirty", "clean", "clean"]
        assert str(loader.clean_epochs) == "2 of 100"
        assert loader.clean_epochs.reset_reasons[0].startswith("epoch 2: ")
    seed_everything(5)
    faults = [3]

    def candidate():
        return FaultyLoader(pooled(legacy_loader()), "error", faults.pop()) if faults else pooled(legacy_loader())

    with dual_loader(legacy_loader, candidate, RETIRED) as loader:
        for _ in range(12):
            list(loader)
        assert [entry.traffic_share for entry in loader.evidence] == [1.0] + [0.0] * 11, (
            "nothing promotes it again by itself"
        )
        assert loader.evidence[1].rung is None
        assert loader.evidence[1].verdict == "clean", "in probation both shadows run"
