"""The dual track: legacy's own run for the trainer, every batch compared, and evidence that counts only what was seen."""

import gc
import json
import random
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from dual_track_runs import (
    ALL_TRAFFIC,
    MODES,
    NUM_BATCHES,
    RETIRED,
    SHADOW,
    TRANSFER_ONLY,
    assert_same_run,
    dual_loader,
    legacy_loader,
    legacy_run,
    pooled,
    train,
)
from fake_transfer_device import FakeTransferDevice, join_helper_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from dualtrack.loading.divergence_bundle import recompare
from dualtrack.loading.dual_track import DualTrackLoader
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.routing import RampPosition, TrafficRamp, serves_candidate
from dualtrack.loading.shadow_evidence import CleanEpochCount
from dualtrack.loading.shadow_faults import FaultyLoader
from dualtrack.loading.shadow_generators import capture_generators
from dualtrack.loading.shadow_tracks import TransferTee
from dualtrack.training.loop import TrainingJob, deterministic_algorithms
from dualtrack.training.workload import seed_everything
from dualtrack.workloads.digits import create


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_trainer_gets_legacys_own_run_and_generators_in_every_mode(mode, num_workers):
    def build():
        return legacy_loader(num_workers)

    expected = legacy_run(3, build)
    seed_everything(5)
    with dual_loader(build, settings=MODES[mode]) as loader:
        assert_same_run(expected, train(loader, 3))
        assert all(not entry.reasons or entry.verdict == "not counted" for entry in loader.evidence)
        assert len(loader) == NUM_BATCHES


def test_the_fake_device_lands_copies_late_and_the_run_is_still_legacys():
    expected = legacy_run(2)
    seed_everything(5)
    with dual_loader(settings=ALL_TRAFFIC, device=FakeTransferDevice(num_polls=5)) as loader:
        assert_same_run(expected, train(loader, 2))
        assert [entry.verdict for entry in loader.evidence] == ["clean", "clean"]
        assert loader.evidence[0].num_served_by_candidate == NUM_BATCHES


