"""The dual track on a CUDA device: legacy's own run in every mode, comparisons behind the copies, flat memory."""

import pytest
import torch
from dual_track_runs import (
    ALL_TRAFFIC,
    MODES,
    NUM_BATCHES,
    RETIRED,
    SHADOW,
    assert_same_run,
    legacy_loader,
    train,
)
from torch.utils.data import DataLoader, Dataset

from dualtrack.loading.divergence_bundle import recompare
from dualtrack.loading.dual_track import DualTrackLoader
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.shadow_faults import FaultyLoader
from dualtrack.loading.shadow_tracks import copy_leaves_to
from dualtrack.training.loop import TrainingJob, deterministic_algorithms
from dualtrack.training.workload import seed_everything
from dualtrack.workloads.digits import create

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda", 0)


def pooled(loader: DataLoader, slot_bytes: int = 1024) -> PooledLoader:
    num_slots = max(1, loader.num_workers) * ((loader.prefetch_factor or 1) + 2)
    return PooledLoader(loader, DEVICE, num_slots * slot_bytes + 4096, slot_bytes=slot_bytes)


def legacy_on_device(build, num_epochs):
    class OnDevice:
        def __init__(self):
            self.loader = build()

        def __iter__(self):
            return map(copy_leaves_to(DEVICE), self.loader)

    seed_everything(5)
    return train(OnDevice(), num_epochs)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_gets_legacys_own_run_in_every_mode(mode, num_workers):
    def build():
        return legacy_loader(num_workers)

    expected = legacy_on_device(build, 3)
    seed_everything(5)
    with DualTrackLoader(build, lambda: pooled(build()), DEVICE, MODES[mode]) as loader:
        assert_same_run(expected, train(loader, 3))
        assert all(entry.verdict in ("clean", "not counted") for entry in loader.evidence), loader.evidence
        assert all(entry.num_pageable == 0 for entry in loader.evidence)


@pytest.mark.parametrize("position", range(NUM_BATCHES))
@pytest.mark.parametrize("kind", ["error", "bit flip", "early end", "extra batch", "swapped batches"])
@pytest.mark.parametrize("settings", [SHADOW, ALL_TRAFFIC, RETIRED], ids=["shadow", "all traffic", "retired"])
def test_every_fault_at_every_position_gives_legacys_own_run(settings, kind, position):
    if settings is RETIRED and kind not in ("error", "early end"):
        pytest.skip("without a comparison nobody can see wrong bytes")
    expected = legacy_on_device(legacy_loader, 2)
    faults = [1]

    def candidate():
        loader = pooled(legacy_loader())
        return FaultyLoader(loader, kind, position, epoch=faults.pop()) if faults else loader

    seed_everything(5)
    with DualTrackLoader(legacy_loader, candidate, DEVICE, settings) as loader:
        assert_same_run(expected, train(loader, 2))
        assert loader.evidence[1].verdict == "dirty"


def test_legacys_losses_are_bit_equal_with_and_without_the_shadows():
    def losses(path):
        job = TrainingJob(create(), DEVICE, seed=3)

        def build():
            return job.workload.legacy_loader("train")

        def copy(batch):
            return job.workload.to_device(batch, DEVICE)

        with deterministic_algorithms():
            if path == "legacy":
                loader = build()
                return [float(job.step(copy(batch))) for _ in range(2) for batch in loader]
            with DualTrackLoader(
                build, lambda: PooledLoader(build(), DEVICE, 2**20), DEVICE, SHADOW, legacy_copy=copy
            ) as dual:
                found = [float(job.step(batch)) for _ in range(2) for batch in dual]
                assert [entry.verdict for entry in dual.evidence] == ["clean", "clean"]
                return found

    assert losses("dual") == losses("legacy")


class Large(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((500_000,), float(index)), index


@pytest.mark.parametrize("settings", [SHADOW, ALL_TRAFFIC], ids=["shadow", "all traffic"])
def test_large_batches_are_compared_behind_their_copies_while_slow_steps_run(settings):
    def build():
        return DataLoader(Large(), batch_size=4, num_workers=2)

    with DualTrackLoader(build, lambda: pooled(build(), 4 * 4 * 500_000 + 1024), DEVICE, settings) as loader:
        for place, (values, labels) in enumerate(loader):
            torch.cuda._sleep(5_000_000)
            assert labels.tolist() == [4 * place + k for k in range(4)]
            assert torch.equal(values[:, 0].cpu().long(), labels.cpu())
            values.fill_(float("nan"))
        assert loader.evidence[0].clean, loader.evidence[0]


def test_reserved_device_memory_is_flat_over_forty_dual_track_epochs():
    reserved = []

    def build():
        return DataLoader(Large(), batch_size=4)

    with DualTrackLoader(build, lambda: pooled(build(), 4 * 4 * 500_000 + 1024), DEVICE, SHADOW) as loader:
        for _ in range(40):
            for values, _ in loader:
                values.mul_(2).sum()
            del values
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved(DEVICE))
    # the ramp changes which side serves, so the last rung has to be seen once before the memory must stand still
    assert len(set(reserved[32:])) == 1, reserved
    assert max(reserved) <= 3 * reserved[2], reserved


def test_a_divergence_on_the_device_is_a_bundle_that_says_the_same_on_the_cpu(tmp_path):
    settings = SHADOW.model_copy(update={"bundle_folder": tmp_path / "bundles"})
    with DualTrackLoader(
        legacy_loader, lambda: FaultyLoader(pooled(legacy_loader()), "bit flip", 2), DEVICE, settings
    ) as loader:
        list(loader)
        divergence = loader.evidence[0].first_divergence
    assert divergence.where == "epoch 0, step 2, leaf [0], index [0, 0]"
    assert recompare(tmp_path / divergence.bundle).same_verdict


def test_a_pool_that_could_not_be_page_locked_makes_the_epoch_dirty():
    def candidate():
        return PooledLoader(legacy_loader(), DEVICE, 64 * 1024, slot_bytes=1024, page_lock=None)

    with DualTrackLoader(legacy_loader, candidate, DEVICE, SHADOW) as loader:
        list(loader)
        assert loader.evidence[0].num_pageable == NUM_BATCHES
        assert loader.evidence[0].verdict == "dirty"
