"""A file is whole or absent, whatever kills its writer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dualtrack.facts.durable_files import write_atomically

WRITER = """
import itertools, sys
from pathlib import Path
from dualtrack.facts.durable_files import write_atomically
for turn in itertools.count():
    write_atomically(Path(sys.argv[1]), bytes([65 + turn % 26]) * 200_000, overwrite=True)
"""


def test_an_existing_file_is_not_replaced_by_accident(tmp_path: Path) -> None:
    write_atomically(tmp_path / "record.json", b"first")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "record.json", b"second")
    assert (tmp_path / "record.json").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def kill_while_writing(target: Path, num_kills: int) -> set[int]:
    """Kill a writer at some moment of its writing, again and again; return the lengths and mixtures that a reader found."""
    kinds = set()
    for turn in range(num_kills):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(target)])
        deadline = time.monotonic() + 20
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.003 * (turn % 17))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(timeout=10)
        content = target.read_bytes()
        kinds.add(len(content) * len(set(content)))
    return kinds


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    assert kill_while_writing(tmp_path / "record.json", 10) == {200_000}


@pytest.mark.full
def test_200_kills_leave_whole_files(tmp_path: Path) -> None:
    assert kill_while_writing(tmp_path / "record.json", 200) == {200_000}
