"""Stage 3: from one process to many ranks, rung by rung, on a tenth of the data; no rung starts before the one below is verified.

Ranks train through the stage 2 path, each with its own pool under the host's budget. Every rung is compared with the frozen legacy gradients
and with the single process; the ladder stops at the first rung that fails. Then the way back is executed, down to the single process.
"""

import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime

from tqdm.auto import tqdm

from dualtrack.facts.derivations import failures_from_trials
from dualtrack.facts.errors import LaunchError
from dualtrack.facts.expansion_settings import ExpansionSettings
from dualtrack.facts.line_judges import judge_observation
from dualtrack.facts.observations import Divergence, Equality, Limit, Maximum, Observation, State, ToolError, Value
from dualtrack.facts.records import PlantedFault, StageRecord
from dualtrack.facts.verdicts import plant_fault
from dualtrack.stages.baseline import ensure_baseline, trace_path
from dualtrack.stages.comparison import compare_traces
from dualtrack.stages.expansion_checks import check_rung, probe_gradients
from dualtrack.stages.expansion_counting import merge, relative, within
from dualtrack.stages.expansion_curves import FLOAT32_EPS
from dualtrack.stages.expansion_figures import rung_figures, scaling_figure, sweep_figure
from dualtrack.stages.expansion_limits import default_limits
from dualtrack.stages.expansion_returns import continued, return_down, verified
from dualtrack.stages.expansion_rung import Rung
from dualtrack.stages.expansion_runs import ExpansionRuns
from dualtrack.stages.expansion_speed import latency_observation, sweep, sweep_observations, time_rung
from dualtrack.stages.stage_run import Findings, StageRun, save_record
from dualtrack.training.launch_watch import RankFailed
from dualtrack.training.rank_faults import RankFault
from dualtrack.training.rank_training import GradientFault

STABLE_KEYS = (
    "rungs_verified", "ranks_agree_on_settings", "samples_as_planned", "samples_as_delivered", "initial_parameters_equal",
    "probe_gradients_bit_equal", "gradients_float64", "gradients_float32", "parameters_equal_across_ranks", "run_repeats", "loss_curve_float64",
    "loss_curve_float32_in_band", "schedule_equal", "bucket_layout_as_predicted", "resume_bit_equal", "resume_other_world_size",
    "killed_rank_named", "rollback_verified", "num_dropped_samples",
)  # fmt: skip
PLANTED: tuple[GradientFault, ...] = ("sum instead of mean", "duplicated shard")
FAILING = (State.FAILED, State.TOOL_ERROR, State.INCONCLUSIVE)


def run_expansion_stage(run: StageRun) -> StageRecord:
    """Climb the ladder, go back down, plant faults, time the rungs; save the record.

    Raises:
        StageRefused: The workload can't be equal on many ranks (BatchNorm, unused parameters, random draws, a loss that is no mean, data without
            indices), or the machine lacks the GPUs that were asked for; the message says what to do.
    """
    settings: ExpansionSettings = run.settings
    findings = Findings()
    with ExpansionRuns(run) as runs:
        _note_conditions(runs, findings)
        rungs, top = _climb(runs, findings)
        _go_back(runs, findings, rungs, top)
        findings.planted_faults = _plant_faults(runs)
        findings.observe("killed_rank_named", "a killed rank", lambda: _kill_a_rank(runs))
        _measure_speed(runs, findings, rungs)
        tolerances = {
            "float32 limit": settings.float32_tolerance_eps * FLOAT32_EPS,
            "float64 limit": settings.float64_tolerance,
        }
        findings.figures = {**rung_figures(rungs, tolerances, settings.band_widening), **findings.figures}
    findings.trials = runs.trials
    findings.observations["trial_failures"] = failures_from_trials(runs.trials, "launches, planted faults apart")
    comparable = (Equality, Value)
    findings.stable_keys = [key for key in STABLE_KEYS if isinstance(findings.observations.get(key), comparable)]
    return save_record(run, findings)


def _note_conditions(runs: ExpansionRuns, findings: Findings) -> None:
    settings, plan = runs.settings, runs.plan
    backends = {size: runs.backend(size) for size in settings.ladder}
    device = runs.device(settings.ladder[0])
    runs.run.notes.extend(runs.legacy(device).notes)
    words = ", ".join(f"{size} ranks on {backend}" for size, backend in backends.items())
    if "gloo" in backends.values():
        words += "; on gloo routing is verified on CPU, speed is not measured"
    runs.run.notes.append(
        f"{words}. {plan.num_wanted} of {plan.num_samples} samples ({plan.data_fraction:.0%}), floored to {plan.steps_per_epoch} steps of "
        f"{plan.global_batch}; {len(plan.dropped_ids)} ids dropped: {plan.dropped_ids.tolist()}"
    )
    findings.observations["num_dropped_samples"] = Value(
        what="samples of the fraction that fill no step: listed, neither padded nor repeated",
        value=len(plan.dropped_ids),
        unit="samples",
    )
    findings.observe("legacy_anchor", "legacy gradients against the frozen baseline", lambda: _anchor(runs, device))


