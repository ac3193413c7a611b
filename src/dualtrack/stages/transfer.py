"""Stage 2: the copy of batch t+1 runs on its own stream while step t computes, beside the legacy path until that is retired.

Dual track over the epochs asked for, both shadows on, traffic along the ramp; a planted fault resets the count and falls back with every
sample exactly once; then legacy is retired and rolled back to. Clean epochs are counted in the run's ledger under a key.
"""

from collections.abc import Sequence
from typing import Any

from dualtrack.facts.digests import sha256_json
from dualtrack.facts.ledger import Ledger, clean_epoch_key
from dualtrack.facts.observations import Divergence, Equality, Observation, Value
from dualtrack.facts.records import PlantedFault, Series, StageRecord
from dualtrack.facts.settings import TransferSettings
from dualtrack.facts.verdicts import plant_fault
from dualtrack.loading.shadow_evidence import EpochEvidence
from dualtrack.measuring.code_state import digest_source_tree
from dualtrack.measuring.trials import run_or_raise
from dualtrack.stages.baseline import ensure_baseline
from dualtrack.stages.comparison import compare_batches, compare_traces
from dualtrack.stages.memory import add_trial_observations
from dualtrack.stages.pool_sizes import PoolSizes
from dualtrack.stages.rollback import execute_rollback
from dualtrack.stages.stage_run import Findings, StageRun, save_record
from dualtrack.stages.transfer_runs import DualTrackResult, DualTrackSpec, FaultResult, FaultSpec, RetirementResult
from dualtrack.stages.trial_series import TrialSeries

RUNS = "dualtrack.stages.transfer_runs"
FAULT_EPOCH, FAULT_EPOCHS = 1, 3
DUAL_TRACK_DEADLINE_SECONDS = 1800.0
STABLE_KEYS = (
    "clean_epochs", "batches_equal_frozen", "training_equals_baseline", "transfer_shadow", "loader_shadow", "fallback_is_exact",
    "final_traffic_share", "legacy_is_retired", "allocations_after_warmup", "rollback_verified",
)  # fmt: skip


def run_transfer_stage(run: StageRun) -> StageRecord:
    """Run the dual track, plant faults, retire legacy, time the new path beside the old, roll back; save the record."""
    settings: TransferSettings = run.settings
    sizes = PoolSizes.choose(run.frozen, settings.cap_bytes)
    findings = Findings(stable_keys=STABLE_KEYS)
    dual = _run_dual_track(run, findings, sizes)
    faults = [_run_fault(run, findings, sizes, kind) for kind in ("error", "mismatch")]
    findings.observe("legacy_is_retired", "a retired legacy path", lambda: _retire(run, sizes))
    series = TrialSeries(run, cap_bytes=sizes.cap_bytes, slot_bytes=sizes.slot_bytes)
    series.sample_memory(["legacy", "prefetched"])
    series.compare("prefetched", settings.num_pairs)
    findings.trials = series.trials
    add_trial_observations(run, findings, "prefetched", sizes, [dual.pool_peak_bytes / sizes.cap_bytes] if dual else [])
    findings.rollback = execute_rollback(run, "prefetched", sizes)
    findings.observations["rollback_verified"] = Value(
        what="rollback to legacy executed and checked", value=findings.rollback.verified
    )
    findings.planted_faults = _planted(run, faults)
    findings.figures = _figures(dual) if dual else {}
    return save_record(run, findings)


