"""The page as data: what stands on the first screen and below, computed from records alone and free of markup.

Absence is never good news here: a missing record reads `not run`, a missing figure `not measured: reason`, a missing `run.json` `partial`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualtrack.facts.observations import GateLine, State
from dualtrack.facts.records import RunSummary, StageRecord, Trial
from dualtrack.facts.verdicts import blocks
from dualtrack.reporting.page_conditions import ConditionRow, condition_rows
from dualtrack.reporting.page_evidence import (
    EquivalenceRow,
    Rehearsal,
    Risk,
    equivalence_rows,
    noise_floor_text,
    open_risks,
    rehearsals,
)
from dualtrack.reporting.page_ledger import LedgerFacts
from dualtrack.reporting.page_states import GATED_STAGES, StageStatus, stage_statuses
from dualtrack.reporting.page_trust import TrustItem, trust_items
from dualtrack.reporting.result_rows import ResultRow, result_rows

MAX_FAILING_LINES = 2


@dataclass(frozen=True, kw_only=True)
class VerdictLine:
    """What was judged, what came out, and the limit it was held against."""

    what: str
    statistic: str = ""
    limit: str = ""
    link: str = ""
    """Where more of it stands on the page."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict line: one state, one sentence, the deciding figures, and what to do next."""

    state: str
    shape: str
    headline: str
    promoted: str
    lines: tuple[VerdictLine, ...]
    """The failing gate lines, the deciding one first; or the scope of a passed run."""
    next_action: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageSection:
    """All that the page shows of one stage below the first screen."""

    status: StageStatus
    record: StageRecord
    lines: tuple[GateLine, ...]
    """Worst first, in the order of the gate otherwise."""
    trials: tuple[Trial, ...]


@dataclass(frozen=True, kw_only=True)
class PageModel:
    """The whole page."""

    run: str
    workload: str
    device: str
    date: str
    is_complete: bool
    verdict: Verdict
    statuses: tuple[StageStatus, ...]
    results: tuple[ResultRow, ...]
    equivalence: tuple[EquivalenceRow, ...]
    noise_floor: str
    trust: tuple[TrustItem, ...]
    risks: tuple[Risk, ...]
    rehearsals: tuple[Rehearsal, ...]
    sections: tuple[StageSection, ...]
    conditions: tuple[ConditionRow, ...]


def build_page(
    records: Mapping[str, StageRecord],
    summary: RunSummary | None,
    *,
    unreadable: Mapping[str, str] | None = None,
    ledger: LedgerFacts | None = None,
    evidence_root: str | None = None,
    folder: Path | None = None,
) -> PageModel:
    """Compute the page.

    Args:
        records: The records that could be read, by stage.
        summary: `run.json`, or None where the runner did not write it.
        unreadable: Stage -> why its record could not be read.
        ledger: What the run's ledger says; None where there is none.
        evidence_root: Digest over records, notebooks and figures.
        folder: The run's folder, for links to what is there; None makes a page without links.
    """
    ledger = ledger or LedgerFacts()
    run = summary.run if summary is not None else folder.name if folder is not None else "run"
    statuses = stage_statuses(records, summary, unreadable or {}, ledger, folder)
    first = next(iter(records.values()), None)
    return PageModel(
        run=run,
        workload=summary.workload if summary is not None else first.workload if first is not None else "",
        device=", ".join(sorted({record.device for record in records.values()})) or "no device",
        date=f"{min(record.started_at for record in records.values()):%Y-%m-%d %H:%M} UTC" if records else "",
        is_complete=summary is not None and summary.complete,
        verdict=build_verdict(records, statuses, ledger, run),
        statuses=statuses,
        results=result_rows(records, statuses),
        equivalence=equivalence_rows(records, statuses, run),
        noise_floor=noise_floor_text(records),
        trust=trust_items(records, summary, run, evidence_root),
        risks=open_risks(records, statuses, ledger),
        rehearsals=rehearsals(records),
        conditions=condition_rows(records),
        sections=tuple(_section(status, records[status.stage]) for status in statuses if status.stage in records),
    )


