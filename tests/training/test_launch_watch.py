"""What the watch makes of journals that change while it reads them."""

import os
from pathlib import Path

import pytest

from dualtrack.training import launch_watch
from dualtrack.training.launch_spec import LaunchSpec
from dualtrack.training.launch_watch import LaunchWatch
from dualtrack.training.rank_journal import JournalEntry, RankJournal, read_journal, write_result

SPEC = LaunchSpec(task="none:none", world_size=2, timeout_seconds=5)


def test_a_rank_whose_journal_appears_while_it_is_looked_for_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[JournalEntry | None] = []

    def read(folder: Path, rank: int) -> JournalEntry | None:
        seen.append(None)
        return None if len(seen) % 2 else JournalEntry(rank=rank, pid=os.getpid(), entered_seconds=1.0)

    monkeypatch.setattr(launch_watch, "read_journal", read)
    watch = LaunchWatch(SPEC, tmp_path)
    assert not any(state.died_silently for state in watch._look())


def test_a_rank_without_a_process_and_without_its_done_mark_is_dead(tmp_path: Path) -> None:
    with RankJournal(tmp_path, 0), RankJournal(tmp_path, 1) as journal:
        journal.entry = JournalEntry(rank=1, pid=2**22, entered_seconds=1.0)
        journal.enter("forward", 3)
        assert [state.died_silently for state in LaunchWatch(SPEC, tmp_path)._look()] == [False, True]


def test_a_process_id_that_belongs_to_somebody_else_by_now_is_not_the_rank(tmp_path: Path) -> None:
    with RankJournal(tmp_path, 0) as mine, RankJournal(tmp_path, 1) as other:
        other.entry = JournalEntry(
            rank=1, pid=os.getpid(), born_seconds=mine.entry.born_seconds - 60, entered_seconds=1.0
        )
        other.enter("reduce", 3)
        watch = LaunchWatch(SPEC, tmp_path)
        assert [state.is_alive for state in watch._look()] == [True, False]
        assert watch.running() == [launch_watch.identity_of(mine.entry)]


def test_a_launch_without_a_result_of_every_rank_is_an_error(tmp_path: Path) -> None:
    write_result(tmp_path, 0, {})
    with pytest.raises(launch_watch.LaunchError, match=r"result-00001\.json is missing"):
        LaunchWatch(SPEC, tmp_path).result()


def test_a_journal_keeps_its_size_and_its_last_entry(tmp_path: Path) -> None:
    with RankJournal(tmp_path, 0) as journal:
        for step in range(100):
            journal.enter("reduce", step)
        assert journal.path.stat().st_size == 512
    found = read_journal(tmp_path, 0)
    assert found is not None
    assert (found.step, found.phase) == (99, "reduce")
    journal.close()
