"""Stage 1: host memory. A bounded page-locked pool between the loader's workers and the device, and nothing else changes.

The pool may never hold more than its cap, a full pool makes the producer wait, train and eval have pools of their own, and what arrives is
the frozen epoch bit for bit. No distributed communication is allowed here.
"""

from collections.abc import Sequence
from typing import Any

from dualtrack.facts.derivations import failures_from_trials, ratio_from_trials
from dualtrack.facts.observations import Maximum, Observation, Value
from dualtrack.facts.records import PlantedFault, Series, StageRecord
from dualtrack.facts.settings import MemorySettings
from dualtrack.facts.verdicts import plant_fault
from dualtrack.measuring.trials import run_or_raise
from dualtrack.stages.baseline import ensure_baseline, trace_path
from dualtrack.stages.comparison import compare_batches, compare_traces
from dualtrack.stages.memory_probes import PoolProbe
from dualtrack.stages.pool_sizes import PoolSizes
from dualtrack.stages.rollback import execute_rollback
from dualtrack.stages.stage_run import Findings, StageRun, save_record
from dualtrack.stages.trial_series import TrialSeries
from dualtrack.training.frozen_run import EqualityTrace

PROBES = "dualtrack.stages.memory_probes"
FULL_POOL_SLEEP_SECONDS = 0.03
STABLE_KEYS = (
    "batches_equal_frozen", "training_equals_baseline", "full_pool_makes_producer_wait", "pools_are_isolated", "small_cap_refused",
    "refused_in_process_group", "allocations_after_warmup", "rollback_verified",
)  # fmt: skip


def run_memory_stage(run: StageRun) -> StageRecord:
    """Compare batches and training, probe the pool's bounds, time it beside legacy, roll back; save the record."""
    settings: MemorySettings = run.settings
    sizes = PoolSizes.choose(run.frozen, settings.cap_bytes, settings.eval_cap_bytes)
    findings = Findings(stable_keys=STABLE_KEYS)
    trace = compare_with_frozen(run, findings, "pooled", sizes)
    probes = _probe_bounds(run, findings, sizes)
    _probe_refusals(run, findings, sizes)
    series = TrialSeries(run, cap_bytes=sizes.cap_bytes, slot_bytes=sizes.slot_bytes)
    series.sample_memory(["legacy", "pooled"])
    series.compare("pooled", settings.num_pairs)
    if run.device.startswith("cuda"):
        series.repeat("pinned", 3, "extra")
    findings.trials = series.trials
    shares = [probe.pool_peak_bytes / probe.cap_bytes for probe in probes.values()]
    add_trial_observations(run, findings, "pooled", sizes, shares)
    findings.rollback = execute_rollback(run, "pooled", sizes)
    findings.observations["rollback_verified"] = Value(
        what="rollback to legacy executed and checked", value=findings.rollback.verified
    )
    findings.planted_faults = _plant_faults(run, trace, sizes)
    findings.figures = _figures(run, probes, sizes)
    return save_record(run, findings)


def compare_with_frozen(run: StageRun, findings: Findings, path: str, sizes: PoolSizes) -> EqualityTrace | None:
    """Train on the frozen epoch by `path`; compare every delivered tensor with the freeze and every step with the baseline."""
    traces: list[EqualityTrace] = []

    def batches() -> Observation:
        traces.append(trace_path(run, path, cap_bytes=sizes.cap_bytes, slot_bytes=sizes.slot_bytes))
        return compare_batches(
            f"tensors delivered by the {path} path against the frozen batches", run.frozen, traces[0].batches
        )

    findings.observe("batches_equal_frozen", f"{path} batches against the freeze", batches)
    if traces:
        findings.observe(
            "training_equals_baseline",
            f"training on the {path} path",
            lambda: compare_traces(ensure_baseline(run), traces[0]),
        )
    return traces[0] if traces else None


def add_trial_observations(
    run: StageRun, findings: Findings, track: str, sizes: PoolSizes, other_shares: Sequence[float] = ()
) -> None:
    """Derive the observations that follow from the trials: pool peak over cap, late allocations, failures, step latency."""
    mine = [trial for trial in findings.trials if trial.track == track and trial.loader_stats]
    shares = [float(trial.loader_stats["pool_peak_bytes"]) / sizes.cap_bytes for trial in mine]
    late = sum(int(trial.loader_stats["num_allocations_after_warmup"]) for trial in mine)
    floor = run.floor_trials()
    findings.observations |= {
        "pool_peak_share_of_cap": Maximum(
            what="pool peak over its cap", unit="fraction", values=(*shares, *other_shares)
        ),
        "allocations_after_warmup": Value(what="slab allocations in steady state", value=late),
        "trial_failures": failures_from_trials(findings.trials, f"legacy and {track} runs"),
        "step_latency_ratio": ratio_from_trials(
            findings.trials, track, f"{track} over legacy, median step", floor_trials=floor
        ),
        "step_latency_p95_ratio": ratio_from_trials(
            findings.trials, track, f"{track} over legacy, 95th percentile step", statistic="p95", floor_trials=floor
        ),
        "step_latency_max_ratio": ratio_from_trials(
            findings.trials, track, f"{track} over legacy, longest step", statistic="max", floor_trials=floor
        ),
    }


