"""The ledger: an append-only chain that survives two writers and a kill at any byte, and that shows every change."""

import os
import random
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from dualtrack.facts import ledger as ledger_module
from dualtrack.facts.errors import LedgerError
from dualtrack.facts.hash_chain import NO_ENTRY
from dualtrack.facts.ledger import (
    PATH_AFTER,
    CleanEpochs,
    Ledger,
    Promotion,
    RollbackEntry,
    RunDigest,
    Waiver,
    clean_epoch_key,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
STAGES = list(PATH_AFTER)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def epochs(number: int, key: str = "k", reset: str | None = None) -> CleanEpochs:
    return CleanEpochs(at=NOW, key=key, num_epochs=number, reset_because=reset)


def promotion(stage: str) -> Promotion:
    return Promotion(at=NOW, stage=stage, active_path=PATH_AFTER[stage], who="ana", why="passed gate", run="r1")


def rollback(stage: str, to_path: str) -> RollbackEntry:
    return RollbackEntry(at=NOW, stage=stage, from_path="prefetched", to_path=to_path, who="ana", why="rehearsal")


def waiver(**more: object) -> Waiver:
    content = {
        "at": NOW,
        "stage": STAGES[1],
        "observation": "x",
        "who": "ana",
        "why": "known",
        "until": NOW + timedelta(days=7),
    }
    return Waiver.model_validate({**content, **more})


def numbers(ledger: Ledger) -> list[int]:
    return [entry.num_epochs for entry in ledger.entries() if isinstance(entry, CleanEpochs)]


def test_an_empty_ledger_leaves_legacy_active_and_creates_no_file(ledger: Ledger) -> None:
    assert ledger.active_path() == "legacy"
    assert ledger.entries() == ()
    assert ledger.root_digest() == NO_ENTRY
    assert not ledger.path.exists()


def test_every_kind_of_entry_comes_back_as_it_was_written(ledger: Ledger) -> None:
    run = RunDigest(at=NOW, run="r1", manifest_digest="a" * 64, evidence_root="b" * 64)
    written = (promotion(STAGES[0]), rollback(STAGES[1], "legacy"), waiver(), epochs(3), run)
    roots = [ledger.append(entry) for entry in written]
    assert ledger.entries() == written
    assert ledger.root_digest() == roots[-1]
    assert len(set(roots)) == len(roots)


def test_the_active_path_follows_promotions_and_rollbacks(ledger: Ledger) -> None:
    seen = []
    for entry in (*map(promotion, STAGES[:3]), rollback(STAGES[2], "pooled"), rollback(STAGES[1], "legacy")):
        ledger.append(entry)
        seen.append((ledger.active_path(), len(ledger.promoted_stages())))
    assert seen == [("legacy", 1), ("pooled", 2), ("prefetched", 3), ("pooled", 2), ("legacy", 1)]


def test_a_rollback_takes_every_later_stage_away(ledger: Ledger) -> None:
    for stage in STAGES:
        ledger.append(promotion(stage))
    ledger.append(rollback(STAGES[1], "legacy"))
    assert ledger.promoted_stages() == (STAGES[0],)


def test_clean_epochs_add_up_under_their_key_and_another_key_starts_at_zero(ledger: Ledger) -> None:
    ledger.append(epochs(40))
    ledger.append(epochs(7, key="other"))
    ledger.append(epochs(60))
    assert [ledger.clean_epochs(key) for key in ("k", "other", "new")] == [100, 7, 0]


def test_an_error_resets_the_count_of_its_key_only(ledger: Ledger) -> None:
    ledger.append(epochs(99))
    ledger.append(epochs(5, key="other"))
    ledger.append(epochs(2, reset="epoch 99: leaf [0] differs"))
    ledger.append(epochs(1))
    assert [ledger.clean_epochs(key) for key in ("k", "other")] == [3, 5]


@pytest.mark.parametrize("place", range(5))
def test_every_part_of_the_key_makes_another_key(place: int) -> None:
    parts: list[object] = ["source", "settings", "frozen", {"torch": "2.13.0"}, "cpu"]
    changed = list(parts)
    changed[place] = {"torch": "2.12.0"} if place == 3 else "else"
    assert clean_epoch_key(*parts) != clean_epoch_key(*changed)  # type: ignore[arg-type]
    assert clean_epoch_key(*parts) == clean_epoch_key(*parts)  # type: ignore[arg-type]


def test_a_waiver_holds_until_its_date_and_not_longer(ledger: Ledger) -> None:
    ledger.append(waiver())
    assert len(ledger.active_waivers(NOW + timedelta(days=6))) == 1
    assert ledger.active_waivers(NOW + timedelta(days=7)) == ()
    assert ledger.active_waivers(NOW - timedelta(seconds=1)) == ()
    assert ledger.active_waivers(NOW, STAGES[2]) == ()


@pytest.mark.parametrize("missing", [{"who": ""}, {"why": ""}, {"until": NOW}, {"until": None}])
def test_a_waiver_without_who_why_or_until_is_refused(missing: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        waiver(**missing)


def change_digit(content: bytes) -> bytes:
    return content.replace(b'"num_epochs":2', b'"num_epochs":9')


def drop_line(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[:1] + lines[2:])


def swap_lines(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join([lines[1], lines[0], *lines[2:]])


def repeat_line(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join([*lines, lines[-1]])


def add_space(content: bytes) -> bytes:
    return content.replace(b'{"digest"', b'{ "digest"', 1)


def damage_end(content: bytes) -> bytes:
    return content[:-1] + b"x"


@pytest.mark.parametrize("damage", [change_digit, drop_line, swap_lines, repeat_line, add_space, damage_end])
def test_a_change_of_the_file_is_named_and_never_repaired_silently(
    ledger: Ledger, damage: Callable[[bytes], bytes]
) -> None:
    for number in (1, 2, 3):
        ledger.append(epochs(number))
    damaged = damage(ledger.path.read_bytes())
    assert damaged != ledger.path.read_bytes()
    ledger.path.write_bytes(damaged)
    with pytest.raises(LedgerError, match=r"ledger\.jsonl: line \d"):
        ledger.entries()
    with pytest.raises(LedgerError):
        ledger.append(epochs(4))
    assert ledger.path.read_bytes() == damaged


def test_a_line_of_another_ledger_in_the_same_place_is_found(ledger: Ledger, tmp_path: Path) -> None:
    other = Ledger(tmp_path / "other.jsonl")
    for number in (1, 2):
        ledger.append(epochs(number))
        other.append(epochs(10 * number))
    first, _ = ledger.path.read_bytes().splitlines(keepends=True)
    _, foreign = other.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(first + foreign)
    with pytest.raises(LedgerError, match="line 2 does not follow line 1"):
        ledger.entries()


def test_a_writer_killed_at_any_byte_costs_at_most_the_entry_it_was_writing(ledger: Ledger) -> None:
    ledger.append(epochs(1))
    whole = len(ledger.path.read_bytes())
    ledger.append(epochs(2))
    content = ledger.path.read_bytes()
    for end in range(whole, len(content)):
        ledger.path.write_bytes(content[:end])
        is_whole = end == len(content) - 1  # only the newline is missing
        assert numbers(ledger) == ([1, 2] if is_whole else [1]), end
        ledger.append(epochs(3))
        assert numbers(ledger) == ([1, 2, 3] if is_whole else [1, 3]), end


def test_an_entry_of_an_unknown_kind_is_refused(ledger: Ledger) -> None:
    from dualtrack.facts.hash_chain import make_line

    ledger.path.write_bytes(make_line({"kind": "promise"}, 0, NO_ENTRY)[0])
    with pytest.raises(LedgerError, match="no entry of a kind"):
        ledger.entries()


def test_a_second_writer_waits_for_its_turn_and_gives_up_with_a_reason(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "LOCK_SECONDS", 0.05)
    with (
        ledger_module.FileLock(ledger.path.with_name(".ledger.jsonl.lock")),
        pytest.raises(LedgerError, match="another writer"),
    ):
        ledger.append(epochs(1))


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process and return its id; it ends without pytest's cleanup."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def test_two_writers_at_once_lose_nothing(ledger: Ledger) -> None:
    def write(start: int) -> None:
        for number in range(start, start + 20):
            ledger.append(epochs(number))

    children = [in_child(lambda start=start: write(start)) for start in (0, 100)]  # type: ignore[misc]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    found = numbers(ledger)
    assert sorted(found) == [*range(20), *range(100, 120)]
    assert [number for number in found if number < 100] == list(range(20))


@pytest.mark.parametrize("num_kills", [16, pytest.param(200, marks=pytest.mark.full)])
def test_kill_9_while_writing_keeps_every_acknowledged_entry(
    ledger: Ledger, num_kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other kill falls after a drawn number of bytes, the rest at any moment; bytes are written one by one to widen the window."""
    chance, acknowledged, num_torn = random.Random(7), 0, 0
    for number in range(num_kills):
        bytes_to_live = chance.randrange(1, 700) if number % 2 else 10**9

        def write_slowly(descriptor: int, content: bytes, left: list[int] = [bytes_to_live]) -> None:  # noqa: B006 (the child's own count)
            for place in range(len(content)):
                os.write(descriptor, content[place : place + 1])
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(ledger_module, "_write_all", write_slowly)
        acknowledged += count_until_killed(
            ledger, acknowledged + 1, chance.uniform(0.001, 0.02) if number % 2 == 0 else 60.0
        )
        num_torn += not ledger.path.read_bytes().endswith(b"\n") if ledger.path.exists() else 0
        found = numbers(ledger)
        # the entry that was on its way may be there too, whole
        assert found in (list(range(1, acknowledged + 1)), list(range(1, acknowledged + 2)))
        acknowledged = len(found)
    assert num_torn > num_kills // 4, "hardly a kill fell into a line; the test shows little"


def count_until_killed(ledger: Ledger, first: int, seconds: float) -> int:
    """Append entries in a child until it is killed, by itself or after `seconds`; return how many it acknowledged."""
    reader, writer = os.pipe()

    def write_on() -> None:
        for number in range(first, first + 10_000):
            ledger.append(epochs(number))
            os.write(writer, b".")

    child = in_child(write_on)
    os.close(writer)
    if seconds < 1:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as stream:
        return len(stream.read())
