"""What many ranks cost: timed launches beside the single process, and the bucket sweep. Claims only where each rank has a GPU."""

import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from dualtrack.facts.derivations import ratio_from_trials
from dualtrack.facts.errors import LaunchError
from dualtrack.facts.observations import Observation, Pair, Unmeasured, Value
from dualtrack.facts.records import Outcome
from dualtrack.facts.statistics import ratio_interval
from dualtrack.measuring.trials import abba_order
from dualtrack.stages.expansion_runs import ExpansionRuns, cause_of
from dualtrack.training.rank_segment import JobSpec
from dualtrack.training.rank_speed import SPEED, SWEEP, SpeedSpec, SweepSpec, SweepVariant

ON_CPU = "routing verified on CPU, speed not measured"
DEFAULT, SILENT, COMPRESSED = "DDP's default", "without all-reduce", "bf16 gradients"


def time_rung(runs: ExpansionRuns, world_size: int) -> None:
    """Run the pairs of one rung, single process and ranks in turn, each a fresh launch; they become paired trials.

    With a GPU for each rank a rank trains the legacy batch, as the single process does (weak scaling: what many ranks cost each other). On a
    CPU they share the constant global batch, and the figures are records without a claim.
    """
    job = _timed_job(runs, world_size)
    if job is None:
        runs.run.notes.append(
            f"{world_size} ranks were not timed: the data hold no step of {world_size} legacy batches"
        )
        return
    for pair, first in enumerate(abba_order(runs.settings.num_pairs)):
        sizes = [1, world_size] if first == "legacy first" else [world_size, 1]
        for size in sizes:
            # one process trains the legacy batch: a rank's on GPUs, the whole on a CPU
            mine = job if size > 1 else job.model_copy(update={"global_batch": runs.plan.global_batch})
            _time_one(runs, mine, size, world_size, pair)


def _time_one(runs: ExpansionRuns, job: JobSpec, size: int, world_size: int, pair: int) -> None:
    settings = runs.settings
    spec = SpeedSpec(
        job=job, is_single=size == 1, num_warmup_steps=settings.num_warmup_steps, num_steps=settings.num_steps
    )
    device = runs.device(world_size)
    started_at, started = datetime.now(UTC), time.monotonic()
    measured: dict[str, Any] = {}
    try:
        launched = runs.launcher.launch(runs.launch_spec(SPEED, {"spec": spec.model_dump(mode="json")}, size, device))
        outcome = Outcome(state="completed", exit_code=0, seconds=time.monotonic() - started)
        measured = join_ranks(launched.results)
    except LaunchError as error:
        outcome = Outcome(
            state="failed", cause=cause_of(error), detail=str(error)[:4000], seconds=time.monotonic() - started
        )
    runs.keep_trial(
        size, started_at, outcome, block="paired", pair=pair, **{**measured, "data_fraction": job.data_fraction}
    )