@pytest.fixture
def one_thread():
    """On a busy machine the threads of small operators wait for each other far longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_legacys_losses_are_bit_equal_with_and_without_the_shadows():
    def losses(make_batches):
        job = TrainingJob(create(), torch.device("cpu"), seed=3)
        with deterministic_algorithms():
            return [
                float(job.step(batch)) + 0 * random.random() + 0 * float(np.random.rand())
                for _ in range(2)
                for batch in make_batches(job)
            ]

    loaders = {}

    def legacy(job):
        loaders.setdefault("legacy", job.workload.legacy_loader("train"))
        return loaders["legacy"]

    def dual(job):
        def build():
            return job.workload.legacy_loader("train")

        if "dual" not in loaders:
            loaders["dual"] = DualTrackLoader(build, lambda: PooledLoader(build(), "cpu", 2**20), "cpu", SHADOW)
        return loaders["dual"]

    expected = losses(legacy)
    after = capture_generators()
    assert losses(dual) == expected
    assert after.equals(capture_generators())
    assert [entry.verdict for entry in loaders["dual"].evidence] == ["clean", "clean"]
    loaders["dual"].close()


def test_an_epoch_with_both_shadows_and_no_difference_is_clean_and_counts():
    seen = []
    seed_everything(5)
    with dual_loader(on_epoch=seen.append) as loader:
        list(loader)
        list(loader)
        assert seen == loader.evidence
    first = seen[0]
    assert first.clean and first.reasons == ()
    assert first.loader_shadow.num_compared == first.loader_shadow.num_equal == NUM_BATCHES
    assert first.transfer_shadow.num_compared == first.transfer_shadow.num_equal == NUM_BATCHES
    assert first.num_compared == 2 * NUM_BATCHES
    assert str(loader.clean_epochs) == "2 of 100"
    assert not loader.clean_epochs.is_reached


def test_the_count_goes_on_from_the_ledger_and_reaches_its_target():
    settings = SHADOW.model_copy(update={"num_clean_epochs_before": 98, "clean_epoch_key": "key"})
    with dual_loader(settings=settings) as loader:
        list(loader)
        assert not loader.clean_epochs.is_reached
        list(loader)
        assert loader.clean_epochs.is_reached and str(loader.clean_epochs) == "100 of 100"
        assert loader.clean_epochs.key == "key"


@pytest.mark.parametrize("settings", [TRANSFER_ONLY, RETIRED, SHADOW.model_copy(update={"transfer_shadow": False})])
def test_an_epoch_without_both_shadows_is_not_counted_and_resets_nothing(settings):
    with dual_loader(settings=settings.model_copy(update={"num_clean_epochs_before": 7})) as loader:
        list(loader)
        assert loader.evidence[0].verdict == "not counted"
        assert any("shadow was off" in reason for reason in loader.evidence[0].reasons)
        assert loader.clean_epochs.count == 7


def test_an_epoch_that_the_consumer_leaves_early_is_not_counted_and_the_next_starts_at_the_first_batch():
    expected = legacy_run(1)
    seed_everything(5)
    with dual_loader() as loader:
        for position, _ in enumerate(loader):
            if position == 1:
                break
        seed_everything(5)
        assert_same_run(expected, train(loader, 1))
        assert loader.evidence[0].verdict == "not counted"
        assert loader.evidence[0].reasons == ("the consumer left after 2 batches",)
        assert loader.evidence[1].verdict == "clean"


def test_an_empty_loader_proves_nothing():
    def build():
        return DataLoader(TensorDataset(torch.zeros(0, 2)), batch_size=2)

    with dual_loader(build) as loader:
        assert list(loader) == []
        assert loader.evidence[0].verdict == "dirty"
        assert loader.evidence[0].reasons == ("no batch was delivered",)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7])
def test_lengths_of_k_batches_and_one_sample_and_single_batches_arrive_once(num_samples):
    def build():
        return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=3)

    for mode_settings in MODES.values():
        with dual_loader(build, settings=mode_settings) as loader:
            assert torch.cat([batch[0] for batch in loader]).tolist() == list(range(num_samples))


@pytest.mark.parametrize("estimate", [10, 30])
def test_an_iterable_dataset_with_workers_keeps_its_sequence_whatever_length_it_claims(estimate):
    class Odd(IterableDataset):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info().id
            yield from (torch.tensor(100 * worker + k) for k in range(3 + 4 * worker))

        def __len__(self):
            return estimate

    def build():
        return DataLoader(Odd(), batch_size=2, num_workers=2)

    expected = [batch.tolist() for batch in build()]
    for mode_settings in (SHADOW, RETIRED):
        with dual_loader(build, settings=mode_settings) as loader:
            assert [batch.tolist() for batch in loader] == expected
            assert loader.evidence[0].num_errors == loader.evidence[0].num_fallbacks == 0


class Structured(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"image": torch.rand(2, 2), "index": index, "name": f"sample {index}", "weight": 0.5}


def test_any_structure_is_compared_and_delivered():
    def build():
        return DataLoader(Structured(), batch_size=2)

    with dual_loader(build, lambda: PooledLoader(build(), "cpu", 64 * 1024, slot_bytes=2048)) as loader:
        batches = list(loader)
        assert [batch["name"] for batch in batches] == [[f"sample {2 * k}", f"sample {2 * k + 1}"] for k in range(3)]
        assert batches[0]["weight"].dtype is torch.float64
        assert loader.evidence[0].clean


class Plain:
    """A candidate that is no pooled loader."""

    def __init__(self, loader, spoil=None):
        self.loader, self.spoil = loader, spoil

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return (self.spoil(batch) if self.spoil else batch for batch in self.loader)


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda batch: [batch[0] + 1, batch[1]], "index [0, 0]"),
        (lambda batch: tuple(batch), "structure"),
        (lambda batch: [batch[0].double(), batch[1]], "dtype"),
        (lambda batch: [batch[0][None], batch[1]], "shape"),
        (lambda batch: [batch[0]], "structure"),
        (lambda batch: [], "nothing compared"),
    ],
)
def test_a_candidate_that_gives_something_else_is_found_and_never_delivered(spoil, kind):
    for mode_settings in (SHADOW, ALL_TRAFFIC):
        expected = legacy_run(2)
        seed_everything(5)
        with dual_loader(legacy_loader, lambda: Plain(legacy_loader(), spoil), mode_settings) as loader:
            assert_same_run(expected, train(loader, 2))
            evidence = loader.evidence[0]
            assert evidence.loader_shadow.num_mismatched == evidence.loader_shadow.num_compared == NUM_BATCHES
            num_alike = 0 if spoil([torch.zeros(1), 0]) == [] else NUM_BATCHES  # two empty batches compare nothing
            assert evidence.transfer_shadow.num_equal == num_alike, "both copies of the wrong fetch are alike"
            assert (
                evidence.first_divergence.where.startswith("epoch 0, step 0, ")
                and kind in evidence.first_divergence.where
            )
            assert evidence.verdict == "dirty"
            assert evidence.num_served_by_candidate == 0
            assert evidence.num_fallbacks == (0 if mode_settings is SHADOW else 1)


class WritingDevice(FakeTransferDevice):
    """A candidate copy that writes into the host bytes it was given."""

    def copy(self, pairs):
        for _, source in pairs:
            if source.numel():
                source.view(-1).view(torch.uint8)[0] ^= 1
        return super().copy(pairs)


@pytest.mark.parametrize("order_seed", range(6))
@pytest.mark.parametrize("settings", [SHADOW, TRANSFER_ONLY], ids=["both", "transfer only"])
@pytest.mark.parametrize("candidate", [pooled, Plain], ids=["pooled", "plain"])
def test_a_candidate_that_writes_into_its_input_is_found_whoever_goes_first(settings, order_seed, candidate):
    settings = settings.model_copy(update={"order_seed": order_seed})
    expected = legacy_run(1)
    seed_everything(5)
    with dual_loader(legacy_loader, lambda: candidate(legacy_loader()), settings, device=WritingDevice()) as loader:
        assert_same_run(expected, train(loader, 1))
        assert loader.evidence[0].transfer_shadow.num_mismatched == NUM_BATCHES


@pytest.mark.parametrize("order_seed", range(4))
def test_a_legacy_copy_that_writes_into_its_input_is_legacys_own_affair(order_seed):
    def copy(batch):
        batch[0].mul_(2)  # normalises in place, as some trainers do
        return [batch[0], batch[1]]

    seed_everything(5)
    expected = [copy(batch) for batch in legacy_loader()]
    settings = SHADOW.model_copy(update={"order_seed": order_seed})
    seed_everything(5)
    with dual_loader(settings=settings, legacy_copy=copy) as loader:
        got = list(loader)
        assert all(torch.equal(one[0], other[0]) for one, other in zip(expected, got, strict=True))
        assert loader.evidence[0].transfer_shadow.num_mismatched == NUM_BATCHES, (
            "the candidate's copy does not double: that has to be seen"
        )


def test_the_host_bytes_of_the_tee_are_reused_so_that_their_pages_stay_warm(monkeypatch):
    taken = []
    take = TransferTee._take
    monkeypatch.setattr(TransferTee, "_take", lambda tee, num_bytes: taken.append(take(tee, num_bytes)) or taken[-1])

    def build():
        return DataLoader(TensorDataset(torch.arange(400.0)), batch_size=4)

    for mode_settings in (SHADOW, ALL_TRAFFIC):
        taken.clear()
        with dual_loader(build, settings=mode_settings) as loader:
            assert torch.cat([batch[0] for batch in loader]).tolist() == list(range(400))
        assert len(taken) == 100
        assert len({buffer.data_ptr() for buffer in taken}) <= mode_settings.depth + 2


def test_the_order_of_the_sides_is_random_recorded_and_repeats_with_its_seed():
    def orders(seed):
        with dual_loader(settings=SHADOW.model_copy(update={"order_seed": seed})) as loader:
            for _ in range(8):
                list(loader)
            return "".join(entry.order for entry in loader.evidence)

    first = orders(1)
    assert first == orders(1) != orders(2)
    assert set(first) == {"L", "C"} and len(first) >= 8 * NUM_BATCHES


def test_a_cache_that_the_first_side_warms_changes_nothing():
    cache: dict[int, torch.Tensor] = {}

    class Cached(Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            if index not in cache:
                cache[index] = torch.full((2,), float(index))
            return cache[index]

    def build():
        return DataLoader(Cached(), batch_size=2)

    with dual_loader(build) as loader:
        for _ in range(3):
            cache.clear()
            assert torch.cat(list(loader)).reshape(-1, 2)[:, 0].tolist() == list(range(9))
        assert [entry.verdict for entry in loader.evidence] == ["clean"] * 3


def test_a_candidate_that_leaves_the_global_generators_elsewhere_is_found():
    def spoil(batch):
        torch.rand(1)
        return batch

    expected = legacy_run(1)
    seed_everything(5)
    with dual_loader(legacy_loader, lambda: Plain(legacy_loader(), spoil)) as loader:
        assert_same_run(expected, train(loader, 1))
        assert loader.evidence[0].num_generator_differences == NUM_BATCHES
        assert loader.evidence[0].verdict == "dirty"


def test_a_pageable_batch_makes_the_epoch_dirty():
    with dual_loader(
        legacy_loader, lambda: PooledLoader(legacy_loader(), "cpu", 4096, slot_bytes=512), SHADOW
    ) as loader:
        list(loader)  # two leaves take a slot of 1,024 bytes
        evidence = loader.evidence[0]
        assert evidence.num_pageable == NUM_BATCHES
        assert evidence.verdict == "dirty" and evidence.reasons == (f"{NUM_BATCHES} pageable batches",)


def test_a_comparison_that_never_ends_meets_its_deadline(monkeypatch):
    monkeypatch.setattr("dualtrack.loading.shadow_tracks.ABANDON_SECONDS", 0.3)
    before = threading.enumerate()
    device = FakeTransferDevice()
    expected = legacy_run(1)
    seed_everything(5)
    with dual_loader(settings=ALL_TRAFFIC.model_copy(update={"deadline_seconds": 0.2}), device=device) as loader:
        iterator = iter(loader)
        first = next(iterator)
        assert torch.equal(first[0], expected[0][0][0][0])
        device.hangs = True
        next(iterator)
        device.hangs = False
        list(iterator)
        assert loader.evidence[0].num_deadline == 2, (
            "the comparison's, and that of closing a candidate whose copies hang"
        )
        assert loader.evidence[0].num_batches == NUM_BATCHES
    join_helper_threads(before)


def test_errors_of_legacy_are_the_trainers_and_make_the_epoch_dirty():
    def failing():
        raise KeyError("legacy's own")
        yield

    class Failing:
        def __iter__(self):
            return failing()

    with dual_loader(Failing, lambda: Plain(legacy_loader())) as loader:
        with pytest.raises(KeyError, match="legacy's own"):
            list(loader)
        assert loader.evidence[0].verdict == "dirty"
        assert loader.evidence[0].errors == ("""batch 0: KeyError: "legacy's own\"""",)


