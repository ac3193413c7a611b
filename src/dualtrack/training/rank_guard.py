"""The thread in each rank that ends it when nobody is left to do so: the launcher is gone, its agent asks, or nothing moves any more."""

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from dualtrack.training.rank_journal import JournalEntry, RankFailure, RankJournal, write_failure

LAUNCHER_GONE_EXIT_CODE = 70
NO_PROGRESS_EXIT_CODE = 71
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM
CHECK_SECONDS = 0.5


class RankGuard:
    """Watches three things while a rank works; must be entered in the main thread.

    The read end of a pipe, whose write end only the launching process has: its end means exit, even after a kill -9 there. SIGTERM: a rank
    deep in a collective never gets to run a Python handler, so the byte of `signal.set_wakeup_fd` wakes this thread instead, which first
    notes that the rank was told to end; otherwise a victim would look like a culprit. And the rank's own journal: on a host where the
    launcher can't see it, a rank without progress for `deadline_seconds` ends itself.
    """

    def __init__(self, rank: int, folder: Path, deadline_seconds: float, liveness: int | None) -> None:
        """Prepare; `liveness` is a readable descriptor, or None where no launcher holds the other end."""
        self.rank, self.folder, self.deadline_seconds, self.liveness = rank, folder, deadline_seconds, liveness
        self.journal: RankJournal | None = None
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-guard", daemon=True)

    def __enter__(self) -> Self:
        """Take over SIGTERM and start watching."""
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching progress. Launcher and SIGTERM stay watched until the process has ended, since its end may hang too."""
        self._stopped.set()

    def _watch(self) -> None:
        descriptors = [self._wake_reader, *([self.liveness] if self.liveness is not None else [])]
        while True:
            readable, _, _ = select.select(descriptors, [], [], CHECK_SECONDS)
            if self.liveness in readable:
                os._exit(LAUNCHER_GONE_EXIT_CODE)
            if self._wake_reader in readable and signal.SIGTERM in self._signals():
                self._leave("Terminated: told to end by the agent", TERMINATED_EXIT_CODE, by_request=True)
            if self.journal is not None and not self._stopped.is_set():
                self._check_progress(self.journal.entry)

    def _check_progress(self, entry: JournalEntry) -> None:
        silent_seconds = time.monotonic() - entry.entered_seconds
        if silent_seconds > self.deadline_seconds + CHECK_SECONDS:  # the launcher, which sees all ranks, goes first
            self._leave(
                f"NoProgress: no progress for {silent_seconds:.0f} s in {entry.describe()}",
                NO_PROGRESS_EXIT_CODE,
                by_request=False,
            )

    def _signals(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._wake_reader, 64)
        return b""

    def _leave(self, error: str, exit_code: int, by_request: bool) -> None:
        with contextlib.suppress(OSError):
            write_failure(
                self.folder,
                RankFailure(
                    rank=self.rank, error=error, traceback="", is_communication=True, by_request=by_request,
                    at_seconds=time.monotonic(),
                ),
            )  # fmt: skip
        os._exit(exit_code)