def _anchor(runs: ExpansionRuns, device: str) -> Observation:
    """Compare the legacy recording with the frozen baseline: weights exactly, loss and norm within rounding, since threads may differ."""
    legacy, baseline = runs.legacy(device), ensure_baseline(runs.run)
    errors = [
        (
            "initial parameters",
            0.0 if legacy.initial_parameters_digest == baseline.initial_parameters_digest else math.inf,
        )
    ]
    expected = {"loss": baseline.losses[0], "gradient norm": baseline.gradient_norms[0]}
    errors += [(f"{name}, batch 0", relative(value, expected[name])) for name, value in legacy.anchor.items()]
    return within(
        "legacy recording against the frozen baseline", errors, runs.settings.float32_tolerance_eps * FLOAT32_EPS
    )


def _climb(runs: ExpansionRuns, findings: Findings) -> tuple[dict[int, Rung], int]:
    """Verify rung after rung; stop at the first that fails. Return the verified rungs and the last one that was started."""
    settings, rungs = runs.settings, dict[int, Rung]()
    seen: list[dict[str, Observation]] = []
    shares: list[float] = []
    below: int | None = None
    failure = ""
    top = settings.ladder[0]
    for top, num_steps in tqdm(
        list(zip(settings.ladder, settings.curve_steps, strict=True)), desc="rungs", unit="rung", ncols=80
    ):
        try:
            rung = runs.verify(top, num_steps, below)
        except LaunchError as error:
            failure = f"the launch failed: {error}"
            break
        seen.append(check_rung(rung, settings))
        findings.observations |= {f"{key}_at_{top}_ranks": item for key, item in seen[-1].items()}
        shares.append(_note_cost(runs, findings, rung))
        failed = failing_checks(seen[-1], runs.run.limits)
        if failed:
            failure = f"failed checks: {', '.join(failed)}"
            break
        rungs[top], below = rung, top
    if seen:
        findings.observations |= {key: merge([observations[key] for observations in seen]) for key in seen[0]}
        what = "pool peaks of all ranks of a host over the host's cap, by rung"
        findings.observations["pool_peak_share_of_host_cap"] = Maximum(what=what, unit="fraction", values=tuple(shares))
    findings.observations["rungs_verified"] = _rungs_verified(settings.ladder, rungs, top, failure)
    if failure:
        stay = f"stay at {max(rungs)} ranks" if rungs else "stay with the single process"
        runs.run.notes.append(
            f"The ladder stopped at {top} ranks ({failure[:600]}). What to do: {stay}, repair what is named, and run the stage again."
        )
    return rungs, top


def _note_cost(runs: ExpansionRuns, findings: Findings, rung: Rung) -> float:
    """Record what a rung cost beside its checks (V23), and return the share of the host's pool budget that its ranks took."""
    size = rung.world_size
    findings.observations[f"seconds_until_up_at_{size}_ranks"] = Value(
        what=f"until {size} ranks had joined", value=rung.seconds_until_up, unit="s"
    )
    num_processors = os.cpu_count() or 1
    if rung.slow_ranks and (
        rung.backend == "nccl" or size <= num_processors
    ):  # ranks that share a core slow each other
        words = ", ".join(
            f"rank {rank}: {multiple:.1f} times the median rank's own time"
            for rank, multiple in sorted(rung.slow_ranks.items())
        )
        runs.run.notes.append(f"Slow with {size} ranks: {words}")
    peaks = [result["curve32"]["loader_stats"]["pool_peak_bytes"] for result in rung.results]
    return float(sum(peaks)) / runs.settings.host_cap_bytes


def failing_checks(observations: dict[str, Observation], limits: Sequence[Limit]) -> list[str]:
    """Return the checks of one rung that keep the next one from starting; what was not measured stops the gate, not the ladder."""
    wanted = [limit for limit in limits if limit.observation in observations and not limit.advisory] or list(
        default_limits()
    )
    return [
        limit.observation
        for limit in wanted
        if limit.observation in observations
        and not limit.advisory
        and judge_observation(observations[limit.observation], limit).state in FAILING
    ]


