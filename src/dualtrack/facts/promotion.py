"""When a stage may be promoted: its gate passed or is waived line by line, its evidence verifies, and it is next in order.

No timer promotes and nothing here writes: the caller appends the `Promotion` to the ledger when these checks let it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dualtrack.facts.errors import LedgerError
from dualtrack.facts.ledger import Ledger
from dualtrack.facts.observations import State
from dualtrack.facts.records import STAGES, StageRecord
from dualtrack.facts.verdicts import blocks


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where and on what a promotion would take effect."""

    hardware_identity: str
    frozen_inputs_digest: str
    code: Mapping[str, Any] | str
    """The group `code` of `provenance.collect`, as it is now."""
    now: datetime


def check_promotion(
    ledger: Ledger, record: StageRecord, site: Site, *, verify_problem: str | None, allow_dirty: bool = False
) -> str:
    """Refuse a promotion that its evidence does not carry, else return the reason to be entered: `passed gate` or the waivers.

    Args:
        ledger: The project's ledger.
        record: Record of the stage to be promoted.
        site: This machine's identity, the project's frozen inputs, and the state of the code now.
        verify_problem: The first difference that `verify_run` found in the record's run, None where there is none.
        allow_dirty: Promote from a changed working tree all the same.

    Raises:
        LedgerError: The promotion is refused; the message says why and what to do.
    """
    stage = record.stage
    if verify_problem is not None:
        raise LedgerError(f"{stage} is not promoted: its run does not verify ({verify_problem}); run the stage again")
    _check_order(ledger, stage)
    _check_baseline(record, site)
    if not allow_dirty:
        _check_code(record, site)
    return _check_gate(ledger, record, site.now)


def _check_order(ledger: Ledger, stage: str) -> None:
    gated = STAGES[1:-1]  # stage 0 changes nothing, so there is nothing to promote
    if stage not in gated:
        raise LedgerError(
            f"expected one of {', '.join(gated)}, got {stage}; only a stage with a migration step is promoted"
        )
    promoted = ledger.promoted_stages()
    missing = [earlier for earlier in gated[: gated.index(stage)] if earlier not in promoted]
    if missing:
        raise LedgerError(f"{stage} is not promoted out of order: promote {missing[0]} first")
    if stage in promoted:
        raise LedgerError(f"{stage} is promoted already; roll it back first to promote it anew")


def _check_baseline(record: StageRecord, site: Site) -> None:
    if record.frozen_inputs_digest != site.frozen_inputs_digest:
        raise LedgerError(
            f"{record.stage} is not promoted: it was judged against the frozen inputs {record.frozen_inputs_digest[:12]}, the project now has "
            f"{site.frozen_inputs_digest[:12]}; run the stage again"
        )
    if record.hardware_identity != site.hardware_identity:
        raise LedgerError(
            f"{record.stage} is not promoted: it was judged on {record.hardware_identity}, this is {site.hardware_identity}; a baseline of another "
            "device or torch proves nothing here, run the stage on this machine"
        )


def _check_code(record: StageRecord, site: Site) -> None:
    before = record.conditions.get("before")
    ran_with = before.get("code") if isinstance(before, Mapping) else None
    for code, when in ((ran_with, "when the stage ran"), (site.code, "now")):
        state = code.get("state") if isinstance(code, Mapping) else None
        if state != "clean":
            raise LedgerError(
                f"{record.stage} is not promoted: the working tree was {state or 'not collected'} {when}; commit, run the stage again, or allow it "
                "explicitly"
            )


def _check_gate(ledger: Ledger, record: StageRecord, now: datetime) -> str:
    if record.verdict.state is State.PASSED:
        return "passed gate"
    waived = {waiver.observation: waiver for waiver in ledger.active_waivers(now, record.stage)}
    blocking = [line for line in record.verdict.lines if blocks(line, record.device)]
    open_lines = [line for line in blocking if line.observation not in waived]
    if open_lines or not blocking:
        named = (
            ", ".join(f"{line.observation} ({line.state}: {line.statistic})" for line in open_lines)
            or "nothing could be judged"
        )
        raise LedgerError(
            f"{record.stage} is not promoted: its gate is {record.verdict.state}: {named}; repair it, or state a waiver for each line"
        )
    reasons = [
        f"{line.observation} until {waived[line.observation].until:%Y-%m-%d} by {waived[line.observation].who}"
        for line in blocking
    ]
    return f"waived: {'; '.join(reasons)}"