def test_two_iterations_at_once_end_the_older_one():
    with dual_loader() as loader:
        older = iter(loader)
        next(older)
        assert len(list(loader)) == NUM_BATCHES
        with pytest.raises(StopIteration):
            next(older)


def test_at_all_traffic_without_comparison_legacy_is_never_built_and_has_no_process():
    def legacy():
        raise AssertionError("a retired legacy loader was built")

    def build():
        return legacy_loader(num_workers=2)

    expected = legacy_run(2, build)
    seed_everything(5)
    before = len(psutil.Process().children(recursive=True))
    with dual_loader(legacy, lambda: pooled(build()), RETIRED) as loader:
        iterator = iter(loader)
        next(iterator)
        assert len(psutil.Process().children(recursive=True)) == before + 2, (
            "the candidate's two workers and nobody else's"
        )
        seed_everything(5)
        assert_same_run(expected, train(loader, 2))
        assert loader.evidence[1].num_served_by_candidate == NUM_BATCHES
    assert len(psutil.Process().children(recursive=True)) == before


def test_with_both_shadows_legacys_workers_run_beside_the_candidates():
    def build():
        return legacy_loader(num_workers=2)

    before = len(psutil.Process().children(recursive=True))
    with dual_loader(build) as loader:
        next(iter(loader))
        assert len(psutil.Process().children(recursive=True)) == before + 4


