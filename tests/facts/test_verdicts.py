"""Gates: every way in which evidence can be missing, broken or bad, and the outcome it must have."""

import json
import math
from typing import Any

import pytest

from dualtrack.facts.observations import (
    Divergence,
    Equality,
    Fact,
    Failures,
    GateVerdict,
    Limit,
    Maximum,
    Observation,
    Pair,
    Ratio,
    State,
    ToolError,
    Unmeasured,
    Value,
)
from dualtrack.facts.records import PlantedFault
from dualtrack.facts.verdicts import judge, judge_planted, judge_stage, plant_fault

LIMIT_OF_KIND: dict[str, dict[str, Any]] = {
    "equality": {"relation": "equal", "bound": 0},
    "ratio": {"relation": "at most", "bound": 1.05},
    "maximum": {"relation": "at most", "bound": 100},
    "failures": {"relation": "at most", "bound": 0},
}


class Seen(Fact):
    observations: dict[str, Observation]


def limit(key: str = "seen", relation: str = "equal", bound: bool | int | float | str = 0, **marks: Any) -> Limit:
    return Limit.model_validate(
        {"observation": key, "relation": relation, "bound": bound, "reason": "test", "primary": True, **marks}
    )


def state_of(seen: Observation | None, rule: Limit | None = None, device: str = "cpu") -> State:
    return verdict_of(seen, rule, device).state


def verdict_of(seen: Observation | None, rule: Limit | None = None, device: str = "cpu") -> GateVerdict:
    if rule is None:
        assert seen is not None
        rule = limit(**LIMIT_OF_KIND[seen.kind])
    return judge({} if seen is None else {"seen": seen}, (rule,), device)


def equality(num_compared: int = 4, num_equal: int = 4, **more: Any) -> Equality:
    return Equality(what="batches", num_compared=num_compared, num_equal=num_equal, **more)


def ratio(ratios: list[float], floor: list[float] | None = None, planned: int | None = None) -> Ratio:
    def pairs(values: list[float]) -> tuple[Pair, ...]:
        return tuple(Pair(legacy=2.0, candidate=2.0 * value, order="legacy first") for value in values)

    return Ratio(
        what="step latency",
        unit="s",
        pairs=pairs(ratios),
        floor_pairs=pairs(floor or []),
        num_planned_pairs=planned or len(ratios),
    )


