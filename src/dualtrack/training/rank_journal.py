"""One small file per rank: where it is, since when, and how it ended. It names the guilty when the ranks' own messages contradict each other.

A rank writes before every collective; whoever watches reads. One `pwrite` of a fixed size replaces the entry, so the file never grows.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from dualtrack.facts.durable_files import write_atomically

ENTRY_BYTES = 512
PHASES = (
    "start",
    "init",
    "prepare",
    "data",
    "forward",
    "reduce",
    "optimizer",
    "checkpoint",
    "gather",
    "teardown",
    "done",
)
"""In the order of a rank's life; `data` to `optimizer` repeat with each step. A rank waits for others in `WAITING_PHASES`."""
WAITING_PHASES = ("init", "prepare", "reduce", "checkpoint", "gather", "teardown")


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """Where a rank is."""

    rank: int
    pid: int
    born_seconds: float = 0.0
    """When the process was created, by the system's clock: a process id alone may belong to somebody else by now."""
    section: int = 0
    """Which part of its task the rank is in; steps count within one."""
    step: int = 0
    phase: str = "start"
    entered_seconds: float
    """`time.monotonic()` of the host when the phase was entered; comparable on one host only."""
    own_seconds: float | None = None
    """What the last step took this rank itself, waiting for others excluded."""
    num_steps: int = 0
    """Steps finished in all sections."""

    @property
    def position(self) -> tuple[int, int, int]:
        """Order of places: a rank with a smaller position is behind."""
        return self.section, self.step, PHASES.index(self.phase)

    def describe(self) -> str:
        """Return the place in words."""
        return (
            f"step {self.step}, phase {self.phase}"
            if self.phase in ("data", "forward", "reduce", "optimizer")
            else f"phase {self.phase}"
        )


class RankJournal:
    """The writing side, held by the rank; closing twice is fine.

    `on_enter` is called with every entry just written: planted faults hang on it, so a fault strikes at the very place the journal names.
    """

    def __init__(self, folder: Path, rank: int, on_enter: Callable[[JournalEntry], None] | None = None) -> None:
        """Create the file and write the first entry."""
        self.path = journal_path(folder, rank)
        self.on_enter = on_enter
        self.entry = JournalEntry(
            rank=rank, pid=os.getpid(), born_seconds=psutil.Process().create_time(), entered_seconds=time.monotonic()
        )
        self._descriptor: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._write()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Note that the rank enters `phase`, of `step` or of the step it is in."""
        self.entry = replace(
            self.entry, phase=phase, step=self.entry.step if step is None else step, entered_seconds=time.monotonic()
        )
        self._write()
        if self.on_enter is not None:
            self.on_enter(self.entry)

    def begin_section(self) -> None:
        """Note that another part of the task begins, in which steps count from 0 again."""
        self.entry = replace(self.entry, section=self.entry.section + 1, step=0)
        self.enter("prepare")

    def finish_step(self, own_seconds: float) -> None:
        """Keep what the step took this rank itself; written with the next entry."""
        self.entry = replace(self.entry, own_seconds=own_seconds, num_steps=self.entry.num_steps + 1)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _write(self) -> None:
        if self._descriptor is not None:
            os.pwrite(self._descriptor, json.dumps(asdict(self.entry)).encode().ljust(ENTRY_BYTES), 0)


def journal_path(folder: Path, rank: int) -> Path:
    """Return where a rank's journal lies."""
    return folder / f"journal-{rank:05d}.json"


def read_journal(folder: Path, rank: int) -> JournalEntry | None:
    """Return the last entry of a rank, or None while there is none."""
    for _ in range(3):  # a read that meets a write may see a mixture; the next one will not
        try:
            return JournalEntry(**json.loads(journal_path(folder, rank).read_bytes()))
        except FileNotFoundError:
            return None
        except ValueError:
            continue
    return None


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """What a rank says of its own end."""

    rank: int
    error: str
    """`Type: message`."""
    traceback: str
    is_communication: bool
    """The error came out of a collective: it may be another rank's doing."""
    by_request: bool = False
    """The rank was told to end (SIGTERM): a victim."""
    at_seconds: float = 0.0


def write_failure(folder: Path, failure: RankFailure) -> None:
    """Keep the first failure of a rank; a later one does not replace it."""
    try:
        write_atomically(folder / f"failure-{failure.rank:05d}.json", json.dumps(asdict(failure)).encode())
    except FileExistsError:
        return


def read_failure(folder: Path, rank: int) -> RankFailure | None:
    """Return what a rank said of its own end, or None."""
    try:
        return RankFailure(**json.loads((folder / f"failure-{rank:05d}.json").read_bytes()))
    except FileNotFoundError:
        return None


def write_result(folder: Path, rank: int, result: Any) -> None:
    """Keep a rank's result as JSON."""
    write_atomically(folder / f"result-{rank:05d}.json", json.dumps(result).encode())


def read_result(folder: Path, rank: int) -> Any:
    """Return a rank's result.

    Raises:
        FileNotFoundError: The rank left none.
    """
    return json.loads((folder / f"result-{rank:05d}.json").read_bytes())
