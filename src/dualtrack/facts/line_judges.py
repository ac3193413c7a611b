"""How one observation is judged against one limit; a function for each kind of observation.

Every path ends in one of the five states, and only one path in each function ends in `passed`. Figures are rounded to nine digits, so that
a verdict recomputed with another scipy is the same text.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from dualtrack.facts.observations import (
    Equality,
    Failures,
    Limit,
    Maximum,
    Observation,
    Ratio,
    State,
    ToolError,
    Unmeasured,
    Value,
)
from dualtrack.facts.statistics import (
    MAX_PAIRS,
    MIN_PAIRS,
    RatioInterval,
    failure_bound,
    noise_deviation,
    noise_floor,
    pairs_needed,
    ratio_interval,
)

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Judgement(NamedTuple):
    """What became of one observation."""

    state: State
    statistic: str
    value: float | None = None
    interval: tuple[float, float] | None = None
    num: int = 0


def judge_observation(seen: Observation, limit: Limit) -> Judgement:
    """Judge one observation; a limit that doesn't suit its kind is a tool error, so that the record is still written."""
    judge: Callable[[Any, Limit], Judgement] = _JUDGES[type(seen)]
    return judge(seen, limit)


def _unmeasured(seen: Unmeasured, limit: Limit) -> Judgement:
    return Judgement(State.NOT_MEASURED, f"not measured: {seen.reason}")


def _tool_error(seen: ToolError, limit: Limit) -> Judgement:
    return Judgement(State.TOOL_ERROR, seen.error)


def _unsuited(seen: Observation, limit: Limit, wanted: str) -> Judgement:
    got = f"`{limit.relation} {limit.bound!r}`"
    return Judgement(
        State.TOOL_ERROR, f"the limit can't judge this {seen.kind}: expected {wanted}, got {got}; correct the limit"
    )


def _equality(seen: Equality, limit: Limit) -> Judgement:
    if limit.relation == "at least" or isinstance(limit.bound, bool) or limit.bound != 0:
        return _unsuited(seen, limit, "`equal 0` mismatches")
    compared, differ = seen.num_compared, seen.num_mismatched
    counted = seen.num_equal + seen.num_within_tolerance + differ
    text = f"{differ:,} of {compared:,} differ"
    if seen.num_within_tolerance:
        text += f", {seen.num_within_tolerance:,} within tolerance {seen.tolerance}"
    if seen.num_skipped:
        text += f", {seen.num_skipped:,} skipped"

    def ended(state: State, why: str = "") -> Judgement:
        return Judgement(state, text + why, value=float(differ), num=compared)

    if counted != compared:
        return ended(State.TOOL_ERROR, f"; the counts contradict each other: {counted:,} accounted for")
    if compared == 0:
        return ended(State.FAILED, "; nothing was compared")
    if differ:
        return ended(State.FAILED, f"; first at {seen.first_divergence.where}" if seen.first_divergence else "")
    if seen.num_skipped:
        return ended(State.FAILED, "; what is skipped is not equal")
    return _tolerance(seen, ended)


def _tolerance(seen: Equality, ended: Callable[..., Judgement]) -> Judgement:
    """Judge an equality without mismatches by the errors it allowed itself."""
    error, tolerance = seen.largest_error, seen.tolerance
    if (error is not None and math.isnan(error)) or (tolerance is not None and math.isnan(tolerance)):
        return ended(State.INCONCLUSIVE, "; the largest error is NaN")
    if seen.num_within_tolerance and (tolerance is None or error is None):
        return ended(
            State.FAILED, "; no tolerance was declared" if tolerance is None else "; the largest error was not recorded"
        )
    if error is not None and error > (tolerance or 0.0):
        return ended(State.TOOL_ERROR, f"; the largest error {error:.3g} is above the tolerance {tolerance}")
    return ended(State.PASSED)


def _ratio(seen: Ratio, limit: Limit) -> Judgement:
    bound = _number(limit.bound)
    if limit.relation == "equal" or bound is None or not 0 < bound < math.inf:
        return _unsuited(seen, limit, "`at most` or `at least` a positive ratio")
    num, planned = len(seen.pairs), seen.num_planned_pairs
    if num == 0:
        return Judgement(State.NOT_MEASURED, f"not measured: none of {planned} planned pairs was completed")
    medians = [median for pair in (*seen.pairs, *seen.floor_pairs) for median in (pair.legacy, pair.candidate)]
    if not all(math.isfinite(median) and median > 0 for median in medians):
        return Judgement(State.INCONCLUSIVE, f"a run median among {num} pairs is not a positive finite number", num=num)
    if num < 2:
        return Judgement(
            State.INCONCLUSIVE, f"1 of {planned} planned pairs gives no interval; at least {MIN_PAIRS} decide", num=num
        )
    found = ratio_interval(seen.pairs)
    state, why = _zone(seen, found, bound, limit.relation == "at most")
    floor = (
        f"noise floor {100 * noise_floor(seen.floor_pairs, planned):.2g} %"
        if seen.floor_pairs
        else "noise floor not measured"
    )
    text = f"ratio {found.ratio:.3g} ({found.low:.3g}-{found.high:.3g}), {num} of {planned} planned pairs, {floor}{why}"
    return Judgement(state, text, _rounded(found.ratio), (_rounded(found.low), _rounded(found.high)), num)


