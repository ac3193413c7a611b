"""What stage 2 runs in fresh processes: the dual track over many epochs, a candidate that fails on purpose, and a retired legacy path."""

import multiprocessing
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dualtrack.facts.errors import LoaderError
from dualtrack.facts.frozen_inputs import FrozenBatch
from dualtrack.facts.ledger import CleanEpochs, Ledger
from dualtrack.facts.observations import Fact
from dualtrack.loading.dual_track import DualTrackLoader
from dualtrack.loading.host_batch import HostBatch
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.routing import TrafficRamp
from dualtrack.loading.shadow_evidence import EpochEvidence
from dualtrack.loading.shadow_settings import DualTrackSettings
from dualtrack.training.data_paths import poolable_loader
from dualtrack.training.frozen_batches import digest_leaves, digest_parameters
from dualtrack.training.frozen_run import EqualityTrace, digest_delivered
from dualtrack.training.loop import TrainingJob, choose_device, deterministic_algorithms, run_equality_steps
from dualtrack.training.workload import Workload, load_workload, seed_everything


class DualTrackSpec(Fact):
    """What one dual-track run is asked for."""

    workload: str
    device: str
    seed: int
    cap_bytes: int
    slot_bytes: int
    num_epochs: int
    ramp: tuple[float, ...]
    num_clean_epochs_per_rung: int
    key: str
    ledger: str
    bundle_folder: str
    frozen_inputs_digest: str


class DualTrackResult(Fact):
    """What it showed."""

    evidence: tuple[EpochEvidence, ...]
    clean_epochs: int
    reset_reasons: tuple[str, ...]
    first_epoch: EqualityTrace
    """The first epoch's batches, losses and gradient norms, to be compared with the legacy baseline."""
    final_share: float
    pool_peak_bytes: int
    prefetcher: dict[str, Any]


class FaultSpec(Fact):
    """A candidate that goes wrong on purpose at one batch."""

    workload: str
    device: str
    seed: int
    cap_bytes: int
    slot_bytes: int
    kind: str
    """`error`: the candidate raises; `mismatch`: one element of the batch is changed."""
    epoch: int
    position: int
    num_epochs: int
    bundle_folder: str


class FaultResult(Fact):
    """What was delivered all the same, and what the track noted."""

    evidence: tuple[EpochEvidence, ...]
    clean_epochs: int
    delivered: tuple[str, ...]
    """One digest a batch, over all epochs."""
    legacy: tuple[str, ...]
    """The same from the legacy loader alone."""


class RetirementResult(Fact):
    """A run at 100 % with comparison off."""

    num_legacy_built: int
    num_processes: int
    """Most child processes seen while it ran."""
    num_expected_processes: int
    delivered: tuple[str, ...]
    legacy: tuple[str, ...]


def run_dual_track(spec: DualTrackSpec) -> DualTrackResult:
    """Train `num_epochs` epochs with both shadows along the ramp; every epoch's verdict goes to the ledger as it ends."""
    ledger, device, workload = Ledger(Path(spec.ledger)), choose_device(spec.device), load_workload(spec.workload)
    settings = DualTrackSettings(
        ramp=TrafficRamp(shares=spec.ramp, num_clean_epochs_per_rung=spec.num_clean_epochs_per_rung), clean_epoch_key=spec.key,
        num_clean_epochs_before=ledger.clean_epochs(spec.key), bundle_folder=Path(spec.bundle_folder),
        sample_reference={"workload": spec.workload, "seed": spec.seed, "frozen_inputs_digest": spec.frozen_inputs_digest},
    )  # fmt: skip

    def note(evidence: EpochEvidence) -> None:
        if evidence.verdict != "not counted":
            reasons = None if evidence.clean else "; ".join(evidence.reasons)
            ledger.append(
                CleanEpochs(at=datetime.now(UTC), key=spec.key, num_epochs=int(evidence.clean), reset_because=reasons)
            )

    delivered: list[FrozenBatch] = []
    with deterministic_algorithms():
        job = TrainingJob(workload, device, spec.seed)
        initial = digest_parameters(job.model)
        pools: list[PooledLoader] = []
        candidate = _candidate(workload, device, spec.cap_bytes, spec.slot_bytes, pools)
        legacy_copy = _legacy_copy(workload, device)
        with DualTrackLoader(
            lambda: workload.legacy_loader("train"), candidate, device, settings, legacy_copy=legacy_copy, on_epoch=note
        ) as track:
            losses, norms = run_equality_steps(
                job, iter(track), len(track), lambda step, batch: delivered.append(digest_delivered(batch, step))
            )
            final = digest_parameters(job.model)
            for _ in range(1, spec.num_epochs):
                for batch in track:
                    job.step(batch)
            peak = max(pool.stats().pool_peak_bytes for pool in pools)
            trace = EqualityTrace(
                path="dual track", losses=tuple(losses), gradient_norms=tuple(norms), initial_parameters_digest=initial,
                final_parameters_digest=final, batches=tuple(delivered),
            )  # fmt: skip
            return DualTrackResult(
                evidence=tuple(track.evidence), clean_epochs=track.clean_epochs.count, reset_reasons=track.clean_epochs.reset_reasons,
                first_epoch=trace, final_share=track.evidence[-1].traffic_share, pool_peak_bytes=peak,
                prefetcher=track.prefetch_stats().model_dump(mode="json"),
            )  # fmt: skip