def test_threads_and_processes_are_flat_over_many_abandoned_epochs():
    before = threading.active_count()
    with dual_loader() as loader:
        for _ in range(100):
            next(iter(loader))
    gc.collect()
    time.sleep(0.05)
    assert threading.active_count() <= before


def test_the_first_divergence_is_a_bundle_that_says_the_same_again(tmp_path):
    settings = SHADOW.model_copy(
        update={"bundle_folder": tmp_path / "bundles", "sample_reference": {"workload": "drawing"}}
    )
    with dual_loader(
        legacy_loader, lambda: FaultyLoader(pooled(legacy_loader()), "bit flip", 2, epoch=1), settings
    ) as loader:
        for _ in range(3):
            list(loader)
        evidence = loader.evidence[1]
    assert evidence.first_divergence.bundle == "bundles/epoch-1-step-2-loader-shadow"
    assert evidence.first_divergence.where == "epoch 1, step 2, leaf [0], index [0, 0]"
    assert evidence.loader_shadow.num_mismatched == 1
    result = recompare(tmp_path / evidence.first_divergence.bundle)
    assert result.same_verdict
    assert (result.context.epoch, result.context.step, result.context.sample_reference) == (
        1,
        2,
        {"workload": "drawing"},
    )


def test_a_bundle_that_can_not_be_written_is_an_error_of_the_epoch_and_not_the_end_of_training(tmp_path):
    blocked = tmp_path / "bundles"
    blocked.write_text("a file where the folder should be")
    settings = SHADOW.model_copy(update={"bundle_folder": blocked})
    expected = legacy_run(1)
    seed_everything(5)
    with dual_loader(legacy_loader, lambda: FaultyLoader(pooled(legacy_loader()), "bit flip", 2), settings) as loader:
        assert_same_run(expected, train(loader, 1))
        assert loader.evidence[0].first_divergence.bundle is None
        assert loader.evidence[0].num_errors == 1


