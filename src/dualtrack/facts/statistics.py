"""Intervals and bounds for what a gate decides; a fresh process is the unit, never a step.

Pooling steps as samples gave 82 % false alarms in simulation and a percentile bootstrap at n=3 covered 81 % instead of 95 %; so ratios get
a t interval on the logarithms of paired run medians, and failures an exact binomial bound. In 2,000 simulated sessions each (10 pairs, 2 %
spread between runs, autocorrelated steps, 5 % drift; `tests/facts/test_statistics_simulation.py`) the interval left out 1 in 5.7 % of the
sessions of legacy against legacy and in 98.9 % of those with a 5 % slowdown; at a limit of 1.02 the former never failed and none of the
latter passed. Quantiles come from `scipy.special`, which gives the figures of `scipy.stats` without its slow import.
"""

import math
import statistics
from collections.abc import Sequence

from scipy import special

from dualtrack.facts.observations import Fact, Pair

CONFIDENCE = 0.95
MIN_PAIRS = 6
"""A paired sign test reaches 5 % from six pairs on (smallest two-sided p 0.031); with fewer nothing is decided."""
MAX_PAIRS = 10_000
"""`pairs_needed` gives up above this; an effect that small is not worth the machine time."""


class RatioInterval(Fact):
    """Geometric mean of paired ratios candidate / legacy, with its interval."""

    ratio: float
    low: float
    high: float
    num_pairs: int
    log_deviation: float
    """Standard deviation of the logarithms of the single ratios; about the relative spread from pair to pair."""


def ratio_interval(pairs: Sequence[Pair], confidence: float = CONFIDENCE) -> RatioInterval:
    """Return the ratio candidate / legacy with a two-sided t interval on the logarithms.

    Raises:
        ValueError: There are fewer than two pairs, or a value is not a positive finite number.
    """
    return _interval_of_logs([_log_ratio(pair) for pair in pairs], confidence)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> RatioInterval:
    """Return the geometric mean of positive values, one a run, with a two-sided t interval on the logarithms.

    Raises:
        ValueError: There are fewer than two values, or one is not a positive finite number.
    """
    return _interval_of_logs([_log(value) for value in values], confidence)


def noise_deviation(floor_pairs: Sequence[Pair]) -> float:
    """Return the spread from pair to pair of legacy against legacy, as a root mean square of the logarithms.

    Their mean is zero by construction, so there are as many degrees of freedom as pairs, and an effect of the order within a pair counts as
    noise.

    Raises:
        ValueError: There is no floor pair, or a value is not a positive finite number.
    """
    if not floor_pairs:
        raise ValueError(
            "expected at least one legacy-against-legacy pair, got none; run a noise-floor block in the same session"
        )
    return math.sqrt(statistics.fmean(_log_ratio(pair) ** 2 for pair in floor_pairs))


def noise_floor(floor_pairs: Sequence[Pair], num_planned_pairs: int, confidence: float = CONFIDENCE) -> float:
    """Return the relative effect that `num_planned_pairs` pairs of legacy against legacy may show by chance, for example 0.021.

    Raises:
        ValueError: There is no floor pair, or a value is not a positive finite number.
    """
    return math.expm1(_half_width(noise_deviation(floor_pairs), max(2, num_planned_pairs), confidence))


def pairs_needed(log_deviation: float, log_half_width: float, confidence: float = CONFIDENCE) -> int | None:
    """Return the smallest number of pairs whose interval is that narrow, or None above `MAX_PAIRS`.

    Args:
        log_deviation: Spread of the logarithms from pair to pair, as `RatioInterval.log_deviation`.
        log_half_width: Wanted half width on the logarithm; 0.02 is about 2 %.
        confidence: Two-sided confidence of the interval.
    """
    low, high = 2, MAX_PAIRS
    if log_half_width <= 0 or _half_width(log_deviation, high, confidence) > log_half_width:
        return None
    while low < high:
        middle = (low + high) // 2
        if _half_width(log_deviation, middle, confidence) <= log_half_width:
            high = middle
        else:
            low = middle + 1
    return low


def failure_bound(num_failed: int, num_trials: int, confidence: float = CONFIDENCE) -> float:
    """Return the exact one-sided upper bound of a failure rate (Clopper and Pearson 1934): 0 of 24 gives 0.117.

    Raises:
        ValueError: There are no trials, or more failures than trials.
    """
    if num_trials < 1 or not 0 <= num_failed <= num_trials:
        raise ValueError(f"expected 0 <= failed <= trials and at least one trial, got {num_failed} of {num_trials}")
    if num_failed == num_trials:
        return 1.0
    return float(special.betaincinv(num_failed + 1, num_trials - num_failed, confidence))


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile by linear interpolation between the two nearest values (numpy's default).

    Args:
        values: At least one number, in any order.
        share: 0 to 100; 50 is the median, 100 the maximum.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("expected at least one value, got none")
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _interval_of_logs(logs: list[float], confidence: float) -> RatioInterval:
    if len(logs) < 2:
        raise ValueError(f"expected at least 2 runs for an interval, got {len(logs)}; run more pairs")
    centre, spread = statistics.fmean(logs), statistics.stdev(logs)
    half = _half_width(spread, len(logs), confidence)
    return RatioInterval(
        ratio=math.exp(centre),
        low=math.exp(centre - half),
        high=math.exp(centre + half),
        num_pairs=len(logs),
        log_deviation=spread,
    )


def _half_width(spread: float, num_runs: int, confidence: float) -> float:
    return float(special.stdtrit(num_runs - 1, 0.5 + confidence / 2)) * spread / math.sqrt(num_runs)


def _log_ratio(pair: Pair) -> float:
    return _log(pair.candidate) - _log(pair.legacy)


def _log(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"expected a positive finite run median, got {value}")
    return math.log(value)
