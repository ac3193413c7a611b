"""What follows from raw trials: the observations that gates judge, and the result table.

Stages call these functions when they write a record, and `verify` calls them again when it checks one; so a ratio, a failure count or a
peak in a record can't differ from the trials that stand beside it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from dualtrack.facts.digests import sha256_json
from dualtrack.facts.observations import Fact, Failures, Maximum, Pair, Ratio, Unmeasured
from dualtrack.facts.records import CORE_CHANGE, StageRecord, Trial
from dualtrack.facts.result_table import TableRow, row_of_stage
from dualtrack.facts.statistics import percentile
from dualtrack.facts.trial_pairs import PERCENTILES, Statistic, TrialPair, floor_pairs, paired_trials, step_statistic

TRACK_OF_STAGE = {
    "0_freeze_baseline": "legacy",
    "1_pinned_pool": "pooled",
    "2_stream_prefetcher": "prefetched",
    "3_ddp_expansion": "ddp",
}
"""The track that a stage is about; every other track in its record is there to be compared with."""


class LatencyPercentiles(Fact):
    """Step latency of one track, in seconds."""

    p50_seconds: float
    """Median over runs of each run's median step."""
    p95_seconds: float
    """Median over runs of each run's 95th percentile."""
    max_seconds: float
    """The longest step of all runs."""
    num_trials: int
    num_steps: int


def ratio_from_trials(
    trials: Sequence[Trial],
    candidate_track: str,
    what: str,
    *,
    statistic: Statistic = "p50",
    floor_trials: Sequence[Trial] = (),
    world_size: int | None = None,
) -> Ratio | Unmeasured:
    """Derive the paired ratio of step latencies, candidate over legacy.

    A pair with a failed run is left out and stays planned, so the gate sees that it is missing.

    Args:
        trials: All trials of a stage; those of the block `paired` are used, each candidate with the reference run next to it.
        candidate_track: For example `pooled`.
        what: What the ratio is of, in words.
        statistic: Which statistic of a run's steps is compared: its median, 95th percentile or maximum.
        floor_trials: Where the `noise floor` block of the session is, if not among `trials`.
        world_size: Only trials of so many ranks; None takes all.
    """
    planned = paired_trials(trials, candidate_track, world_size)
    if not planned:
        return Unmeasured(what=what, reason=f"no paired trial of the {candidate_track} track was run")
    pairs = [pair for pair in (_pair(item, statistic) for item in planned) if pair is not None]
    floor = [
        pair
        for pair in (_pair(item, statistic) for item in floor_pairs(trials) or floor_pairs(floor_trials))
        if pair is not None
    ]
    return Ratio(what=what, unit="s", pairs=tuple(pairs), floor_pairs=tuple(floor), num_planned_pairs=len(planned))


def failures_from_trials(trials: Sequence[Trial], what: str, tracks: Iterable[str] | None = None) -> Failures:
    """Count the trials that failed, by cause; a trial is one fresh process.

    Args:
        trials: All trials of a stage.
        what: What a trial is, in words.
        tracks: Count only these tracks; None counts all.
    """
    wanted = None if tracks is None else set(tracks)
    counted = [trial for trial in trials if wanted is None or trial.track in wanted]
    failed = Counter(trial.outcome.cause or "cause unknown" for trial in counted if trial.outcome.state == "failed")
    return Failures(what=what, num_trials=len(counted), causes=dict(sorted(failed.items())))


def peak_from_trials(trials: Sequence[Trial], track: str, key: str, what: str, unit: str) -> Maximum | Unmeasured:
    """Derive the peak of one track from what each of its completed trials measured, in order of execution.

    Args:
        trials: All trials of a stage.
        track: For example `pooled`.
        key: Name among a trial's `peaks`, for example `pool_peak_bytes`.
        what: What peaks, in words.
        unit: Unit of the values.
    """
    measured = [trial.peaks[key] for trial in in_order(trials) if trial.track == track and key in trial.peaks]
    values = tuple(peak.value for peak in measured if peak.value is not None)
    if values:
        return Maximum(what=what, unit=unit, values=values)
    reasons = [peak.reason for peak in measured if peak.reason is not None]
    return Unmeasured(
        what=what, reason=reasons[0] if reasons else f"no completed trial of the {track} track measured {key}"
    )


def latency_percentiles(trials: Sequence[Trial], track: str) -> LatencyPercentiles | Unmeasured:
    """Derive p50, p95 and maximum of the step latency of one track, from its timed runs (blocks `paired` and `noise floor`)."""
    runs = [
        trial
        for trial in trials
        if trial.track == track and trial.block in ("paired", "noise floor") and trial.step_seconds
    ]
    if not runs:
        return Unmeasured(
            what=f"step latency of the {track} track", reason=f"no timed trial of the {track} track was completed"
        )
    p50, p95, longest = ([step_statistic(run, name) for run in runs] for name in PERCENTILES)
    return LatencyPercentiles(
        p50_seconds=percentile(p50, 50), p95_seconds=percentile(p95, 50), max_seconds=max(longest), num_trials=len(runs),
        num_steps=sum(len(run.step_seconds) for run in runs),
    )  # fmt: skip


def table_rows(records: Iterable[StageRecord]) -> list[TableRow]:
    """Lay out the result table, one row a stage in order (stage 3: one a world size); stage 4 measures nothing and has none."""
    rows = []
    for record in sorted(records, key=lambda record: record.stage):
        if record.stage not in CORE_CHANGE:
            continue
        track = TRACK_OF_STAGE[record.stage]
        sizes = sorted({trial.world_size for trial in record.trials if trial.track == track}) or [1]
        rows += [row_of_stage(record, track, size) for size in sizes]
    return rows


def combine_stable_digests(records: Iterable[StageRecord]) -> str:
    """Return the digest of what must repeat from run to run, over the stages of a run."""
    return sha256_json({record.stage: record.stable_digest for record in records})


def in_order(trials: Iterable[Trial]) -> list[Trial]:
    """Return trials in order of execution."""
    return sorted(trials, key=lambda trial: trial.position)


def _pair(pair: TrialPair, statistic: Statistic) -> Pair | None:
    if pair.legacy is None or not (pair.legacy.step_seconds and pair.candidate.step_seconds):
        return None
    order: Literal["legacy first", "candidate first"] = (
        "legacy first" if pair.legacy.position < pair.candidate.position else "candidate first"
    )
    return Pair(
        legacy=step_statistic(pair.legacy, statistic), candidate=step_statistic(pair.candidate, statistic), order=order
    )
