"""What a run's ledger says about its stages, in the words of the page; waivers are judged at the time of the run, so a page never ages."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dualtrack.facts.errors import LedgerError
from dualtrack.facts.ledger import LEGACY, REHEARSAL, Entry, Ledger, Promotion, RollbackEntry, Waiver
from dualtrack.facts.records import StageRecord
from dualtrack.facts.verdicts import blocks


@dataclass(frozen=True, kw_only=True)
class LedgerFacts:
    """Promotions, rollbacks and waivers that concern this run."""

    promoted: frozenset[str] = frozenset()
    rolled_back: frozenset[str] = frozenset()
    waived: frozenset[str] = frozenset()
    """Stages whose every blocking line stands on a waiver that held when the run ended."""
    waivers: tuple[str, ...] = ()
    active_path: str = ""
    problem: str = ""
    """Why the ledger could not be read."""


def read_ledger(path: Path, records: Mapping[str, StageRecord], at: datetime | None) -> LedgerFacts:
    """Read a ledger; a broken one is reported on the page and grants nothing.

    Args:
        path: The ledger; it needs not exist.
        records: Records of the run, whose blocking lines waivers may cover.
        at: When the run ended; None takes no waiver as valid.
    """
    if not path.is_file():
        return LedgerFacts()
    ledger = Ledger(path)
    try:
        entries = ledger.entries()
    except LedgerError as error:
        return LedgerFacts(problem=f"the ledger is damaged and grants nothing: {error}".splitlines()[0])
    promoted, taken_back, path_now = _standing(entries)
    waivers = [entry for entry in entries if isinstance(entry, Waiver)]
    valid = {
        (waiver.stage, waiver.observation) for waiver in waivers if at is not None and waiver.at <= at < waiver.until
    }
    return LedgerFacts(
        promoted=frozenset(promoted),
        rolled_back=frozenset(taken_back),
        waived=frozenset(stage for stage, record in records.items() if _is_waived(record, valid)),
        waivers=tuple(_in_words(waiver, (waiver.stage, waiver.observation) in valid) for waiver in waivers),
        active_path=path_now,
    )


def _is_waived(record: StageRecord, valid: set[tuple[str, str]]) -> bool:
    blocking = [line for line in record.verdict.lines if blocks(line, record.device)]
    return bool(blocking) and all((record.stage, line.observation) in valid for line in blocking)


def _standing(entries: tuple[Entry, ...]) -> tuple[set[str], set[str], str]:
    """Return the stages that are promoted, those that were and are no longer, and the active path.

    Rehearsals are left out: each stage promotes and rolls back on purpose to show that it can, and nothing is promoted by that.
    """
    promoted: set[str] = set()
    taken_back: set[str] = set()
    path = LEGACY
    for entry in entries:
        if isinstance(entry, Promotion) and entry.who != REHEARSAL:
            promoted.add(entry.stage)
            taken_back.discard(entry.stage)
            path = entry.active_path
        elif isinstance(entry, RollbackEntry) and entry.who != REHEARSAL:
            taken_back |= {stage for stage in promoted if stage >= entry.stage}
            promoted -= taken_back
            path = entry.to_path
    return promoted, taken_back, path


def _in_words(waiver: Waiver, holds: bool) -> str:
    word = "waived" if holds else "EXPIRED waiver"
    return f"stage {waiver.stage[0]}, {waiver.observation}: {word} by {waiver.who} until {waiver.until:%Y-%m-%d}: {waiver.why}"
