"""The thread that ends a rank when nobody else does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dualtrack.training.rank_guard import LAUNCHER_GONE_EXIT_CODE, NO_PROGRESS_EXIT_CODE, TERMINATED_EXIT_CODE
from dualtrack.training.rank_journal import read_failure

RANK = """
import sys, time
from pathlib import Path
from dualtrack.training.rank_guard import RankGuard
from dualtrack.training.rank_journal import RankJournal
folder, deadline, liveness = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
with RankGuard(0, folder, deadline, liveness) as guard, RankJournal(folder, 0) as journal:
    guard.journal = journal
    journal.enter("reduce", 3)
    print("up", flush=True)
    time.sleep(60)
"""


def start(folder: Path, deadline_seconds: float = 100.0) -> tuple[subprocess.Popen[str], int]:
    reader, writer = os.pipe()
    command = [sys.executable, "-c", RANK, str(folder), str(deadline_seconds), str(reader)]
    rank = subprocess.Popen(command, pass_fds=(reader,), stdout=subprocess.PIPE, text=True)
    os.close(reader)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "up\n"
    rank.stdout.close()
    return rank, writer


def test_the_end_of_the_launchers_pipe_ends_the_rank(tmp_path: Path) -> None:
    rank, writer = start(tmp_path)
    os.close(writer)
    assert rank.wait(timeout=10) == LAUNCHER_GONE_EXIT_CODE


def test_a_rank_that_is_told_to_end_says_so_and_is_no_culprit(tmp_path: Path) -> None:
    rank, writer = start(tmp_path)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(timeout=10) == TERMINATED_EXIT_CODE
    os.close(writer)
    failure = read_failure(tmp_path, 0)
    assert failure is not None
    assert failure.by_request


def test_a_rank_without_progress_ends_itself_and_names_the_place(tmp_path: Path) -> None:
    started = time.monotonic()
    rank, writer = start(tmp_path, deadline_seconds=0.5)
    assert rank.wait(timeout=20) == NO_PROGRESS_EXIT_CODE
    os.close(writer)
    failure = read_failure(tmp_path, 0)
    assert failure is not None
    assert "step 3, phase reduce" in failure.error
    assert time.monotonic() - started < 20