FASTER = [0.90, 0.91, 0.89, 0.90, 0.92, 0.88]
SLOWER = [1.10, 1.11, 1.09, 1.10, 1.12, 1.08]
EVEN = [1.00, 1.01, 0.99, 1.00, 1.02, 0.98]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(equality(), State.PASSED, id="all equal"),
        pytest.param(equality(0, 0), State.FAILED, id="nothing compared: missing on both sides, or both empty"),
        pytest.param(equality(0, 0, num_skipped=4), State.FAILED, id="all skipped"),
        pytest.param(equality(4, 4, num_skipped=1), State.FAILED, id="one skipped"),
        pytest.param(equality(4, 3, num_mismatched=1), State.FAILED, id="one differs"),
        pytest.param(equality(4, 3), State.TOOL_ERROR, id="counts contradict each other"),
        pytest.param(
            equality(4, 3, num_within_tolerance=1, tolerance=1e-6, largest_error=1e-7),
            State.PASSED,
            id="within a declared tolerance",
        ),
        pytest.param(
            equality(4, 3, num_within_tolerance=1, largest_error=1e-7), State.FAILED, id="no tolerance declared"
        ),
        pytest.param(
            equality(4, 3, num_within_tolerance=1, tolerance=1e-6), State.FAILED, id="no largest error recorded"
        ),
        pytest.param(
            equality(4, 3, num_within_tolerance=1, tolerance=1e-6, largest_error=math.nan),
            State.INCONCLUSIVE,
            id="largest error NaN",
        ),
        pytest.param(
            equality(4, 3, num_within_tolerance=1, tolerance=1e-6, largest_error=1e-3),
            State.TOOL_ERROR,
            id="largest error above the tolerance",
        ),
        pytest.param(equality(largest_error=0.1), State.TOOL_ERROR, id="an error among equal bits"),
        pytest.param(Maximum(what="peak", unit="B", values=(90.0, 100.0)), State.PASSED, id="peak at the limit"),
        pytest.param(Maximum(what="peak", unit="B", values=(1.0, 100.5)), State.FAILED, id="largest decides"),
        pytest.param(Maximum(what="peak", unit="B", values=()), State.NOT_MEASURED, id="no rows"),
        pytest.param(Maximum(what="peak", unit="B", values=(1.0, math.nan)), State.INCONCLUSIVE, id="NaN peak"),
        pytest.param(Failures(what="trials", num_trials=24), State.PASSED, id="zero errors"),
        pytest.param(Failures(what="trials", num_trials=24, causes={"exception": 1}), State.FAILED, id="one crash"),
        pytest.param(Failures(what="trials", num_trials=0), State.NOT_MEASURED, id="no trials"),
        pytest.param(
            Failures(what="trials", num_trials=1, causes={"exception": 2}), State.TOOL_ERROR, id="2 of 1 failed"
        ),
        pytest.param(ratio(FASTER), State.PASSED, id="interval below the limit"),
        pytest.param(ratio(SLOWER), State.FAILED, id="interval above the limit"),
        pytest.param(ratio([0.9, 1.2, 1.0, 1.1, 0.95, 1.15]), State.INCONCLUSIVE, id="interval holds the limit"),
        pytest.param(ratio([], planned=6), State.NOT_MEASURED, id="no pair completed"),
        pytest.param(ratio([0.9], planned=6), State.INCONCLUSIVE, id="one pair"),
        pytest.param(ratio(FASTER[:5], planned=6), State.INCONCLUSIVE, id="a pair was lost"),
        pytest.param(ratio(FASTER, planned=5), State.INCONCLUSIVE, id="a pair more than planned"),
        pytest.param(ratio(FASTER[:5]), State.INCONCLUSIVE, id="fewer than six pairs"),
        pytest.param(ratio([*FASTER[:5], math.nan]), State.INCONCLUSIVE, id="NaN median"),
        pytest.param(ratio([*FASTER[:5], 0.0]), State.INCONCLUSIVE, id="zero median"),
        pytest.param(ratio([0.9] * 6), State.PASSED, id="no spread at all"),
        pytest.param(ratio([10.0] * 7 + [1.0] * 3), State.FAILED, id="7 of 10 runs ten times slower"),
        pytest.param(Unmeasured(what="peak", reason="no CUDA device"), State.NOT_MEASURED, id="unmeasured"),
        pytest.param(ToolError(what="peak", error="ValueError: x"), State.TOOL_ERROR, id="every measurement raised"),
    ],
)
def test_an_observation_has_the_outcome_it_must_have(seen: Observation, expected: State) -> None:
    rule = limit(**LIMIT_OF_KIND.get(seen.kind, {"bound": 0}))
    assert state_of(seen, rule) is expected


@pytest.mark.parametrize(
    ("value", "relation", "bound", "expected"),
    [
        (True, "equal", True, State.PASSED),
        (False, "equal", True, State.FAILED),
        (1, "equal", True, State.TOOL_ERROR),
        (True, "equal", 1, State.TOOL_ERROR),
        (1, "equal", 1.0, State.PASSED),
        (100, "at least", 100, State.PASSED),
        (99, "at least", 100, State.FAILED),
        (0.9, "equal", 1.0, State.FAILED),
        (math.nan, "at most", 1.0, State.INCONCLUSIVE),
        ("NaN", "at most", 1.0, State.INCONCLUSIVE),
        (math.inf, "at most", 1.0, State.FAILED),
        ("Infinity", "at most", 1.0, State.FAILED),
        ("prefetched", "equal", "prefetched", State.PASSED),
        ("pooled", "equal", "prefetched", State.FAILED),
        ("prefetched", "at most", 1.0, State.TOOL_ERROR),
        ("prefetched", "at most", "z", State.TOOL_ERROR),
    ],
)
def test_a_value_is_judged_by_kind_and_size(
    value: bool | float | str, relation: str, bound: bool | float | str, expected: State
) -> None:
    assert state_of(Value(what="v", value=value), limit("seen", relation, bound)) is expected


@pytest.mark.parametrize("kind", ["equality", "ratio", "failures"])
def test_a_limit_that_does_not_suit_its_observation_is_a_tool_error(kind: str) -> None:
    seen: Observation = {
        "equality": equality(),
        "ratio": ratio(FASTER),
        "failures": Failures(what="trials", num_trials=3),
    }[kind]
    assert state_of(seen, limit("seen", "at least", 1.0 if kind != "ratio" else -1.0)) is State.TOOL_ERROR


def test_a_missing_observation_does_not_pass() -> None:
    assert state_of(None, limit()) is State.NOT_MEASURED


