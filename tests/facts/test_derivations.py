"""Derivations: what follows from raw trials, and that what is missing in them stays missing."""

from datetime import UTC, datetime
from typing import Any

import pytest

from dualtrack.facts.derivations import (
    combine_stable_digests,
    failures_from_trials,
    latency_percentiles,
    peak_from_trials,
    ratio_from_trials,
    table_rows,
)
from dualtrack.facts.observations import Limit, Maximum, Ratio, State, Unmeasured, Value
from dualtrack.facts.records import Measured, Outcome, StageRecord, Trial
from dualtrack.facts.verdicts import judge

START = datetime(2026, 1, 1, tzinfo=UTC)
DONE = Outcome(state="completed", exit_code=0, seconds=1.0)
KILLED = Outcome(state="failed", cause="killed by signal SIGKILL", exit_code=-9, seconds=1.0)


def trial(position: int, track: str, pair: int, step: float | None, block: str = "paired", **more: Any) -> Trial:
    steps = () if step is None else (step, step * 1.5, step, step * 0.5, step)
    content = {
        "name": f"t{position}",
        "block": block,
        "track": track,
        "pair": pair,
        "position": position,
        "started_at": START,
        "outcome": DONE if step is not None else KILLED,
        "step_seconds": steps,
        "num_steps": len(steps),
        **more,
    }
    return Trial.model_validate(content)


def abba(track: str, legacy: list[float | None], candidate: list[float | None], start: int = 0) -> list[Trial]:
    trials = []
    for pair, (before, after) in enumerate(zip(legacy, candidate, strict=True)):
        first, second = ("legacy", before), (track, after)
        if pair % 2:
            first, second = second, first
        trials.append(trial(start + 2 * pair, first[0], pair, first[1]))
        trials.append(trial(start + 2 * pair + 1, second[0], pair, second[1]))
    return trials


def record(stage: str, trials: list[Trial], device: str = "cpu") -> StageRecord:
    limit = Limit(observation="v", relation="equal", bound=1, reason="test", primary=True)
    seen = {"v": Value(what="v", value=1)}
    return StageRecord(
        stage=stage, workload="digits", device=device, started_at=START, ended_at=START, settings={}, settings_digest="",
        frozen_inputs_digest="f", hardware_identity="cpu-x", conditions={}, observations=dict(seen), limits=(limit,),
        trials=tuple(trials), verdict=judge(seen, (limit,), device),
    )  # fmt: skip


def test_a_pair_holds_the_run_medians_and_who_ran_first() -> None:
    seen = ratio_from_trials(abba("pooled", [2.0, 4.0], [1.0, 3.0]), "pooled", "latency")
    assert isinstance(seen, Ratio)
    assert [(pair.legacy, pair.candidate, pair.order) for pair in seen.pairs] == [
        (2.0, 1.0, "legacy first"),
        (4.0, 3.0, "candidate first"),
    ]
    assert seen.num_planned_pairs == 2


@pytest.mark.parametrize("side", ["legacy", "candidate"])
def test_a_pair_with_a_failed_run_is_missing_and_stays_planned(side: str) -> None:
    broken: list[float | None] = [2.0, None, 2.0, 2.0, 2.0, 2.0]
    whole: list[float | None] = [1.0] * 6
    trials = abba("pooled", broken, whole) if side == "legacy" else abba("pooled", whole, broken)
    seen = ratio_from_trials(trials, "pooled", "latency")
    assert isinstance(seen, Ratio)
    assert (len(seen.pairs), seen.num_planned_pairs) == (5, 6)
    rule = Limit(observation="r", relation="at most", bound=3.0, reason="test", primary=True)
    assert judge({"r": seen}, (rule,), "cuda").state is State.INCONCLUSIVE


def test_two_candidates_of_one_stage_keep_their_own_legacy_runs() -> None:
    trials = abba("pinned", [2.0, 2.0], [1.0, 1.0]) + abba("pooled", [8.0, 8.0], [1.0, 1.0], start=4)
    for track, legacy in (("pinned", 2.0), ("pooled", 8.0)):
        seen = ratio_from_trials(trials, track, "latency")
        assert isinstance(seen, Ratio)
        assert [pair.legacy for pair in seen.pairs] == [legacy, legacy]


