"""Evidence files are whole or absent, whatever kills the writer, and are never replaced by accident."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from dualtrack.facts.durable_files import write_atomically


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new" / "record.json", b"{}")
    assert (tmp_path / "new" / "record.json").read_bytes() == b"{}"
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "record.json"]


def test_evidence_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, b"old")
    with pytest.raises(FileExistsError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new", overwrite=True)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("num_kills", [15, pytest.param(200, marks=pytest.mark.full)])
def test_kill_9_while_writing_leaves_the_old_record_or_the_new_one(tmp_path: Path, num_kills: int) -> None:
    path, chance, latest = tmp_path / "record.json", random.Random(3), 0
    write_atomically(path, version(0))
    for _ in range(num_kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for number in range(latest + 1, latest + 10_000):
                    write_atomically(path, version(number), overwrite=True)
                    os.write(writer, b".")
            finally:
                os._exit(1)
        os.close(writer)
        time.sleep(chance.uniform(0.001, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as stream:
            latest += len(stream.read())
        assert path.read_bytes() in (version(latest), version(latest + 1))
        latest = int(path.read_bytes().split()[0])


def version(number: int) -> bytes:
    """Return a record of a megabyte, so that writing it takes longer than the shortest time to live."""
    return f"{number} ".encode() * (1_000_000 // len(f"{number} "))