def run_with_fault(spec: FaultSpec) -> FaultResult:
    """Iterate a dual track at 50 % traffic whose candidate goes wrong once, and legacy alone beside it."""
    device, workload = choose_device(spec.device), load_workload(spec.workload)
    settings = DualTrackSettings(
        ramp=TrafficRamp(shares=(0.5, 1.0), num_clean_epochs_per_rung=1000), bundle_folder=Path(spec.bundle_folder)
    )
    seed_everything(spec.seed)
    pools: list[PooledLoader] = []
    good = _candidate(workload, device, spec.cap_bytes, spec.slot_bytes, pools)
    faulty = _FaultyOnce(spec)
    with DualTrackLoader(
        lambda: workload.legacy_loader("train"),
        lambda: faulty.around(good()),
        device,
        settings,
        legacy_copy=_legacy_copy(workload, device),
    ) as track:
        delivered = tuple(digest_leaves(batch) for _ in range(spec.num_epochs) for batch in track)
        evidence, count = tuple(track.evidence), track.clean_epochs.count
    legacy = legacy_digests(spec.workload, spec.device, spec.seed, spec.num_epochs)
    return FaultResult(evidence=evidence, clean_epochs=count, delivered=delivered, legacy=legacy)


def run_retired(workload: str, device: str, seed: int, cap_bytes: int, slot_bytes: int) -> RetirementResult:
    """Run an epoch at 100 % with comparison off; count how often the legacy loader was built, and the processes that were there."""
    where, job = choose_device(device), load_workload(workload)
    settings = DualTrackSettings(ramp=TrafficRamp(shares=(1.0,)), loader_shadow=False, transfer_shadow=False)
    built: list[int] = []

    def legacy() -> Any:
        built.append(1)
        return job.legacy_loader("train")

    seed_everything(seed)
    most, delivered = 0, list[str]()
    with DualTrackLoader(legacy, _candidate(job, where, cap_bytes, slot_bytes, []), where, settings) as track:
        for batch in track:
            most = max(most, len(multiprocessing.active_children()))
            delivered.append(digest_leaves(batch))
    reference = legacy_digests(workload, device, seed, 1)
    expected = getattr(job.legacy_loader("train"), "num_workers", 0)
    return RetirementResult(
        num_legacy_built=len(built),
        num_processes=most,
        num_expected_processes=expected,
        delivered=tuple(delivered),
        legacy=reference,
    )


def legacy_digests(workload: str, device: str, seed: int, num_epochs: int) -> tuple[str, ...]:
    """Return one digest a batch of the legacy path alone, over `num_epochs` epochs after seeding."""
    where, job = choose_device(device), load_workload(workload)
    seed_everything(seed)
    loader = job.legacy_loader("train")
    return tuple(digest_leaves(job.to_device(batch, where)) for _ in range(num_epochs) for batch in loader)


class _FaultyOnce:
    """Puts one fault into a pooled loader's batches, in the epoch and at the position that was asked for."""

    def __init__(self, spec: FaultSpec) -> None:
        self.spec, self.epoch, self.done = spec, -1, False

    def around(self, loader: PooledLoader) -> "_FaultyLoader":
        return _FaultyLoader(self, loader)


class _FaultyLoader:
    """A pooled loader whose `host_batches` go wrong once; everything else is the loader's own."""

    def __init__(self, fault: _FaultyOnce, loader: PooledLoader) -> None:
        self._fault, self._loader = fault, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def host_batches(self) -> Iterator[HostBatch]:
        fault = self._fault
        fault.epoch += 1
        for position, batch in enumerate(self._loader.host_batches()):
            if not fault.done and fault.epoch == fault.spec.epoch and position == fault.spec.position:
                fault.done = True
                if fault.spec.kind == "error":
                    batch.release()
                    raise LoaderError("planted fault: the candidate failed at this batch")
                if batch.packed is not None:
                    batch.packed[0] ^= 1
            yield batch

    def close(self) -> None:
        self._loader.close()


def _candidate(
    workload: Workload, device: torch.device, cap_bytes: int, slot_bytes: int, made: list[PooledLoader]
) -> Callable[[], PooledLoader]:
    def build() -> PooledLoader:
        made.append(
            PooledLoader(
                poolable_loader(workload, workload.legacy_loader("train")),
                device=device,
                cap_bytes=cap_bytes,
                slot_bytes=slot_bytes,
            )
        )
        return made[-1]

    return build


def _legacy_copy(workload: Workload, device: torch.device) -> Callable[[Any], Any]:
    return lambda batch: workload.to_device(batch, device)