def build_verdict(
    records: Mapping[str, StageRecord], statuses: tuple[StageStatus, ...], ledger: LedgerFacts, run: str
) -> Verdict:
    """Return the verdict line: the first gate in order that does not hold decides, else the run passed."""
    gates = [status for status in statuses if status.stage in GATED_STAGES]
    promoted = [status for status in gates if status.is_promoted]
    text = "Nothing is promoted by this run; `dualtrack status` tells what the project's ledger says."
    if promoted:
        text = f"Promoted through stage {promoted[-1].number}, active path: {ledger.active_path}."
    judged = [
        *gates,
        *(status for status in statuses if status.stage not in GATED_STAGES and status.state != "not run"),
    ]
    holding_back = [status for status in judged if not status.holds]
    # a gate that ran and failed is worse news than an earlier one that was left out
    open_gate = next((status for status in holding_back if status.state != "not run"), next(iter(holding_back), None))
    if open_gate is None:
        return _all_passed(records, gates, text, run)
    record = records.get(open_gate.stage)
    if record is None or open_gate.shape in ("crashed", "not-run"):
        return _unfinished(open_gate, text, run)
    replays = [row.replay for row in equivalence_rows({open_gate.stage: record}, statuses, run) if row.replay]
    return Verdict(
        state=open_gate.state,
        shape=open_gate.shape,
        headline=_headline(open_gate),
        promoted=text,
        lines=_blocking_lines(record, open_gate),
        next_action=record.verdict.next_action,
        commands=tuple(replays) or (f"dualtrack run --resume {run}",),
    )


def _headline(status: StageStatus) -> str:
    return f"Stage {status.number}, {status.title}: {status.state}"


def _all_passed(records: Mapping[str, StageRecord], gates: list[StageStatus], promoted: str, run: str) -> Verdict:
    waived = [status for status in gates if status.state == "waived"]
    scopes = sorted({record.verdict.scope for stage, record in records.items() if stage in GATED_STAGES} - {"complete"})
    planted = [fault for record in records.values() for fault in record.planted_faults]
    caught = f"{sum(fault.caught for fault in planted)} of {len(planted)} caught by their gates"
    lines = [
        VerdictLine(what=f"Stage {status.number} stands on a waiver", statistic=status.detail) for status in waived
    ]
    lines.append(VerdictLine(what="Scope", statistic="; ".join(scopes) or "complete, every gate line was measured"))
    lines.append(VerdictLine(what="Faults planted on purpose", statistic=caught))
    next_stage = next(
        (status.stage for status in gates[1:] if not status.is_promoted), None
    )  # stage 0 has no path to promote
    command = f"dualtrack promote {next_stage} --run {run} --who NAME --why REASON" if next_stage else ""
    return Verdict(
        state="waived" if waived else "passed",
        shape="waived" if waived else "passed",
        headline=f"All {len(gates)} gates passed"
        if not waived
        else f"{len(gates) - len(waived)} of {len(gates)} gates passed, {len(waived)} waived",
        promoted=promoted,
        lines=tuple(lines),
        next_action="Check the run yourself, then promote the first stage that is not promoted."
        if next_stage
        else "Nothing is left to promote.",
        commands=(command,) if command else (),
    )


def _unfinished(status: StageStatus, promoted: str, run: str) -> Verdict:
    if status.state == "not run":
        next_action = "Run the stages that are missing; finished ones are verified and kept."
    else:
        next_action = "Open the stage's notebook where it stopped, mend the cause, then go on; finished stages are verified and kept."
    return Verdict(
        state=status.state,
        shape=status.shape,
        headline=_headline(status),
        promoted=promoted,
        lines=(
            VerdictLine(what="What was seen last", statistic=status.detail)
            if status.detail
            else VerdictLine(what="This stage was not started"),
            VerdictLine(what="The run is partial: this stage has shown nothing"),
        ),
        next_action=next_action,
        commands=(f"dualtrack run --resume {run}",),
    )


def _blocking_lines(record: StageRecord, status: StageStatus) -> tuple[VerdictLine, ...]:
    """Return the first lines that keep the gate from passing, the deciding one on top, and how many more there are."""
    lines = [line for line in record.verdict.lines if blocks(line, record.device)]
    lines.sort(key=lambda line: (line.observation != record.verdict.deciding, line.state != record.verdict.state))
    shown = [
        VerdictLine(
            what=line.what, statistic=line.statistic, limit=line.limit + (f", n = {line.num:,}" if line.num > 1 else "")
        )
        for line in lines[:MAX_FAILING_LINES]
    ]
    if len(lines) > MAX_FAILING_LINES:
        more = f"and {len(lines) - MAX_FAILING_LINES} more of this gate's lines"
        shown.append(VerdictLine(what=more, link=f"#stage-{status.number}"))
    return tuple(shown)


def _section(status: StageStatus, record: StageRecord) -> StageSection:
    order = (State.TOOL_ERROR, State.FAILED, State.INCONCLUSIVE, State.NOT_MEASURED, State.PASSED)
    lines = sorted(record.verdict.lines, key=lambda line: (order.index(line.state), not line.primary))
    return StageSection(
        status=status,
        record=record,
        lines=tuple(lines),
        trials=tuple(sorted(record.trials, key=lambda trial: trial.position)),
    )
