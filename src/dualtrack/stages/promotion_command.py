"""`dualtrack promote`, `waive` and `status`: the acts that write the project's ledger, and what it says now."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dualtrack.facts.digests import sha256_file
from dualtrack.facts.frozen_inputs import load_limits, load_manifest
from dualtrack.facts.ledger import PATH_AFTER, Ledger, Promotion, RollbackEntry, Waiver
from dualtrack.facts.project import Project
from dualtrack.facts.promotion import Site, check_promotion
from dualtrack.facts.records import STAGES, StageRecord
from dualtrack.measuring import provenance


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who decides, why, and whether a working tree with uncommitted changes is accepted."""

    who: str
    why: str
    allow_dirty: bool = False


def promote_stage(project: Project, stage: str, folder: Path, verify_problem: str | None, decision: Decision) -> str:
    """Make a stage's path the active one, and return a sentence about it.

    Args:
        project: Whose ledger is written.
        stage: The stage to promote; every stage before it must be promoted already.
        folder: The run whose record carries the promotion.
        verify_problem: The first difference that verification found in the run, None where there is none.
        decision: Who promotes, and why now.

    Raises:
        LedgerError: The evidence does not carry the promotion; the message says why and what to do.
        EvidenceError: The run has no record of the stage.
    """
    ledger = Ledger(project.ledger)
    record = StageRecord.load(folder / "records" / f"{stage}.json")
    frozen = load_manifest(project.frozen_folder(record.workload))
    site = Site(
        hardware_identity=provenance.hardware_identity(record.device), frozen_inputs_digest=frozen.digest,
        code=provenance.collect(record.device)["code"], now=datetime.now(UTC),
    )  # fmt: skip
    grounds = check_promotion(ledger, record, site, verify_problem=verify_problem, allow_dirty=decision.allow_dirty)
    ledger.append(
        Promotion(
            at=site.now,
            stage=stage,
            active_path=PATH_AFTER[stage],
            who=decision.who,
            why=f"{decision.why} ({grounds})",
            run=folder.name,
            run_digest=sha256_file(folder / "manifest.json"),
            hardware_identity=site.hardware_identity,
            frozen_inputs_digest=frozen.digest,
        )
    )
    return f"promoted {stage} ({grounds}); active path: {ledger.active_path()}; ledger root {ledger.root_digest()[:16]}"


def waive_line(project: Project, stage: str, observation: str, *, who: str, why: str, until: str) -> str:
    """Enter a waiver for one gate line, and return a sentence about it.

    Raises:
        ValueError: The date is none or lies in the past, or no limit of the stage bears that observation.
    """
    try:
        last_day = datetime.strptime(until, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as error:
        raise ValueError(f"--until: expected a date as 2027-01-31, got {until!r}") from error
    known = [limit.observation for limit in load_limits(project.frozen_folder(project.workload)).get(stage, ())]
    if observation not in known:
        raise ValueError(f"{stage} has no limit on {observation!r}; its limits are on {', '.join(known)}")
    waiver = Waiver(
        at=datetime.now(UTC), stage=stage, observation=observation, who=who, why=why, until=last_day + timedelta(days=1)
    )
    Ledger(project.ledger).append(waiver)
    return f"waived {observation} of {stage} until the end of {until}, by {who}: {why}"


def describe_status(project: Project, latest: Path | None) -> Iterator[str]:
    """Yield what the project's ledger says now, line by line."""
    ledger = Ledger(project.ledger)
    promoted = ledger.promoted_stages()
    yield f"active path     {ledger.active_path()}"
    yield f"promoted        {', '.join(promoted) if promoted else 'nothing yet'}"
    following = [stage for stage in STAGES[1:-1] if stage not in promoted]
    yield f"next            {following[0] if following else 'nothing: the migration is complete'}"
    for entry in ledger.entries()[-5:]:
        if isinstance(entry, Promotion | RollbackEntry):
            yield f"  {entry.at:%Y-%m-%d %H:%M} {entry.kind} {entry.stage} by {entry.who}: {entry.why}"
    for waiver in ledger.active_waivers(datetime.now(UTC)):
        yield f"  waiver: {waiver.observation} of {waiver.stage} by {waiver.who} until {waiver.until:%Y-%m-%d}: {waiver.why}"
    yield f"ledger root     {ledger.root_digest()[:16]}"
    yield f"latest run      {latest.name if latest else 'none'}"