def test_a_verdict_survives_its_own_json_and_is_judged_the_same_again() -> None:
    seen: dict[str, Observation] = {
        "a": Value(what="v", value=math.nan),
        "b": ratio(FASTER),
        "c": equality(largest_error=math.nan),
    }
    rules = (limit("a", "at most", 1), limit("b", "at most", 1.05, primary=False), limit("c", primary=False))
    read_back = Seen.model_validate_json(Seen(observations=seen).model_dump_json()).observations
    verdict = judge(seen, rules, "cpu")
    assert judge(read_back, rules, "cpu").model_dump_json() == verdict.model_dump_json()
    assert GateVerdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_zero_failures_is_stated_with_its_bound() -> None:
    line = verdict_of(Failures(what="trials", num_trials=24)).lines[0]
    assert line.statistic == "0 of 24 processes, at most 11.7 %"
    assert line.num == 24


def test_crashes_are_told_apart_by_cause() -> None:
    line = verdict_of(Failures(what="t", num_trials=9, causes={"out of memory": 1, "exception": 2})).lines[0]
    assert line.statistic == "3 of 9 processes, at most 65.5 % (exception 2, out of memory 1)"


def test_a_margin_below_the_noise_floor_cannot_be_decided() -> None:
    noisy = [1.1, 0.9, 1.08, 0.92, 1.1, 0.9]
    verdict = verdict_of(ratio(EVEN, floor=noisy), limit("seen", "at most", 1.02))
    assert verdict.state is State.INCONCLUSIVE
    assert "cannot be decided: the margin 2 % is below the noise floor, it would take" in verdict.lines[0].statistic
    assert "pairs more" in verdict.next_action


def test_an_effect_far_beyond_the_noise_floor_is_decided_though_the_margin_is_below_it() -> None:
    noisy = [1.1, 0.9, 1.08, 0.92, 1.1, 0.9]
    assert (
        state_of(ratio([0.3, 0.31, 0.29, 0.3, 0.32, 0.28], floor=noisy), limit("seen", "at most", 1.02)) is State.PASSED
    )
    assert state_of(ratio([3.0, 3.1, 2.9, 3.0, 3.2, 2.8], floor=noisy), limit("seen", "at most", 1.02)) is State.FAILED


def test_an_inconclusive_ratio_says_how_many_pairs_more() -> None:
    verdict = verdict_of(ratio([1.04, 0.99, 1.08, 1.01, 1.07, 0.96]), limit("seen", "at most", 1.05))
    assert verdict.state is State.INCONCLUSIVE
    assert "it would take about 10 pairs more" in verdict.next_action


def test_throughput_is_judged_from_below() -> None:
    rule = limit("seen", "at least", 1.0)
    assert state_of(ratio(SLOWER), rule) is State.PASSED
    assert state_of(ratio(FASTER), rule) is State.FAILED


def test_a_limit_that_needs_cuda_does_not_block_without_it_and_narrows_the_scope() -> None:
    rules = (limit("a"), limit("b", "at most", 1.05, primary=False, needs="cuda"))
    seen: dict[str, Observation] = {"a": equality(), "b": Unmeasured(what="latency", reason="no CUDA device")}
    on_cpu, on_cuda = judge(seen, rules, "cpu"), judge(seen, rules, "cuda:0")
    assert (on_cpu.state, on_cpu.scope) == (State.PASSED, "numerics and reliability; no CUDA device")
    assert on_cpu.lines[1].state is State.NOT_MEASURED
    assert "CUDA device for b" in on_cpu.next_action
    assert (on_cuda.state, on_cuda.scope, on_cuda.deciding) == (State.NOT_MEASURED, "complete", "b")


def test_a_cpu_figure_is_no_evidence_for_a_limit_that_needs_cuda() -> None:
    rules = (limit("a"), limit("b", "at most", 1.05, primary=False, needs="cuda"))
    line = judge({"a": equality(), "b": ratio(FASTER)}, rules, "cpu").lines[1]
    assert (line.state, line.value) == (State.NOT_MEASURED, None)
    assert line.statistic.startswith("not measured: no CUDA device; on cpu, which is no evidence for it: ratio 0.9")


def test_a_broken_measurement_blocks_on_any_device() -> None:
    rules = (limit("a"), limit("b", "at most", 1.05, primary=False, needs="cuda"))
    assert judge({"a": equality(), "b": ToolError(what="x", error="y")}, rules, "cpu").state is State.TOOL_ERROR


def test_a_gate_of_which_nothing_could_be_judged_is_not_measured() -> None:
    assert judge({}, (limit("b", "at most", 1.05, needs="cuda"),), "cpu").state is State.NOT_MEASURED