def _run_dual_track(run: StageRun, findings: Findings, sizes: PoolSizes) -> DualTrackResult | None:
    settings: TransferSettings = run.settings
    ledger = run.folder / "ledger.jsonl"
    key = _count_key(run, sizes)
    before = Ledger(ledger).clean_epochs(key)
    spec = DualTrackSpec(
        workload=settings.workload, device=run.device, seed=run.frozen.seed, cap_bytes=sizes.cap_bytes, slot_bytes=sizes.slot_bytes,
        num_epochs=max(1, settings.num_epochs - before), ramp=settings.traffic_ramp, key=key, ledger=str(ledger),
        num_clean_epochs_per_rung=max(1, min(10, settings.num_epochs // (len(settings.traffic_ramp) + 1))),
        bundle_folder=str(run.folder / "bundles"), frozen_inputs_digest=run.frozen.digest,
    )  # fmt: skip
    results: list[DualTrackResult] = []

    def clean_epochs() -> Observation:
        results.append(run_or_raise(f"{RUNS}:run_dual_track", {"spec": spec}, DUAL_TRACK_DEADLINE_SECONDS))
        run.notes.extend(f"The count was reset: {reason}" for reason in results[0].reset_reasons)
        if before:
            run.notes.append(
                f"{before} clean epochs stood in this run's ledger under the same key and were counted on."
            )
        return Value(
            what="consecutive clean dual-track epochs, both shadows on", value=results[0].clean_epochs, unit="epochs"
        )

    findings.observe("clean_epochs", "dual-track epochs", clean_epochs)
    if not results:
        return None
    dual = results[0]
    for shadow in ("transfer_shadow", "loader_shadow"):
        findings.observations[shadow] = _sum_shadow(dual.evidence, shadow)
    baseline = ensure_baseline(run)
    findings.observations["batches_equal_frozen"] = compare_batches(
        "tensors that the dual track delivered against the frozen batches", run.frozen, dual.first_epoch.batches
    )
    findings.observations["training_equals_baseline"] = compare_traces(baseline, dual.first_epoch)
    findings.observations["final_traffic_share"] = Value(
        what="share of traffic at the end of the ramp", value=dual.final_share, unit="fraction"
    )
    return dual


def _count_key(run: StageRun, sizes: PoolSizes) -> str:
    """Return what the count of clean epochs stands under: loading source, settings that shape it, frozen inputs, versions, hardware."""
    packages = run.conditions["before"].get("packages", {})
    shaping = {
        "workload": run.settings.workload,
        "seed": run.frozen.seed,
        "ramp": list(run.settings.traffic_ramp),
        **sizes.model_dump(),
    }
    return clean_epoch_key(
        digest_source_tree("loading"), sha256_json(shaping), run.frozen.digest, {name: str(version) for name, version in packages.items()},
        run.hardware_identity,
    )  # fmt: skip


def _sum_shadow(evidence: Sequence[EpochEvidence], shadow: str) -> Equality:
    counts = [found for epoch in evidence if (found := getattr(epoch, shadow)) is not None]
    name = shadow.replace("_", " ")
    first = next((epoch.first_divergence for epoch in evidence if epoch.first_divergence is not None), None)
    return Equality(
        what=f"{name}: batches compared over {len(evidence)} epochs", num_compared=sum(count.num_compared for count in counts),
        num_equal=sum(count.num_equal for count in counts), num_mismatched=sum(count.num_mismatched for count in counts),
        num_skipped=sum(count.num_skipped for count in counts), first_divergence=first,
    )  # fmt: skip


def _run_fault(run: StageRun, findings: Findings, sizes: PoolSizes, kind: str) -> FaultResult:
    """Let the candidate go wrong in the middle of an epoch; what arrives all the same has to be legacy's sequence, each sample once."""
    spec = FaultSpec(
        workload=run.settings.workload, device=run.device, seed=run.frozen.seed, cap_bytes=sizes.cap_bytes, slot_bytes=sizes.slot_bytes,
        kind=kind, epoch=FAULT_EPOCH, position=len(run.frozen.batches) // 2, num_epochs=FAULT_EPOCHS, bundle_folder=str(run.folder / "bundles"),
    )  # fmt: skip
    result: FaultResult = run_or_raise(f"{RUNS}:run_with_fault", {"spec": spec}, run.settings.trial_deadline_seconds)
    if kind == "error":
        findings.observations["fallback_is_exact"] = _compare_sequences(result)
        faulty = result.evidence[FAULT_EPOCH]
        run.notes.append(
            f"Planted fault at batch {spec.position} of epoch {FAULT_EPOCH}: {'; '.join(faulty.reasons)}; legacy went on from batch "
            f"{faulty.fallback_position}, the count stood at {result.clean_epochs} after {FAULT_EPOCHS} epochs."
        )
    return result


def _compare_sequences(result: FaultResult) -> Equality:
    longer = max(len(result.delivered), len(result.legacy))
    padded = [[*side, *([""] * (longer - len(side)))] for side in (result.delivered, result.legacy)]
    equal = [bool(left) and left == right for left, right in zip(*padded, strict=True)]
    first = None
    if not all(equal):
        place = equal.index(False)
        first = Divergence(
            where=f"batch {place} of the sequence", legacy=padded[1][place][:16], candidate=padded[0][place][:16]
        )
    return Equality(
        what="batches delivered around a planted fault against legacy alone, in order", num_compared=longer, num_equal=sum(equal),
        num_mismatched=longer - sum(equal), first_divergence=first,
    )  # fmt: skip


def _retire(run: StageRun, sizes: PoolSizes) -> Observation:
    arguments: dict[str, Any] = {
        "workload": run.settings.workload, "device": run.device, "seed": run.frozen.seed, "cap_bytes": sizes.cap_bytes, "slot_bytes": sizes.slot_bytes,
    }  # fmt: skip
    seen: RetirementResult = run_or_raise(f"{RUNS}:run_retired", arguments, run.settings.trial_deadline_seconds)
    run.notes.append(
        f"Retired: the legacy loader was built {seen.num_legacy_built} times, {seen.num_processes} worker processes ran "
        f"({seen.num_expected_processes} are the new loader's own)."
    )
    holds = (
        seen.num_legacy_built == 0
        and seen.num_processes <= seen.num_expected_processes
        and seen.delivered == seen.legacy
    )
    return Value(what="retired: legacy never built, no process of its own, batches unchanged", value=holds)


def _planted(run: StageRun, faults: Sequence[FaultResult]) -> list[PlantedFault]:
    """Judge what the two faults left: an error resets the count, a changed byte shows in a shadow."""
    error, mismatch = faults
    count = Value(what="clean epochs after a candidate's error", value=error.clean_epochs, unit="epochs")
    shadow = _sum_shadow(mismatch.evidence, "loader_shadow")
    lost = _compare_sequences(error.model_copy(update={"delivered": (*error.delivered[:5], *error.delivered[6:])}))
    return [
        plant_fault("candidate raises in mid-epoch", "clean_epochs", count, run.limits, run.device),
        plant_fault("one byte of a candidate's batch changed", "loader_shadow", shadow, run.limits, run.device),
        plant_fault("one batch lost in the fallback", "fallback_is_exact", lost, run.limits, run.device),
    ]


def _figures(dual: DualTrackResult) -> dict[str, Series]:
    count, counted = 0, []
    for epoch in dual.evidence:
        count = count + 1 if epoch.clean else 0 if epoch.verdict == "dirty" else count
        counted.append((float(epoch.epoch), float(count)))
    served = tuple(
        (float(epoch.epoch), epoch.num_served_by_candidate / max(1, epoch.num_batches)) for epoch in dual.evidence
    )
    planned = tuple((float(epoch.epoch), epoch.traffic_share) for epoch in dual.evidence)
    figures = {
        "clean_epochs": Series(
            title=f"How many clean epochs in a row? {count}, target 100", x_label="epoch", y_label="clean epochs in a row",
            lines={"dual track": tuple(counted)}, bounds={"target": 100.0},
        ),
        "traffic_share": Series(
            title="Who serves the batches? Traffic of the candidate, epoch by epoch", x_label="epoch", y_label="share of batches",
            lines={"planned by the ramp": planned, "served by the candidate": served},
        ),
    }  # fmt: skip
    timeline = dual.prefetcher.get("timeline") or ()
    if timeline:
        lines: dict[str, tuple[tuple[float, float], ...]] = {}
        for item in timeline[-8:]:
            lines[f"copy {item['batch']}"] = ((item["copy_start_seconds"], 1.0), (item["copy_end_seconds"], 1.0))
            lines[f"compute {item['batch']}"] = (
                (item["compute_start_seconds"], 0.0),
                (item["compute_end_seconds"], 0.0),
            )
        figures["timeline"] = Series(
            title="Does the copy of the next batch run while a step computes?",
            x_label="seconds",
            y_label="1: copying, 0: computing",
            lines=lines,
        )
    return figures
