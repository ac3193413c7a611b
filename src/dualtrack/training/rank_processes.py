"""The processes of one launch: all are in one process group, which can be counted and ended whatever its members are doing."""

import contextlib
import os
import signal
import time

import psutil

POLL_SECONDS = 0.02


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


def process_status(pid: int) -> str | None:
    """Return psutil's status of a process, or None when it does not run; a zombie is dead."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None
    return None if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(status)


def end_processes(pids: list[int]) -> None:
    """Kill processes and whatever they started, loader workers for example."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for one in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
