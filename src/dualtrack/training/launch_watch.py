"""What the launching process sees of its ranks while they run, and what it makes of it when they end."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dualtrack.facts.errors import LaunchError
from dualtrack.training.launch_spec import LaunchSpec
from dualtrack.training.rank_blame import Blame, RankState, find_guilty
from dualtrack.training.rank_journal import JournalEntry, read_failure, read_journal, read_result
from dualtrack.training.rank_processes import ProcessIdentity, process_status

GRACE_SECONDS = 2.0
"""From the first sign of a failure to the kill: enough for gloo's peers to say what they saw (0.14 s, measured on 4 ranks)."""
SLOW_MULTIPLE = 2.5
SLOW_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """What a completed launch leaves."""

    results: tuple[Any, ...]
    """By rank, as the task returned them."""
    folder: Path
    """The launch folder with whatever files the task wrote."""
    seconds: float
    seconds_until_up: float
    """From the call to the moment at which every rank had joined the group."""
    slow_ranks: dict[int, float]
    """Ranks whose own time a step was a multiple of the median rank's, with that multiple; they were not ended."""


class RankFailed(LaunchError):
    """A launch failed because of its ranks; `rank` is None where none could be told from the others."""

    def __init__(self, message: str, blame: Blame, processes: Sequence[ProcessIdentity] = ()) -> None:
        """Keep who and why beside the message, and the processes that the ranks were."""
        super().__init__(message)
        self.rank, self.cause, self.rank_traceback = blame.rank, blame.cause, blame.traceback
        self.processes = tuple(processes)


def identity_of(entry: JournalEntry) -> ProcessIdentity:
    """Return the process that wrote a journal."""
    return ProcessIdentity(entry.pid, entry.born_seconds)