def join_ranks(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one trial's fields for all ranks: the times and counts of rank 0, which waits for all, and the largest of each peak."""
    joined = dict(results[0])
    for name, peak in results[0]["peaks"].items():
        values = [result["peaks"][name]["value"] for result in results]
        if all(value is not None for value in values):
            joined["peaks"] = {**joined["peaks"], name: {**peak, "value": max(values)}}
    return joined


def latency_observation(runs: ExpansionRuns) -> Observation:
    """Return the paired step ratio, ranks over single process, of the largest rung with a GPU for each rank."""
    what = "step of many ranks over the step of one, equal samples a rank"
    on_gpus = [size for size in runs.settings.ladder if runs.backend(size) == "nccl"]
    if not on_gpus:
        return Unmeasured(what=what, reason=ON_CPU)
    return ratio_from_trials(runs.trials, "ddp", what, world_size=on_gpus[-1])


def sweep(runs: ExpansionRuns) -> dict[str, list[float]]:
    """Measure the bucket sizes in turn, on one launch; return seconds a step by variant, one value a round."""
    settings = runs.settings
    world_size = settings.sweep_world_size or max(
        (size for size in settings.ladder if runs.backend(size) == "nccl"), default=settings.ladder[0]
    )
    job = _timed_job(runs, world_size)
    variants = [SweepVariant(name=DEFAULT, bucket_cap_mb=None)]
    variants += [SweepVariant(name=f"{cap:g} MiB", bucket_cap_mb=cap) for cap in settings.sweep_caps_mb]
    if runs.backend(world_size) == "nccl":  # torch offers the hook for NCCL only
        variants.append(SweepVariant(name=COMPRESSED, bucket_cap_mb=settings.bucket_cap_mb, compress_bf16=True))
    variants.append(SweepVariant(name=SILENT, bucket_cap_mb=settings.bucket_cap_mb, sends=False))
    spec = SweepSpec(
        job=job or runs.job(equality=False),
        variants=tuple(variants),
        num_rounds=settings.num_sweep_rounds,
        num_steps=settings.num_sweep_steps,
    )
    results = runs.launch(SWEEP, {"spec": spec.model_dump(mode="json")}, world_size, runs.device(world_size)).results
    seconds: dict[str, list[float]] = results[0]["seconds"]
    error = results[0]["compression_error"]
    if error is not None:
        runs.run.notes.append(
            f"bf16 gradients are {error:.2g} (relative L2) from float32 ones; they are no part of any equality run."
        )
    return seconds


def sweep_observations(runs: ExpansionRuns, seconds: dict[str, list[float]]) -> dict[str, Observation]:
    """Return what the sweep says: the bucket size to take, and the share of the step that communication adds."""
    world_size = runs.settings.sweep_world_size or next(
        (size for size in reversed(runs.settings.ladder) if runs.backend(size) == "nccl"), 0
    )
    if not world_size or runs.backend(world_size) != "nccl":
        return {
            "bucket_proposal": Unmeasured(what="bucket size to take", reason=ON_CPU),
            "communication_share": Unmeasured(what="share of the step that communication adds", reason=ON_CPU),
        }
    with_sending, without = statistics.median(seconds[DEFAULT]), statistics.median(seconds[SILENT])
    return {
        "bucket_proposal": Value(what=f"bucket size to take with {world_size} ranks", value=propose_bucket(seconds)),
        "communication_share": Value(
            what=f"share of the step that communication adds with {world_size} ranks, DDP's default layout",
            value=1 - without / with_sending,
            unit="fraction",
        ),
    }


def propose_bucket(seconds: dict[str, list[float]]) -> str:
    """Return the bucket size with the shortest median step and its gain over DDP's default layout, or that none stands out of the noise.

    The gain is a paired ratio over rounds of one launch; each round measured all variants in turn. Choosing the best of several needs a
    stricter interval than one comparison does, hence 99 %.
    """
    caps = [name for name in seconds if name not in (DEFAULT, SILENT, COMPRESSED)]
    best = min(caps, key=lambda name: statistics.median(seconds[name]))
    pairs = [
        Pair(legacy=default, candidate=mine, order="legacy first")
        for default, mine in zip(seconds[DEFAULT], seconds[best], strict=True)
    ]
    found = ratio_interval(pairs, confidence=0.99)
    if found.high >= 1:
        return f"no difference beyond noise: the best, {best}, takes {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}) of the default's step"
    return (
        f"{best}: {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}) of the default's step, n={len(pairs)} rounds"
    )


def _timed_job(runs: ExpansionRuns, world_size: int) -> JobSpec | None:
    if runs.device(world_size) == "cpu":
        return runs.job(equality=False)
    global_batch = runs.plan.global_batch * world_size
    if runs.plan.num_samples < global_batch:
        return None
    return runs.job(equality=False, global_batch=global_batch, data_fraction=1.0)