def _probe_bounds(run: StageRun, findings: Findings, sizes: PoolSizes) -> dict[str, PoolProbe]:
    deadline = run.settings.trial_deadline_seconds
    common: dict[str, Any] = {"workload": run.settings.workload, "device": run.device, "seed": run.frozen.seed}
    probes: dict[str, PoolProbe] = {}

    def full_pool() -> Observation:
        for name, cap in (
            ("sleeping consumer, roomy cap", sizes.cap_bytes),
            ("sleeping consumer, tight cap", sizes.tight_cap_bytes),
        ):
            arguments = {
                **common,
                "cap_bytes": cap,
                "slot_bytes": sizes.slot_bytes,
                "sleep_seconds": FULL_POOL_SLEEP_SECONDS,
            }
            probes[name] = run_or_raise(f"{PROBES}:probe_full_pool", arguments, deadline)
        tight, roomy = probes["sleeping consumer, tight cap"], probes["sleeping consumer, roomy cap"]
        held = (
            tight.producer_wait_seconds > 0
            and tight.pool_peak_bytes <= sizes.tight_cap_bytes
            and tight.batch_digests == roomy.batch_digests
        )
        run.notes.append(
            f"Tight cap of {sizes.tight_cap_bytes:,} bytes: the producers waited {tight.producer_wait_seconds:.2f} s for a free slot."
        )
        return Value(
            what="in a full pool the producer waits, the pool stays under its cap, and the batches are the same",
            value=held,
        )

    def isolated() -> Observation:
        arguments = {
            **common,
            "cap_bytes": sizes.cap_bytes,
            "eval_cap_bytes": sizes.eval_cap_bytes,
            "slot_bytes": sizes.slot_bytes,
        }
        both = run_or_raise(f"{PROBES}:probe_isolated_pools", arguments, deadline)
        probes.update({f"two pools: {name}": probe for name, probe in both.items()})
        legacy = run_or_raise(f"{PROBES}:digest_split", {**common, "split": "eval"}, deadline)
        within = all(probe.pool_peak_bytes <= probe.cap_bytes for probe in both.values())
        complete = len(both["eval"].batch_digests) == len(legacy) and len(both["train"].batch_digests) >= len(
            run.frozen.batches
        )
        return Value(
            what="training and evaluation at once, each complete and within its own cap", value=within and complete
        )

    findings.observe("full_pool_makes_producer_wait", "a full pool", full_pool)
    findings.observe("pools_are_isolated", "two pools at once", isolated)
    return probes


def _probe_refusals(run: StageRun, findings: Findings, sizes: PoolSizes) -> None:
    deadline = run.settings.trial_deadline_seconds

    def small_cap() -> Observation:
        arguments = {
            "workload": run.settings.workload,
            "device": run.device,
            "cap_bytes": sizes.slot_bytes // 2,
            "slot_bytes": sizes.slot_bytes,
        }
        refusal = run_or_raise(f"{PROBES}:probe_small_cap", arguments, deadline)
        run.notes.append(f"A cap below one batch is refused: {refusal}")
        return Value(what="a cap below one batch is refused with its figures", value=bool(refusal))

    def process_group() -> Observation:
        refusal = run_or_raise(f"{PROBES}:probe_process_group", {}, deadline)
        return Value(what="the stage refuses to run inside a process group", value=bool(refusal))

    findings.observe("small_cap_refused", "a cap below one batch", small_cap)
    findings.observe("refused_in_process_group", "a process group", process_group)


def _plant_faults(run: StageRun, trace: EqualityTrace | None, sizes: PoolSizes) -> list[PlantedFault]:
    """Swap two delivered batches, and let a peak pass the cap by one slot: the limits have to catch both."""
    faults = []
    if trace is not None and len(trace.batches) > 1:
        swapped = (trace.batches[1], trace.batches[0], *trace.batches[2:])
        seen = compare_batches("pooled batches with the first two swapped", run.frozen, swapped)
        faults.append(plant_fault("first two batches swapped", "batches_equal_frozen", seen, run.limits, run.device))
    over = Maximum(what="a pool grown by one slot", unit="fraction", values=(1.0 + sizes.slot_bytes / sizes.cap_bytes,))
    return [
        *faults,
        plant_fault("pool grown by one slot past the cap", "pool_peak_share_of_cap", over, run.limits, run.device),
    ]


def _figures(run: StageRun, probes: dict[str, PoolProbe], sizes: PoolSizes) -> dict[str, Series]:
    lines = {
        name: tuple((seconds, float(size)) for seconds, size in probe.pool_bytes_over_time)
        for name, probe in probes.items()
    }
    figures = {}
    if lines:
        figures["pool_bytes"] = Series(
            title="Does the pool stay under its cap when the consumer sleeps, and with two pools at once?", x_label="seconds",
            y_label="bytes of slots in use", lines=lines, bounds={"cap": float(sizes.cap_bytes)},
        )  # fmt: skip
    return figures