class LaunchWatch:
    """Reads the journals of one launch; knows when to stop waiting and whom to name."""

    def __init__(self, spec: LaunchSpec, folder: Path) -> None:
        """Start the clock."""
        self.spec, self.folder = spec, folder
        self.started_seconds = time.monotonic()
        self.up_seconds: float | None = None
        self.slow_ranks: dict[int, float] = {}
        self._failed_seconds: float | None = None
        self._own_seconds: dict[int, deque[tuple[int, float]]] = {
            rank: deque(maxlen=10) for rank in range(spec.world_size)
        }
        self._stopped: list[RankState] | None = None
        self._stop_reason = "a rank failed"

    def reason_to_stop(self) -> str | None:
        """Return `a rank failed` or `deadline passed` when waiting longer is of no use, else None; remembers the ranks' state then."""
        states = self._look()
        now = time.monotonic()
        if self._failed_seconds is None and any(state.failure is not None or state.died_silently for state in states):
            self._failed_seconds = now
        if self._failed_seconds is not None and now - self._failed_seconds > GRACE_SECONDS:
            return self._stop("a rank failed", states)
        if any(now - self._last_sign(state) > self.spec.deadline_seconds for state in states):
            return self._stop("deadline passed", states)
        return None

    def _stop(self, reason: str, states: list[RankState]) -> str:
        self._stop_reason, self._stopped = reason, states
        return reason

    def running(self) -> list[ProcessIdentity]:
        """Return the processes of the ranks that still run."""
        return [identity_of(state.entry) for state in self._look() if state.entry is not None and state.is_alive]

    def judge(self, outcome: dict[str, Any]) -> LaunchError | None:
        """Return None for a launch in which every rank came to its end, else the error to raise."""
        exit_codes = {int(rank): code for rank, code in outcome.get("exit_codes", {}).items()}
        states = self._stopped if self._stopped is not None else self._look(exit_codes)
        if outcome["state"] == "completed" and self._stopped is None and all(state.is_done for state in states):
            return None
        seconds = time.monotonic() - self.started_seconds
        if outcome["state"] in ("error", "agent died") and not any(
            state.failure or state.died_silently for state in states
        ):
            return LaunchError(
                f"the launch agent failed after {seconds:.1f} s ({outcome['state']}):\n{outcome.get('error', '')}"
            )
        if all(state.entry is None for state in states):
            return LaunchError(
                f"no rank came up within {seconds:.1f} s: the rendezvous at {self.spec.endpoint} did not complete; "
                "see whether something else answers there, or use port 0, which takes a free one"
            )
        blame = find_guilty(states, self.spec.backend)
        return RankFailed(
            self._message(blame, seconds),
            blame,
            [identity_of(state.entry) for state in states if state.entry is not None],
        )

    def result(self) -> LaunchResult:
        """Return what the ranks left.

        Raises:
            LaunchError: A rank is done and left no result.
        """
        try:
            results = tuple(read_result(self.folder, rank) for rank in range(self.spec.world_size))
        except FileNotFoundError as error:
            raise LaunchError(
                f"expected a result of every rank, {Path(str(error.filename)).name} is missing"
            ) from error
        seconds = time.monotonic() - self.started_seconds
        until_up = (self.up_seconds if self.up_seconds is not None else time.monotonic()) - self.started_seconds
        return LaunchResult(
            results=results,
            folder=self.folder,
            seconds=seconds,
            seconds_until_up=until_up,
            slow_ranks=dict(self.slow_ranks),
        )

    def _message(self, blame: Blame, seconds: float) -> str:
        ended = (
            f"no progress for {self.spec.deadline_seconds:.0f} s"
            if self._stop_reason == "deadline passed"
            else "a rank failed"
        )
        words = f"launch of {self.spec.world_size} ranks ended after {seconds:.1f} s ({ended}): {blame.cause}"
        if blame.traceback:
            return f"{words}\n{blame.traceback}"
        log = "" if blame.rank is None else self._last_words(blame.rank)
        return f"{words}; look at its host, then launch again from the last commit" + (
            f"\nits stderr ended with:\n{log}" if log else ""
        )

    def _last_words(self, rank: int) -> str:
        logs = sorted((self.folder / "logs").glob(f"*/attempt_0/{rank}/stderr.log"))
        return logs[-1].read_text(errors="replace")[-2000:].strip() if logs else ""

    def _look(self, exit_codes: dict[int, int] | None = None) -> list[RankState]:
        states = []
        for rank in range(self.spec.world_size):
            # journal, process, journal: a rank that begins or ends in between is never seen dead without its done mark
            known = read_journal(self.folder, rank)
            status = process_status(identity_of(known)) if known is not None else None
            entry = read_journal(self.folder, rank) if known is not None else None
            failure = read_failure(self.folder, rank)
            states.append(RankState(
                rank=rank, entry=entry, failure=failure, is_alive=status is not None, is_stopped=status == psutil.STATUS_STOPPED,
                exit_code=(exit_codes or {}).get(rank),
            ))  # fmt: skip
        self._note(states)
        return states

    def _note(self, states: list[RankState]) -> None:
        entries = [state.entry for state in states if state.entry is not None]
        if (
            self.up_seconds is None
            and len(entries) == len(states)
            and all(entry.phase not in ("start", "init") for entry in entries)
        ):
            self.up_seconds = max(self.started_seconds, time.monotonic())
        for entry in entries:
            self._note_step(entry)
        medians = {
            rank: statistics.median(value for _, value in seen)
            for rank, seen in self._own_seconds.items()
            if len(seen) >= SLOW_STEPS
        }
        if len(medians) == self.spec.world_size > 1:
            typical = statistics.median(medians.values())
            for rank, median in medians.items():
                if typical > 0 and median >= SLOW_MULTIPLE * typical:
                    self.slow_ranks[rank] = max(median / typical, self.slow_ranks.get(rank, 0.0))

    def _note_step(self, entry: JournalEntry) -> None:
        seen = self._own_seconds[entry.rank]
        if entry.own_seconds is not None and (not seen or seen[-1][0] != entry.num_steps):
            seen.append((entry.num_steps, entry.own_seconds))

    def _last_sign(self, state: RankState) -> float:
        return self.started_seconds if state.entry is None else max(self.started_seconds, state.entry.entered_seconds)
