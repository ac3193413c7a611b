"""Faults put into a rank on purpose, at a place that its journal names: negative controls for the launcher and the gates."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal

from dualtrack.facts.observations import Fact
from dualtrack.training.rank_journal import JournalEntry

FaultKind = Literal["kill", "raise", "exit", "freeze", "sleep", "abort"]


class PlantedRankFault(RuntimeError):
    """The error that a planted `raise` gives."""


class RankFault(Fact):
    """What happens to one rank when it enters a phase of a step."""

    kind: FaultKind
    """`kill` is SIGKILL, `exit` leaves with code 0 without a word, `freeze` is SIGSTOP, `abort` is SIGABRT, `sleep` takes `seconds`."""
    rank: int
    phase: str
    step: int = 0
    section: int | None = None
    """Part of the task; None strikes in whichever comes first."""
    repeat: bool = False
    """Strike at every step from `step` on: a slow rank rather than a late one."""
    seconds: float = 0.0

    def strikes(self, entry: JournalEntry) -> bool:
        """Return whether the fault belongs to this place."""
        at_step = entry.step >= self.step if self.repeat else entry.step == self.step
        return entry.phase == self.phase and at_step and self.section in (None, entry.section)


def planted(faults: Sequence[RankFault], rank: int) -> Callable[[JournalEntry], None] | None:
    """Return what a rank's journal calls at each entry, or None when nothing is planted on this rank."""
    mine = [fault for fault in faults if fault.rank == rank]
    if not mine:
        return None

    def strike(entry: JournalEntry) -> None:
        for fault in mine:
            if fault.strikes(entry):
                _commit(fault)

    return strike


def _commit(fault: RankFault) -> None:
    if fault.kind == "raise":
        raise PlantedRankFault(f"planted on rank {fault.rank} in phase {fault.phase} of step {fault.step}")
    if fault.kind == "exit":
        os._exit(0)
    if fault.kind == "sleep":
        time.sleep(fault.seconds)
        return
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "abort": signal.SIGABRT}[fault.kind])
    time.sleep(0.05)  # a stop signal takes effect here at the latest