@pytest.mark.parametrize(
    "rules",
    [
        (),
        (limit(primary=False),),
        (limit(), limit("other")),
        (limit(advisory=True),),
    ],
)
def test_a_gate_has_exactly_one_primary_limit(rules: tuple[Limit, ...]) -> None:
    with pytest.raises(ValueError, match="primary limit"):
        judge({"seen": equality()}, rules, "cpu")


def test_an_advisory_line_is_shown_and_never_decides() -> None:
    rules = (limit(), limit("slow", "at most", 1.05, primary=False, advisory=True))
    verdict = judge({"seen": equality(), "slow": ratio(SLOWER)}, rules, "cuda")
    assert verdict.state is State.PASSED
    assert [line.state for line in verdict.lines] == [State.PASSED, State.FAILED]


def test_an_advisory_pass_does_not_stand_in_for_what_could_not_be_judged() -> None:
    rules = (limit(needs="cuda"), limit("b", primary=False, advisory=True))
    assert judge({"b": equality()}, rules, "cpu").state is State.NOT_MEASURED


def test_the_gate_names_the_line_that_decides_and_what_to_do() -> None:
    bad = equality(
        4, 3, num_mismatched=1, first_divergence=Divergence(where="step 7", legacy="1", candidate="2", bundle="b/1")
    )
    rules = (limit("a"), limit("b", primary=False), limit("c", "at most", 0, primary=False))
    verdict = judge({"a": equality(), "b": bad, "c": Failures(what="t", num_trials=3)}, rules, "cpu")
    assert (verdict.state, verdict.deciding) == (State.FAILED, "b")
    assert verdict.lines[1].statistic == "1 of 4 differ; first at step 7"
    assert "dualtrack replay b/1" in verdict.next_action


SLIPS = PlantedFault(what="one byte changed", observation="seen", seen=equality(), caught=True)
CAUGHT = PlantedFault(what="one byte changed", observation="seen", seen=equality(4, 3, num_mismatched=1), caught=True)


def test_a_planted_fault_that_is_caught_leaves_the_gate_as_it_was() -> None:
    verdict = judge_stage({"seen": equality()}, (limit(),), (CAUGHT,), "cpu")
    assert verdict.state is State.PASSED
    assert verdict.lines[1].what == "planted fault caught: one byte changed"
    assert verdict.lines[1].statistic == "caught: judged failed, 1 of 4 differ"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(SLIPS, id="passes its limit"),
        pytest.param(SLIPS.model_copy(update={"observation": "unlimited"}), id="no limit could catch it"),
        pytest.param(CAUGHT.model_copy(update={"caught": False}), id="recorded as not caught"),
        pytest.param(CAUGHT.model_copy(update={"seen": Unmeasured(what="x", reason="y")}), id="was not measured"),
        pytest.param(CAUGHT.model_copy(update={"seen": ToolError(what="x", error="y")}), id="broke the tool instead"),
    ],
)
def test_a_gate_whose_planted_fault_slips_through_is_a_tool_error(fault: PlantedFault) -> None:
    verdict = judge_stage({"seen": equality()}, (limit(),), (CAUGHT, fault), "cpu")
    assert verdict.state is State.TOOL_ERROR
    assert verdict.deciding is not None
    assert verdict.deciding.startswith("planted fault: ")


def test_a_gate_without_a_planted_fault_does_not_pass() -> None:
    assert judge_stage({"seen": equality()}, (limit(),), (), "cpu").state is State.NOT_MEASURED


def test_a_fault_planted_on_a_limit_that_needs_cuda_is_judged_on_any_device() -> None:
    rules = (limit(), limit("slow", "at most", 1.05, primary=False, needs="cuda"))
    assert judge_planted(plant_fault("10 % slower", "slow", ratio(SLOWER), rules, "cpu"), rules, "cpu")
    assert not plant_fault("nothing", "slow", ratio(FASTER), rules, "cpu").caught


def test_a_planted_fault_does_not_hide_the_state_of_the_line_it_tests() -> None:
    verdict = judge_stage({"seen": equality()}, (limit(),), (CAUGHT,), "cpu")
    keys = [line.observation for line in verdict.lines]
    assert len(keys) == len(set(keys))


def test_every_line_shows_statistic_limit_number_and_reason() -> None:
    verdict = judge({"seen": ratio(FASTER, floor=EVEN)}, (limit("seen", "at most", 1.05),), "cuda")
    line = json.loads(verdict.model_dump_json())["lines"][0]
    assert line["statistic"] == "ratio 0.9 (0.885-0.915), 6 of 6 planned pairs, noise floor 1.4 %"
    assert (line["limit"], line["num"], line["reason"]) == ("at most 1.05", 6, "test")
