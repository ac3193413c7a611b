"""Which trials belong together: a candidate run and the reference run that was executed next to it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dualtrack.facts.records import Trial
from dualtrack.facts.statistics import percentile

REFERENCE_TRACKS = ("legacy", "single")
Statistic = Literal["p50", "p95", "max"]
PERCENTILES: dict[Statistic, float] = {"p50": 50.0, "p95": 95.0, "max": 100.0}


class TrialPair(NamedTuple):
    """Two runs next to each other; `legacy` is None where the candidate has no neighbour to be compared with."""

    legacy: Trial | None
    candidate: Trial


def paired_trials(trials: Sequence[Trial], candidate_track: str, world_size: int | None = None) -> list[TrialPair]:
    """Return each paired run of a track with its neighbour of the same pair, in order of pairs.

    Two candidates of one stage share pair numbers, so the neighbour in the order of execution is taken, not just the number.
    """
    block = sorted((trial for trial in trials if trial.block == "paired"), key=lambda trial: trial.position)
    candidates = [trial for trial in block if trial.track == candidate_track and world_size in (None, trial.world_size)]
    return [TrialPair(_neighbour(block, candidate), candidate) for candidate in candidates]


def floor_pairs(trials: Sequence[Trial]) -> list[TrialPair]:
    """Return the pairs of the noise floor: both sides are legacy, and which one stands for the candidate alternates as in ABBA."""
    by_pair: dict[int, list[Trial]] = {}
    for trial in sorted((trial for trial in trials if trial.block == "noise floor"), key=lambda trial: trial.position):
        by_pair.setdefault(trial.pair, []).append(trial)
    pairs = []
    for number, members in sorted(by_pair.items()):
        if len(members) == 2:
            first, second = members if number % 2 == 0 else reversed(members)
            pairs.append(TrialPair(first, second))
    return pairs


def step_statistic(trial: Trial, statistic: Statistic) -> float:
    """Return one statistic of a run's steps in the steady window, in seconds."""
    return percentile(trial.step_seconds, PERCENTILES[statistic])


def _neighbour(block: Sequence[Trial], candidate: Trial) -> Trial | None:
    near = [
        trial
        for trial in block
        if trial.track in REFERENCE_TRACKS
        and trial.pair == candidate.pair
        and abs(trial.position - candidate.position) == 1
    ]
    return near[0] if len(near) == 1 else None