def test_own_generators_and_samplers_of_the_loader_keep_in_step():
    def build():
        generator = torch.Generator().manual_seed(4)
        dataset = TensorDataset(torch.arange(10))
        return DataLoader(
            dataset, batch_size=3, sampler=RandomSampler(dataset, generator=generator), generator=generator
        )

    expected = legacy_run_of_indices(build, 4)
    faults = []

    def candidate():
        return FaultyLoader(pooled(build()), "error", 2, epoch=faults.pop()) if faults else pooled(build())

    for mode_settings in (SHADOW, RETIRED):
        faults.append(1)
        seed_everything(5)
        with dual_loader(build, candidate, mode_settings) as loader:
            assert [[batch[0].tolist() for batch in loader] for _ in range(4)] == expected
            assert loader.evidence[3].verdict == "clean", loader.evidence[3].reasons


def legacy_run_of_indices(build, num_epochs):
    seed_everything(5)
    loader = build()
    return [[batch[0].tolist() for batch in loader] for _ in range(num_epochs)]


def test_set_epoch_reaches_the_samplers_of_both_sides():
    dataset = TensorDataset(torch.arange(10))

    def build():
        sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=2, rank=0)
        return DataLoader(dataset, batch_size=2, sampler=sampler)

    legacy = build()
    expected = []
    for epoch in range(3):
        legacy.sampler.set_epoch(epoch)
        expected.append([batch[0].tolist() for batch in legacy])
    for mode_settings in (SHADOW, RETIRED):
        with dual_loader(build, settings=mode_settings) as loader:
            got = []
            for epoch in range(3):
                loader.set_epoch(epoch)
                got.append([batch[0].tolist() for batch in loader])
            assert got == expected
            assert all(entry.num_errors == 0 for entry in loader.evidence)
    assert expected[0] != expected[1]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 0.999, 1.0]), st.integers(0, 500), st.integers(0, 3000))
def test_any_window_holds_exactly_the_share_and_every_position_gets_its_turn(share, epoch, start):
    window = 1000
    served = sum(serves_candidate(share, epoch, position) for position in range(start, start + window))
    assert served == round(share * window)
    over_epochs = sum(serves_candidate(share, number, start) for number in range(epoch, epoch + window))
    assert over_epochs == round(share * window)
    assert serves_candidate(share, epoch, start) == serves_candidate(share, epoch, start)


