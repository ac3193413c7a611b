"""The overlap benchmark: rounds, pairs and verdicts, and one small run through fresh processes."""

import json

import pytest
from click.testing import CliRunner

from dualtrack.stages.overlap_benchmark import OverlapRun, main, plan_rounds, ratios_of


def runs(seconds: dict[str, list[float | None]]) -> list[OverlapRun]:
    return [
        OverlapRun(case="small", track=track, round=number, position=0, seconds_per_step=value)
        for track, values in seconds.items()
        for number, value in enumerate(values)
    ]


def verdicts(seconds: dict[str, list[float | None]]) -> dict[str, str]:
    return {f"{ratio.track}/{ratio.against}": ratio.verdict for ratio in ratios_of(runs(seconds))}


def test_rounds_are_reversed_every_second_time_and_side_tracks_stop_early():
    assert list(plan_rounds({"cached": 3, "prefetched": 3, "legacy": 1})) == [
        (0, ["cached", "prefetched", "legacy"]),
        (1, ["prefetched", "cached"]),
        (2, ["cached", "prefetched"]),
    ]


def test_a_step_at_the_ceiling_is_hidden_and_a_slower_one_is_not():
    cached = [0.1, 0.1001, 0.0999, 0.1]
    assert verdicts({"cached": cached, "prefetched": [0.1002, 0.1002, 0.1001, 0.1001]})["prefetched/cached"] == "hidden"
    slow = verdicts({"cached": cached, "prefetched": [0.11, 0.11, 0.11, 0.11]})["prefetched/cached"]
    assert slow.startswith("not hidden")
    wide = verdicts({"cached": cached, "prefetched": [0.09, 0.12, 0.1, 0.1]})["prefetched/cached"]
    assert wide.startswith("cannot be decided")


def test_where_legacy_is_at_the_ceiling_there_is_nothing_to_win():
    found = verdicts({"cached": [0.1, 0.1, 0.1], "legacy": [0.1001, 0.1002, 0.1001]})
    assert found["legacy/cached"].startswith("nothing to win here")
    assert verdicts({"cached": [0.1, 0.1], "legacy": [0.16, 0.16]})["legacy/cached"] == ""


def test_one_pair_and_failed_runs_decide_nothing():
    assert verdicts({"cached": [0.1, None], "prefetched": [0.1, 0.1]}) == {
        "prefetched/cached": "one pair decides nothing"
    }
    assert verdicts({"cached": [None], "prefetched": [0.1]}) == {}


def test_the_floor_pairs_neighbouring_cached_runs():
    (floor,) = ratios_of(runs({"cached": [0.1, 0.11, 0.1, 0.11]}))
    assert (floor.track, floor.against, floor.num_pairs) == ("cached", "cached", 2)
    assert floor.ratio == pytest.approx(1.1)


@pytest.mark.full
def test_a_small_run_on_the_cpu_writes_its_report(tmp_path):
    path = tmp_path / "overlap.json"
    options = [
        "--json",
        str(path),
        "--case",
        "small",
        "--device",
        "cpu",
        "--quick",
        "--track",
        "prefetched",
        "--track",
        "retired",
    ]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert [run["track"] for run in report["runs"]] == ["cached", "prefetched", "retired"]
    assert all(run["seconds_per_step"] > 0 and run["failure"] is None for run in report["runs"])
    assert report["is_complete"]
    assert "say nothing of a GPU" in result.output
