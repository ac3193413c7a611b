"""The processes of one launch: all are in one process group, which can be counted and ended whatever its members are doing."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

POLL_SECONDS = 0.02
SAME_BIRTH_SECONDS = 0.5
"""The system's boot time, from which psutil computes a birth, may be corrected by fractions of a second."""


def living_in_group(group: int, apart_from: int | None = None) -> list[int]:
    """Return the ids of the group's processes that still run; a zombie is dead, even where nobody reaps it."""
    found = []
    for process in psutil.process_iter(["status"]):
        if process.pid == apart_from or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found


def end_group(group: int, seconds: float = 5.0, apart_from: int | None = None) -> list[int]:
    """Kill every process of the group (stopped ones too) and wait until none runs.

    Returns:
        The ids that still run after `seconds`: processes in uninterruptible sleep, which no signal ends.
    """
    deadline = time.monotonic() + seconds
    while (left := living_in_group(group, apart_from)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return left


class ProcessIdentity(NamedTuple):
    """One process and no other: ids are used again, within minutes on a busy machine with 32,768 of them."""

    pid: int
    born_seconds: float
    """`psutil.Process.create_time()`."""

    def find(self) -> psutil.Process | None:
        """Return the process if it is still the same one, and no zombie."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.born_seconds) < SAME_BIRTH_SECONDS
            if is_same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return process
        return None


def process_status(identity: ProcessIdentity) -> str | None:
    """Return psutil's status of a process, or None when it does not run."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = identity.find()
        return None if process is None else str(process.status())
    return None


def end_processes(identities: Sequence[ProcessIdentity]) -> None:
    """Kill processes and whatever they started, loader workers for example."""
    for identity in identities:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = identity.find()
            if process is None:
                continue
            for one in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