@pytest.mark.parametrize(
    "shares", [(0.0, 0.3, 0.6, 0.9), (), (0.5, 0.1, 1.0), (0.0, 0.5, 0.5, 1.0), (-0.1, 1.0), (0.0, 1.5)]
)
def test_a_ramp_that_does_not_rise_to_exactly_all_traffic_is_refused(shares):
    with pytest.raises(ValidationError, match=r"last rung is exactly 1\.0"):
        TrafficRamp(shares=shares)


def test_each_rung_has_its_own_evidence_and_is_left_only_after_its_clean_epochs():
    settings = SHADOW.model_copy(update={"ramp": TrafficRamp(num_clean_epochs_per_rung=2)})
    with dual_loader(settings=settings) as loader:
        for _ in range(10):
            list(loader)
        assert [entry.traffic_share for entry in loader.evidence] == [0.0] * 2 + [0.1] * 2 + [0.5] * 2 + [1.0] * 4
        assert [entry.rung for entry in loader.evidence] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
        assert [entry.num_served_by_candidate for entry in loader.evidence[4:]] == [2] * 2 + [NUM_BATCHES] * 4
        assert loader.ramp_position.share == 1.0
    with dual_loader(settings=settings) as loader:
        for _ in range(3):
            for _ in loader:
                break
        assert loader.ramp_position.rung == 0, "epochs that are not counted lead nowhere"


def test_a_ramp_that_did_not_start_at_zero_stays_in_probation_after_a_dirty_epoch():
    place = RampPosition(TrafficRamp(shares=(0.5, 1.0), num_clean_epochs_per_rung=1))
    assert place.share == 0.5
    place.note_dirty()
    for _ in range(5):
        place.note_clean()
        assert (place.share, place.in_probation) == (0.0, True)
    restored = RampPosition(place.ramp)
    restored.restore(place.to_plain())
    assert restored.share == 0.0 and restored.in_probation


def test_the_count_of_clean_epochs_names_each_reset():
    count = CleanEpochCount(key="k", count=5)
    with dual_loader(legacy_loader, lambda: FaultyLoader(pooled(legacy_loader()), "error", 1)) as loader:
        list(loader)
        after = count.after(loader.evidence[0])
    assert (after.count, str(after)) == (0, "0 of 100")
    assert after.reset_reasons[0].startswith("epoch 0: loader shadow: 3 of 4 batches were not compared")


def test_evidence_survives_json():
    with dual_loader(legacy_loader, lambda: FaultyLoader(pooled(legacy_loader()), "bit flip", 0)) as loader:
        list(loader)
        evidence = loader.evidence[0]
    assert type(evidence).model_validate_json(evidence.model_dump_json()) == evidence


@pytest.mark.parametrize("settings", [SHADOW, RETIRED], ids=["shadow", "retired"])
def test_a_checkpoint_does_not_grow_with_the_epochs(settings):
    sizes = []
    with dual_loader(settings=settings) as loader:
        for _ in range(6):
            list(loader)
            sizes.append(len(json.dumps(loader.state_dict()["journal"])))
    assert max(sizes) < 1.1 * min(sizes)
    assert max(sizes) < 100_000


def test_close_twice_is_fine_and_a_later_iteration_starts_again():
    loader = dual_loader()
    next(iter(loader))
    loader.close()
    loader.close()
    assert len(list(loader)) == NUM_BATCHES
    loader.close()


def test_the_transfer_figures_of_the_candidate_are_at_hand():
    with dual_loader(settings=ALL_TRAFFIC) as loader:
        list(loader)
        stats = loader.prefetch_stats()
    assert stats.num_batches == NUM_BATCHES
    assert stats.mode == "host copies: no CUDA device"


@pytest.mark.full
def test_a_hundred_epochs_of_digits_with_both_shadows_are_clean():
    workload = create()

    def build():
        return workload.legacy_loader("train")

    settings = SHADOW.model_copy(update={"ramp": TrafficRamp(num_clean_epochs_per_rung=10)})
    seed_everything(1)
    with DualTrackLoader(build, lambda: PooledLoader(build(), "cpu", 2**20), "cpu", settings) as loader:
        for _ in range(100):
            assert sum(1 for _ in loader) == 23
        assert str(loader.clean_epochs) == "100 of 100" and loader.clean_epochs.is_reached
        assert loader.evidence[99].num_served_by_candidate == 23