def _zone(seen: Ratio, found: RatioInterval, bound: float, lower_is_better: bool) -> tuple[State, str]:
    """Place the whole interval against the bound; what straddles it is not decided.

    Where the margin is below the noise floor, the bound lies among ratios that legacy shows against itself; then only an interval that lies
    wholly outside the noise, on either side, is decided.
    """
    planned, margin = seen.num_planned_pairs, abs(math.log(bound))
    if found.num_pairs != planned:
        return State.INCONCLUSIVE, "; the number of pairs was fixed before the run and another number decides nothing"
    if planned < MIN_PAIRS:
        return State.INCONCLUSIVE, f"; at least {MIN_PAIRS} decide, {_more_pairs(MIN_PAIRS, planned)}"
    floor = math.log1p(noise_floor(seen.floor_pairs, planned)) if seen.floor_pairs else 0.0
    if margin < floor and math.log(found.low) < floor and math.log(found.high) > -floor:
        more = _more_pairs(pairs_needed(noise_deviation(seen.floor_pairs), margin), planned)
        shown = f"{100 * math.expm1(margin):.2g} %"
        return (
            State.INCONCLUSIVE,
            f"; cannot be decided: the margin {shown} is below the noise floor, it would take {more}",
        )
    if found.low < bound < found.high:
        more = _more_pairs(pairs_needed(found.log_deviation, abs(math.log(found.ratio / bound))), planned)
        return State.INCONCLUSIVE, f"; the interval holds the limit, it would take about {more}"
    holds = found.high <= bound if lower_is_better else found.low >= bound
    return (State.PASSED if holds else State.FAILED), ""


def _more_pairs(needed: int | None, planned: int) -> str:
    if needed is None:
        return f"more than {MAX_PAIRS:,} pairs"
    more = max(1, needed - planned)
    return f"{more:,} {'pair' if more == 1 else 'pairs'} more"


def _maximum(seen: Maximum, limit: Limit) -> Judgement:
    bound = _number(limit.bound)
    if bound is None:
        return _unsuited(seen, limit, "a number")
    num = len(seen.values)
    if num == 0:
        return Judgement(State.NOT_MEASURED, "not measured: no trial gave a value")
    if any(math.isnan(value) for value in seen.values) or math.isnan(bound):
        return Judgement(State.INCONCLUSIVE, f"one of {num} values is NaN", num=num)
    largest, smallest = max(seen.values), min(seen.values)
    unit = "" if seen.unit == "fraction" else f" {seen.unit}"
    text = f"largest {largest:,.6g}{unit} of {num} {'value' if num == 1 else 'values'} (smallest {smallest:,.6g})"
    return Judgement(
        _compared(largest, limit, bound), text, _rounded(largest), (_rounded(smallest), _rounded(largest)), num
    )


def _failures(seen: Failures, limit: Limit) -> Judgement:
    bound = _number(limit.bound)
    if bound is None or limit.relation == "at least":
        return _unsuited(seen, limit, "`at most` a number of failed trials")
    num, failed = seen.num_trials, sum(seen.causes.values())
    if num == 0:
        return Judgement(State.NOT_MEASURED, "not measured: no process was started")
    if failed > num or any(count < 0 for count in seen.causes.values()):
        return Judgement(
            State.TOOL_ERROR, f"the counts contradict each other: {failed} failures in {num} processes", num=num
        )
    upper = failure_bound(failed, num)
    causes = ", ".join(f"{cause} {count}" for cause, count in sorted(seen.causes.items()) if count)
    text = f"{failed} of {num} processes, at most {100 * upper:.1f} %" + (f" ({causes})" if causes else "")
    return Judgement(_compared(failed, limit, bound), text, float(failed), (0.0, _rounded(upper)), num)


def _value(seen: Value, limit: Limit) -> Judgement:
    # JSON carries NaN and infinities as these three words; read back they are the same figure, not a name
    figure = _NOT_FINITE.get(seen.value, seen.value) if isinstance(seen.value, str) else seen.value
    text = f"{figure}" + (f" {seen.unit}" if seen.unit else "")
    bound = _number(limit.bound)
    if bound is None:
        if limit.relation != "equal" or type(seen.value) is not type(limit.bound):
            return _unsuited(seen, limit, f"`equal` and a {type(seen.value).__name__}")
        return Judgement(State.PASSED if seen.value == limit.bound else State.FAILED, text, num=1)
    value = _number(figure)
    if value is None:
        return _unsuited(seen, limit, f"`equal` and a {type(seen.value).__name__}")
    if math.isnan(value) or math.isnan(bound):
        return Judgement(State.INCONCLUSIVE, f"{text}: not a number", num=1)
    return Judgement(_compared(value, limit, bound), text, _rounded(value), num=1)


def _compared(value: float, limit: Limit, bound: float) -> State:
    holds = {"at most": value <= bound, "at least": value >= bound, "equal": value == bound}[limit.relation]
    return State.PASSED if holds else State.FAILED


def _number(value: object) -> float | None:
    """Return a number as a float; a flag is not a number, though Python has it so."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _rounded(value: float) -> float:
    return float(f"{value:.9g}")


_JUDGES: dict[type, Callable[[Any, Limit], Judgement]] = {
    Equality: _equality, Ratio: _ratio, Maximum: _maximum, Failures: _failures, Value: _value, Unmeasured: _unmeasured, ToolError: _tool_error,
}  # fmt: skip