def _rungs_verified(ladder: Sequence[int], rungs: dict[int, Rung], top: int, failure: str) -> Equality:
    first = (
        Divergence(where=f"rung of {top} ranks", legacy="every check passes", candidate=failure[:200])
        if failure
        else None
    )
    words = " -> ".join(str(size) for size in ladder)
    return Equality(
        what=f"rungs of the ladder {words} verified",
        num_compared=len(ladder),
        num_equal=len(rungs),
        num_mismatched=len(ladder) - len(rungs),
        first_divergence=first,
    )


def _go_back(runs: ExpansionRuns, findings: Findings, rungs: dict[int, Rung], top: int) -> None:
    what = "rollback from rung to rung"
    try:
        returns = return_down(runs, rungs, top)
    except LaunchError as error:
        findings.observations |= {
            key: ToolError(what=what, error=str(error)[:2000])
            for key in ("resume_bit_equal", "resume_other_world_size", "rollback_verified")
        }
        return
    up = [_continued_up(runs, rung) for rung in rungs.values() if "continued" in rung.results[0]]
    findings.observations["resume_bit_equal"] = merge([item.bit_equal for item in returns])
    findings.observations["resume_other_world_size"] = merge([*(item.other_world_size for item in returns), *up])
    findings.observations["rollback_verified"] = verified(returns)
    hops = "; ".join(
        f"{item.rollback.from_path} -> {item.rollback.to_path} in {item.rollback.seconds:.1f} s" for item in returns
    )
    findings.rollback = returns[0].rollback.model_copy(
        update={"detail": f"{returns[0].rollback.detail}. All steps down: {hops}"}
    )
    findings.observe(
        "single_process_equals_baseline", "the single process after the way back", lambda: _single_process(runs)
    )


def _continued_up(runs: ExpansionRuns, rung: Rung) -> Observation:
    what = "float64 losses continued from a commit of another number of ranks"
    return continued(
        what, [result["continued"] for result in rung.results], rung.single, runs.plan, runs.settings.curve64_tolerance
    )


def _single_process(runs: ExpansionRuns) -> Observation:
    """Train the frozen epoch on the stage 2 path, in one process: what is active again after the last step down."""
    return compare_traces(
        ensure_baseline(runs.run), trace_path(runs.run, "prefetched", cap_bytes=runs.settings.host_cap_bytes)
    )


def _plant_faults(runs: ExpansionRuns) -> list[PlantedFault]:
    """Let the averaging go wrong on the first rung, in ways that train without complaint: the integer probe has to see it."""
    world_size, faults = runs.settings.ladder[0], []
    expected = runs.expected_probe(runs.device(world_size))
    for planted in PLANTED:
        seen = probe_gradients(runs.probe(world_size, planted), expected)
        faults.append(
            plant_fault(
                f"{planted} with {world_size} ranks",
                "probe_gradients_bit_equal",
                seen,
                runs.run.limits,
                runs.run.device,
            )
        )
    return faults


def _kill_a_rank(runs: ExpansionRuns) -> Observation:
    """Kill one rank inside its all-reduce; it has to be named within the deadline, with no rank left alive."""
    world_size = runs.settings.ladder[0]
    what = "a rank killed in its all-reduce is named within the deadline, and no rank is left"
    started = datetime.now(UTC)
    try:
        runs.probe(world_size, faults=(RankFault(kind="kill", rank=world_size - 1, phase="reduce"),))
    except RankFailed as error:
        seconds = (datetime.now(UTC) - started).total_seconds()
        left = [process for process in error.processes if process.find() is not None]
        runs.run.notes.append(
            f"Rank {world_size - 1} was killed on purpose: after {seconds:.1f} s the launch said: {error.cause}"
        )
        is_in_time = seconds < 3 * runs.settings.timeout_seconds + 10
        return Value(what=what, value=error.rank == world_size - 1 and is_in_time and not left)
    return Value(what=what, value=False)


def _measure_speed(runs: ExpansionRuns, findings: Findings, rungs: dict[int, Rung]) -> None:
    for world_size in rungs:
        time_rung(runs, world_size)
    findings.observations["step_latency_ratio"] = latency_observation(runs)
    is_claim = any(runs.backend(size) == "nccl" for size in rungs)
    figures = {"samples_per_second": scaling_figure(runs.trials, is_claim)}
    try:
        seconds = sweep(runs)
    except LaunchError as error:
        findings.observations["bucket_proposal"] = ToolError(what="bucket size to take", error=str(error)[:2000])
    else:
        findings.observations |= sweep_observations(runs, seconds)
        figures["bucket_sweep"] = sweep_figure(seconds, is_claim)
    findings.figures = {name: figure for name, figure in figures.items() if figure is not None}
