"""The page as data: each block follows from the records, and absence is never good news."""

import json
import re
from datetime import timedelta

from example_records import example_records
from example_trials import START, example_trials

from dualtrack.facts.records import STAGES, RunSummary
from dualtrack.reporting.page_model import build_page


def model_of(records, **more):
    states = {stage: records[stage].verdict.state.value if stage in records else "not run" for stage in STAGES}
    summary = RunSummary(
        run="r", workload="digits", started_at=START, ended_at=START + timedelta(seconds=250), stages=states, seconds={}, complete=len(records) == 5,
        exit_code=0, stable_digest="",
    )  # fmt: skip
    return build_page(records, more.pop("summary", summary), **more)


def test_zero_comparisons_are_not_shown_as_equal():
    records = example_records()
    only_values = {key: seen for key, seen in records["1_pinned_pool"].observations.items() if seen.kind != "equality"}
    bare = records["1_pinned_pool"].model_copy(update={"observations": only_values})
    row = model_of({**records, "1_pinned_pool": bare}).equivalence[1]
    assert row.reason == "nothing was compared"


def test_a_dirty_tree_and_stages_that_disagree_stand_out():
    records = example_records()
    dirty = json.loads(json.dumps(records["1_pinned_pool"].conditions))
    dirty["before"]["code"] |= {"state": "dirty", "num_changed": 2, "num_untracked": 1, "difference_digest": "f" * 64}
    changed = records["1_pinned_pool"].model_copy(update={"conditions": dirty, "frozen_inputs_digest": "0" * 64})
    items = {item.term: item for item in model_of({**records, "1_pinned_pool": changed}).trust}
    assert items["Code"].is_bad
    assert items["Code"].value == "changed during the run: commit 4f1c09d2a7b3; clean, dirty; see Conditions"
    alone = {item.term: item for item in model_of({"1_pinned_pool": changed}).trust}["Code"]
    assert alone.is_bad
    assert alone.value == "commit 4f1c09d2a7b3, dirty: 2 changed, 1 untracked, difference ffffffffffff"
    assert items["Frozen inputs"].is_bad
    assert items["Frozen inputs"].value.startswith("differs between stages")


def test_conditions_that_were_not_collected_say_so():
    records = {
        stage: record.model_copy(update={"conditions": {"before": {"code": "not collected"}}})
        for stage, record in example_records().items()
    }
    items = {item.term: item.value for item in model_of(records).trust}
    assert {items["Code"], items["Environment"], items["Hardware"]} == {"not collected"}


def test_a_rollback_that_was_not_verified_stands_out():
    record = example_records()["1_pinned_pool"]
    failed = record.rollback.model_copy(update={"num_steps_equal": 22})
    row = model_of({"1_pinned_pool": record.model_copy(update={"rollback": failed})}).rehearsals[0]
    assert row.rollback_holds is False
    assert "NOT verified: 22 of 23 steps equal" in row.rollback


def test_two_wild_runs_give_no_interval_worth_reading():
    trials = example_trials(
        "1_pinned_pool",
        "cpu",
        [
            ("paired", "legacy", 0, 1),
            ("paired", "pooled", 0, 1),
            ("paired", "pooled", 1, 1),
            ("paired", "legacy", 1, 1),
        ],
    )
    slow = trials[1].model_copy(update={"step_seconds": tuple(50 * step for step in trials[1].step_seconds)})
    record = example_records()["1_pinned_pool"].model_copy(update={"trials": (trials[0], slow, *trials[2:])})
    latency = model_of({"1_pinned_pool": record}).results[1].cells[2]
    assert latency.spread == "interval over 100-fold"
    assert "(interval over 100-fold)" in latency.change


def test_a_gate_that_failed_decides_before_an_earlier_one_that_was_not_run():
    records = example_records(failing="divergence")
    model = model_of({"2_stream_prefetcher": records["2_stream_prefetcher"]})
    assert model.verdict.headline == "Stage 2, Stream prefetcher: failed"
    assert (
        model_of({"0_freeze_baseline": records["0_freeze_baseline"]}).verdict.headline
        == "Stage 1, Pinned pool: not run"
    )


def test_every_rung_of_stage_3_has_its_row():
    assert [row.title for row in model_of(example_records("cuda")).results][3:] == [
        "DDP expansion, 4 ranks",
        "DDP expansion, 8 ranks",
        "DDP expansion, 32 ranks",
    ]


def test_a_candidate_that_is_too_slow_fails_with_its_ratio_interval_and_limit():
    verdict = model_of(example_records("cuda", failing="slow")).verdict
    assert verdict.headline == "Stage 1, Pinned pool: failed"
    assert verdict.commands == ("dualtrack run --resume r",)
    (line,) = verdict.lines
    assert re.match(r"ratio 1\.\d+ \(1\.\d+-1\.\d+\), 6 of 6 planned pairs, noise floor", line.statistic)
    assert line.limit == "at most 1.05, n = 6"


def test_comparisons_that_no_limit_judges_are_not_counted_twice():
    record = example_records()["3_ddp_expansion"]
    whole = record.observations["probe_equals_single_process"]
    by_rung = {
        f"probe_equals_single_process_at_{size}_ranks": whole.model_copy(update={"num_compared": 420, "num_equal": 420})
        for size in (4, 8, 32)
    }
    more = record.model_copy(update={"observations": {**record.observations, **by_rung}})
    before, after = (model_of({"3_ddp_expansion": found}).equivalence[3] for found in (record, more))
    assert (before.num_compared, before.num_equal) == (1296, 1280)
    assert after == before