def test_the_order_in_which_trials_are_listed_does_not_matter() -> None:
    trials = abba("pooled", [2.0, 4.0, 3.0], [1.0, 3.0, 2.0])
    assert ratio_from_trials(trials[::-1], "pooled", "x") == ratio_from_trials(trials, "pooled", "x")


def test_memory_runs_and_headroom_are_no_pairs() -> None:
    trials = [
        trial(0, "legacy", 0, 1.0, "extra"),
        trial(1, "pooled", 0, 1.0, "extra"),
        trial(2, "cached", 0, 1.0, "headroom"),
    ]
    seen = ratio_from_trials(trials, "pooled", "latency")
    assert seen == Unmeasured(what="latency", reason="no paired trial of the pooled track was run")


def test_the_noise_floor_is_legacy_against_legacy_and_may_come_from_another_stage() -> None:
    floor = [trial(n, "legacy", n // 2, 1.0 + n, "noise floor") for n in range(4)]
    seen = ratio_from_trials(abba("pooled", [2.0], [1.0]), "pooled", "latency", floor_trials=floor)
    assert isinstance(seen, Ratio)
    assert [(pair.legacy, pair.candidate) for pair in seen.floor_pairs] == [(1.0, 2.0), (4.0, 3.0)]
    own = [trial(10 + n, "legacy", 0, 7.0, "noise floor") for n in range(2)]
    seen = ratio_from_trials(abba("pooled", [2.0], [1.0]) + own, "pooled", "latency", floor_trials=floor)
    assert isinstance(seen, Ratio)
    assert [(pair.legacy, pair.candidate) for pair in seen.floor_pairs] == [(7.0, 7.0)], (
        "the stage's own block comes first"
    )


def test_a_minority_of_slow_steps_shows_in_the_95th_percentile_though_not_in_the_median() -> None:
    def run(position: int, track: str, slow: int) -> Trial:
        steps = (1.0,) * (20 - slow) + (10.0,) * slow
        return trial(position, track, position // 2, 1.0, step_seconds=steps)

    trials = [run(n, ("legacy", "pooled", "pooled", "legacy")[n % 4], 6 if n % 4 in (1, 2) else 0) for n in range(12)]
    rule = Limit(observation="r", relation="at most", bound=1.05, reason="test", primary=True)
    states = []
    for statistic in ("p50", "p95", "max"):
        seen = ratio_from_trials(trials, "pooled", "latency", statistic=statistic)  # type: ignore[arg-type]
        states.append(judge({"r": seen}, (rule,), "cuda").state)
    assert states == [State.PASSED, State.FAILED, State.FAILED]


def test_failures_are_counted_over_processes_by_cause() -> None:
    slow = Outcome(state="failed", cause="deadline passed", seconds=9.0)
    trials = [*abba("pooled", [1.0, None], [None, 1.0]), trial(4, "pooled", 2, 1.0, outcome=slow)]
    seen = failures_from_trials(trials, "runs")
    assert (seen.num_trials, seen.causes) == (5, {"deadline passed": 1, "killed by signal SIGKILL": 2})
    assert failures_from_trials(trials, "runs", ["legacy"]).num_trials == 2


def test_a_failure_without_a_cause_is_still_a_failure() -> None:
    nameless = Outcome(state="failed", seconds=1.0)
    assert failures_from_trials([trial(0, "legacy", 0, 1.0, outcome=nameless)], "runs").causes == {"cause unknown": 1}


def test_peaks_come_from_the_track_asked_for_and_a_missing_one_has_its_reason() -> None:
    def peak(value: float | None, reason: str | None = None) -> dict[str, Any]:
        return {"peaks": {"pool_peak_bytes": Measured(value=value, unit="bytes", reason=reason)}}

    trials = [
        trial(1, "pooled", 0, 1.0, **peak(5.0)),
        trial(0, "pooled", 0, 1.0, **peak(7.0)),
        trial(2, "legacy", 0, 1.0, **peak(None, "no pool")),
    ]
    assert peak_from_trials(trials, "pooled", "pool_peak_bytes", "pool", "bytes") == Maximum(
        what="pool", unit="bytes", values=(7.0, 5.0)
    )
    assert peak_from_trials(trials, "legacy", "pool_peak_bytes", "pool", "bytes") == Unmeasured(
        what="pool", reason="no pool"
    )
    nothing = peak_from_trials(trials, "ddp", "pool_peak_bytes", "pool", "bytes")
    assert isinstance(nothing, Unmeasured)


def test_latency_percentiles_take_timed_runs_only() -> None:
    trials = [*abba("pooled", [2.0, 2.0], [1.0, 3.0]), trial(9, "pooled", 0, 50.0, "extra")]
    seen = latency_percentiles(trials, "pooled")
    assert not isinstance(seen, Unmeasured)
    assert (seen.p50_seconds, seen.max_seconds, seen.num_trials, seen.num_steps) == (2.0, 4.5, 2, 10)
    assert isinstance(latency_percentiles([], "pooled"), Unmeasured)


def test_the_table_has_one_row_a_stage_and_one_a_world_size_in_stage_3() -> None:
    ranks = [
        trial(n, track, n // 2, 1.0, world_size=size)
        for n, (track, size) in enumerate([("single", 1), ("ddp", 4), ("ddp", 8), ("single", 1)])
    ]
    rows = table_rows(
        [record("3_ddp_expansion", ranks), record("0_freeze_baseline", []), record("4_migration_report", [])]
    )
    assert [(row.stage, row.world_size) for row in rows] == [
        ("0_freeze_baseline", 1),
        ("3_ddp_expansion", 4),
        ("3_ddp_expansion", 8),
    ]


def test_every_cell_of_the_table_has_a_figure_with_n_or_a_reason() -> None:
    trials = abba("pooled", [2.0, 2.1, 1.9], [1.0, 1.1, 0.9])
    row = table_rows([record("1_pinned_pool", trials)])[0]
    words = row.in_words()
    assert words["MFU"] == "not measured: no run counted its FLOPs"
    assert words["pinned peak"] == "not measured: no run measured its pinned memory"
    assert words["step latency"] == "997 ms (777 ms to 1.28 s), n=3, x0.499 (0.44 to 0.565) legacy"
    assert words["crash rate"] == "0 of 3, at most 63.2 %"


def test_a_stage_without_runs_has_no_figures_and_never_zero_crashes() -> None:
    row = table_rows([record("2_stream_prefetcher", [])])[0]
    cells = (row.mfu, row.pinned_peak, row.step_latency, row.crash_rate)
    assert [cell.value for cell in cells] == [None] * 4
    assert all(cell.reason for cell in cells)


def test_mfu_and_pinned_peak_are_set_against_the_legacy_runs_of_the_same_stage() -> None:
    def figures(mfu: float, size: float) -> dict[str, Any]:
        return {
            "mfu": Measured(value=mfu, unit="fraction"),
            "peaks": {"pinned_peak_bytes": Measured(value=size, unit="bytes")},
        }

    tracks = ["legacy", "pooled", "pooled", "legacy"]
    trials = [
        trial(n, t, n // 2, 1.0, **(figures(0.2, 64.0) if t == "legacy" else figures(0.3, 16.0 + n)))
        for n, t in enumerate(tracks)
    ]
    row = table_rows([record("1_pinned_pool", trials, "cuda")])[0]
    assert row.mfu.value == pytest.approx(0.3)
    assert row.mfu.change is not None
    assert row.mfu.change.ratio == pytest.approx(1.5)
    assert (row.pinned_peak.value, row.pinned_peak.low, row.pinned_peak.num) == (18.0, 17.0, 2)
    assert row.pinned_peak.change is not None
    assert row.pinned_peak.change.ratio == pytest.approx(18 / 64)


def test_the_combined_stable_digest_follows_each_stage() -> None:
    first = record("0_freeze_baseline", []).model_copy(update={"stable_digest": "a"})
    second = record("1_pinned_pool", []).model_copy(update={"stable_digest": "b"})
    assert combine_stable_digests([first, second]) == combine_stable_digests([second, first])
    assert combine_stable_digests([first]) != combine_stable_digests([first.model_copy(update={"stable_digest": "c"})])
