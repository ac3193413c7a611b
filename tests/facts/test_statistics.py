"""Statistics: exact where a closed form exists, equal to scipy's own routes, and symmetric where they must be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dualtrack.facts.observations import Pair
from dualtrack.facts.statistics import (
    MAX_PAIRS,
    failure_bound,
    mean_interval,
    noise_deviation,
    noise_floor,
    pairs_needed,
    percentile,
    ratio_interval,
)

SECONDS = st.floats(min_value=1e-6, max_value=1e3)
PAIRS = st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=20)


def pairs(values: list[tuple[float, float]]) -> list[Pair]:
    return [Pair(legacy=legacy, candidate=candidate, order="legacy first") for legacy, candidate in values]


@given(PAIRS)
def test_the_interval_is_scipys_t_interval_on_the_logarithms(values: list[tuple[float, float]]) -> None:
    logs = [math.log(candidate / legacy) for legacy, candidate in values]
    found = ratio_interval(pairs(values))
    assert found.ratio == pytest.approx(math.exp(sum(logs) / len(logs)))
    spread = stats.sem(logs)
    if spread > 1e-9:
        low, high = stats.t.interval(0.95, len(logs) - 1, loc=sum(logs) / len(logs), scale=spread)
        assert (math.log(found.low), math.log(found.high)) == (
            pytest.approx(low, abs=1e-9),
            pytest.approx(high, abs=1e-9),
        )


@given(PAIRS)
def test_swapping_the_sides_turns_the_ratio_over(values: list[tuple[float, float]]) -> None:
    forward = ratio_interval(pairs(values))
    backward = ratio_interval(pairs([(candidate, legacy) for legacy, candidate in values]))
    assert backward.ratio == pytest.approx(1 / forward.ratio)
    assert (backward.low, backward.high) == (pytest.approx(1 / forward.high), pytest.approx(1 / forward.low))


@given(PAIRS, st.floats(min_value=1e-3, max_value=1e3))
def test_the_unit_of_time_does_not_matter(values: list[tuple[float, float]], factor: float) -> None:
    scaled = [(legacy * factor, candidate * factor) for legacy, candidate in values]
    assert ratio_interval(pairs(scaled)).high == pytest.approx(ratio_interval(pairs(values)).high)


def test_a_constant_ratio_has_no_width() -> None:
    found = ratio_interval(pairs([(2.0, 1.0)] * 6))
    assert (found.low, found.ratio, found.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "values", [[], [(1.0, 1.0)], [(1.0, 1.0), (0.0, 1.0)], [(1.0, 1.0), (1.0, math.nan)], [(1.0, -1.0), (1.0, 1.0)]]
)
def test_an_interval_needs_two_pairs_of_positive_numbers(values: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ratio_interval(pairs(values))


def test_the_mean_of_runs_is_geometric() -> None:
    assert mean_interval([1.0, 4.0]).ratio == pytest.approx(2.0)
    with pytest.raises(ValueError, match="at least 2 runs"):
        mean_interval([1.0])


@pytest.mark.parametrize(
    ("failed", "trials", "expected"),
    [(0, 10, 0.259), (0, 24, 0.1173), (0, 30, 0.095), (0, 59, 0.0495), (0, 100, 0.0295), (0, 299, 0.00997), (0, 1000, 0.0030), (1, 100, 0.0466), (3, 3, 1.0)],
)  # fmt: skip
def test_the_bound_of_a_failure_rate_is_the_tabulated_one(failed: int, trials: int, expected: float) -> None:
    assert failure_bound(failed, trials) == pytest.approx(expected, rel=5e-3)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))))
def test_at_the_bound_so_few_failures_have_a_chance_of_exactly_five_per_cent(counts: tuple[int, int]) -> None:
    failed, trials = counts
    assert stats.binom.cdf(failed, trials, failure_bound(failed, trials)) == pytest.approx(0.05, rel=1e-6)


@pytest.mark.parametrize(("failed", "trials"), [(0, 0), (2, 1), (-1, 3)])
def test_a_bound_needs_trials_and_a_possible_count(failed: int, trials: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= failed <= trials"):
        failure_bound(failed, trials)


@given(st.floats(0.001, 0.3), st.floats(0.005, 0.3))
def test_pairs_needed_is_the_smallest_number_that_is_narrow_enough(spread: float, width: float) -> None:
    def half_width(number: int) -> float:
        return float(stats.t.ppf(0.975, number - 1)) * spread / math.sqrt(number)

    needed = pairs_needed(spread, width)
    if needed is None:
        assert half_width(MAX_PAIRS) > width
    else:
        assert half_width(needed) <= width * (1 + 1e-9)
        assert needed == 2 or half_width(needed - 1) > width * (1 - 1e-9)


def test_no_number_of_pairs_makes_an_interval_vanish() -> None:
    assert pairs_needed(0.02, 0.0) is None


def test_the_noise_floor_is_the_half_width_of_legacy_against_legacy_at_the_planned_number_of_pairs() -> None:
    floor = pairs([(1.0, math.exp(0.02)), (1.0, math.exp(-0.02)), (1.0, math.exp(0.02))])
    assert noise_deviation(floor) == pytest.approx(0.02)
    assert noise_floor(floor, 10) == pytest.approx(math.expm1(float(stats.t.ppf(0.975, 9)) * 0.02 / math.sqrt(10)))


def test_an_order_effect_counts_as_noise() -> None:
    shifted = pairs([(1.0, 1.05)] * 4)
    assert noise_deviation(shifted) == pytest.approx(math.log(1.05))


def test_without_a_noise_floor_block_there_is_no_noise_floor() -> None:
    with pytest.raises(ValueError, match="run a noise-floor block"):
        noise_floor([], 6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_lie_within_the_values_and_do_not_depend_on_their_order(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert min(values) <= found <= max(values)
    assert percentile(values[::-1], share) == found


def test_percentiles_are_numpys() -> None:
    import numpy as np

    values = [5.0, 1.0, 4.0, 2.0, 9.0, 7.0]
    for share in (0, 5, 50, 95, 99, 100):
        assert percentile(values, share) == pytest.approx(float(np.percentile(values, share)))
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)
