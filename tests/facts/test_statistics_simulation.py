"""How often the gate errs, by simulation: sessions with autocorrelated steps, spread between runs, a drift of the machine and rare stalls.

Run it as a script for the table of the docs: `python tests/facts/test_statistics_simulation.py`.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import signal

from dualtrack.facts.observations import Limit, Pair, Ratio, State
from dualtrack.facts.statistics import ratio_interval
from dualtrack.facts.verdicts import judge
from dualtrack.measuring.trials import abba_order


@dataclass(frozen=True)
class Session:
    """One simulated session of paired runs."""

    num_pairs: int = 10
    slowdown: float = 1.0
    run_spread: float = 0.02
    """Standard deviation between fresh processes."""
    drift: float = 0.05
    """How much slower the machine is at the end of the session, linearly."""
    num_steps: int = 100
    step_spread: float = 0.02
    step_correlation: float = 0.9
    """Autocorrelation of neighbouring steps within a run."""

    def simulate(self, chance: np.random.Generator, *, against_itself: bool = False) -> tuple[Pair, ...]:
        """Return the pairs of run medians in ABBA order."""
        num_runs, pairs = 2 * self.num_pairs, []
        medians = [self._median(chance, 1 + self.drift * place / num_runs) for place in range(num_runs)]
        for number, order in enumerate(abba_order(self.num_pairs)):
            first, second = medians[2 * number], medians[2 * number + 1]
            legacy, candidate = (first, second) if order == "legacy first" else (second, first)
            pairs.append(
                Pair(legacy=legacy, candidate=candidate * (1.0 if against_itself else self.slowdown), order=order)
            )
        return tuple(pairs)

    def _median(self, chance: np.random.Generator, level: float) -> float:
        noise = signal.lfilter(
            [np.sqrt(1 - self.step_correlation**2)],
            [1, -self.step_correlation],
            chance.normal(0, self.step_spread, self.num_steps),
        )
        stalls = 1 + 3 * (chance.random(self.num_steps) < 0.01)
        return float(np.median(0.01 * level * (1 + chance.normal(0, self.run_spread)) * (1 + noise) * stalls))


def verdicts(session: Session, bound: float, num_sessions: int, seed: int) -> Counter[str]:
    """Judge simulated sessions; an interval that leaves out 1 is counted as `effect` on top."""
    chance, counts = np.random.default_rng(seed), Counter[str]()
    limit = Limit(observation="r", relation="at most", bound=bound, reason="simulation", primary=True)
    for _ in range(num_sessions):
        pairs, floor = session.simulate(chance), session.simulate(chance, against_itself=True)
        seen = Ratio(what="latency", unit="s", pairs=pairs, floor_pairs=floor[:3], num_planned_pairs=session.num_pairs)
        counts[judge({"r": seen}, (limit,), "cuda").state] += 1
        interval = ratio_interval(pairs)
        counts["slower"] += interval.low > 1
        counts["faster"] += interval.high < 1
    return counts


@pytest.mark.full
@pytest.mark.parametrize("num_pairs", [6, 10])
@pytest.mark.parametrize("drift", [0.0, 0.05, 0.2])
def test_of_200_sessions_of_legacy_against_legacy_at_most_5_per_cent_show_an_effect(
    num_pairs: int, drift: float
) -> None:
    counts = verdicts(Session(num_pairs=num_pairs, drift=drift), 1.02, 200, seed=11)
    assert counts["slower"] + counts["faster"] <= 10
    assert counts[State.FAILED] <= 10


@pytest.mark.full
def test_of_200_sessions_at_most_5_per_cent_fail_or_pass_at_a_limit_without_a_margin() -> None:
    counts = verdicts(Session(), 1.0, 200, seed=12)
    assert counts[State.FAILED] + counts[State.PASSED] <= 10


@pytest.mark.full
def test_a_slowdown_of_5_per_cent_is_seen_in_9_of_10_sessions_of_10_pairs() -> None:
    counts = verdicts(Session(slowdown=1.05), 1.02, 200, seed=13)
    assert counts["slower"] >= 180
    assert counts[State.PASSED] == 0, "a slowdown beyond the margin was let through"


@pytest.mark.full
def test_a_slowdown_of_10_per_cent_fails_the_gate_in_9_of_10_sessions() -> None:
    assert verdicts(Session(slowdown=1.10), 1.02, 200, seed=14)[State.FAILED] >= 180


@pytest.mark.full
def test_a_speed_up_of_30_per_cent_passes_in_9_of_10_sessions_of_six_pairs() -> None:
    assert verdicts(Session(num_pairs=6, slowdown=0.7), 1.02, 200, seed=15)[State.PASSED] >= 180


def test_the_simulation_can_show_an_effect_and_can_show_none() -> None:
    """A small part of the above for every run of the tests."""
    assert verdicts(Session(slowdown=1.2), 1.02, 10, seed=1)[State.FAILED] == 10
    assert verdicts(Session(), 1.02, 10, seed=2)[State.FAILED] == 0


def main() -> None:
    """Print the table of the docs."""
    for label, session, bound in (
        ("A/A, 6 pairs", Session(num_pairs=6), 1.02), ("A/A, 10 pairs", Session(), 1.02), ("A/A, 10 pairs, no margin", Session(), 1.0),
        ("A/A, 10 pairs, 20 % drift", Session(drift=0.2), 1.02), ("5 % slower, 10 pairs", Session(slowdown=1.05), 1.02),
        ("5 % slower, 10 pairs, no margin", Session(slowdown=1.05), 1.0), ("10 % slower, 10 pairs", Session(slowdown=1.1), 1.02),
        ("30 % faster, 6 pairs", Session(num_pairs=6, slowdown=0.7), 1.02),
    ):  # fmt: skip
        counts = verdicts(session, bound, 2000, seed=99)
        shares = ", ".join(
            f"{name} {100 * counts[name] / 2000:.1f} %"
            for name in ("passed", "failed", "inconclusive", "slower", "faster")
        )
        print(f"{label}, limit {bound}: {shares}")  # noqa: T201 (a script's output)


if __name__ == "__main__":
    main()
