"""Who ended a launch: the ranks' journals, their own words and the agent's exit codes, weighed in a fixed order.

The agent's "first observed failure" may be a victim, a culprit may leave with exit code 0, and a late rank blames the innocent; so the
place in the journal counts more than any message.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dualtrack.training.rank_journal import JournalEntry, RankFailure

LATE_SECONDS = 0.5
"""A rank that complained, or entered its last phase, this much after the others is the one they waited for."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What is known of one rank when a launch is judged."""

    rank: int
    entry: JournalEntry | None
    failure: RankFailure | None
    is_alive: bool
    exit_code: int | None = None
    is_stopped: bool = False
    """The process was stopped by a signal and stays so."""

    @property
    def is_done(self) -> bool:
        """The rank came to its end."""
        return self.entry is not None and self.entry.phase == "done"

    @property
    def died_silently(self) -> bool:
        """The rank is gone without a word and without its done mark."""
        return self.entry is not None and not self.is_alive and not self.is_done and self.failure is None


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The rank that ended a launch, and why."""

    rank: int | None
    cause: str
    traceback: str = ""


def find_guilty(states: Sequence[RankState], backend: str) -> Blame:
    """Name the rank that ended the launch.

    In this order: ranks gone without a word (on NCCL not those that the watchdog aborted, since it aborts the victims); ranks with an error
    of their own; ranks that are stopped; ranks that never came up, while others waited for them; ranks that are done and do not exit; the rank that is furthest
    behind, or that has no complaint where the others have.
    """
    silent = [
        state
        for state in states
        if state.died_silently and not (backend == "nccl" and state.exit_code == -signal.SIGABRT)
    ]
    if silent:
        first = min(silent, key=_place)
        return Blame(rank=first.rank, cause=f"rank {first.rank} {_exit_words(first.exit_code)} in {_where(first)}")
    raised = [
        (state, state.failure) for state in states if state.failure is not None and not state.failure.is_communication
    ]
    if raised:
        first, failure = min(raised, key=lambda pair: pair[1].at_seconds)
        return Blame(
            rank=first.rank,
            cause=f"rank {first.rank} raised {failure.error} in {_where(first)}",
            traceback=failure.traceback,
        )
    stopped = [state for state in states if state.is_stopped]
    if stopped:
        names = ", ".join(str(state.rank) for state in stopped)
        return Blame(
            rank=stopped[0].rank, cause=f"rank {names} is stopped (SIGSTOP or a debugger) in {_where(stopped[0])}"
        )
    absent = [state for state in states if state.entry is None]
    if absent and len(absent) < len(states):
        names = ", ".join(str(state.rank) for state in absent)
        return Blame(rank=absent[0].rank, cause=f"rank {names} never came up, while the others waited for it")
    working = [state for state in states if not state.is_done and state.entry is not None]
    lingering = [state for state in states if state.is_done and state.is_alive]
    if lingering and not working:
        return Blame(rank=lingering[0].rank, cause=f"rank {lingering[0].rank} is done, but its process does not exit")
    if not working:
        return Blame(rank=None, cause="no rank left a trace")
    return _awaited(working)


def _awaited(working: Sequence[RankState]) -> Blame:
    """Name the rank that the others waited for: the only one behind them, without a complaint of its own, or with the last complaint."""
    complaint = next(
        (state.failure for state in working if state.failure is not None and not state.failure.by_request), None
    )
    trace = complaint.traceback if complaint is not None else ""
    place = min(_place(state) for state in working)
    behind: Sequence[RankState] = [state for state in working if _place(state) == place]
    if len(behind) == len(working):
        quiet = [state for state in behind if state.failure is None or state.failure.by_request]
        behind = quiet if 0 < len(quiet) < len(behind) else _clearly_last(behind)
    if len(behind) != 1:
        ranks = (
            "all ranks" if len(behind) == len(working) else f"ranks {', '.join(str(state.rank) for state in behind)}"
        )
        words = f": {complaint.error}" if complaint is not None else ""
        return Blame(
            rank=None,
            cause=f"{ranks} stand in {_where(behind[0])}, and none can be told from the others{words}",
            traceback=trace,
        )
    state = behind[0]
    alive = "is alive, but stands" if state.is_alive else "was still"
    return Blame(
        rank=state.rank,
        cause=f"rank {state.rank} {alive} in {_where(state)} while the others waited for it",
        traceback=trace,
    )


def _clearly_last(states: Sequence[RankState]) -> Sequence[RankState]:
    """Return the one rank that complained, or else arrived, clearly after all others; all of them where there is none."""
    for moment in (_complained, _entered):
        ordered = sorted(states, key=moment)
        if len(ordered) > 1 and moment(ordered[-1]) > moment(ordered[-2]) + LATE_SECONDS:
            return ordered[-1:]
    return states


def _complained(state: RankState) -> float:
    return state.failure.at_seconds if state.failure is not None else 0.0


def _place(state: RankState) -> tuple[int, int, int]:
    return state.entry.position if state.entry is not None else (-1, -1, -1)


def _entered(state: RankState) -> float:
    return state.entry.entered_seconds if state.entry is not None else 0.0


def _where(state: RankState) -> str:
    return state.entry.describe() if state.entry is not None else "no phase"


def _exit_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended without an error (killed, or left early)"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"left early with exit code {exit_code}, without its done mark"
