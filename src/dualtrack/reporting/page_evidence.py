"""Three blocks of the first screen: what was compared, why to trust it, and what stays open."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dualtrack.facts.observations import Equality, GateLine, State
from dualtrack.facts.records import RunSummary, StageRecord
from dualtrack.reporting.page_ledger import LedgerFacts
from dualtrack.reporting.page_states import GATED_STAGES, TITLES, StageStatus
from dualtrack.reporting.quantities import with_binary_prefix, with_time_unit

NOT_COLLECTED = "not collected"


@dataclass(frozen=True, kw_only=True)
class EquivalenceRow:
    """All comparisons of one stage, counted together; the gate's own lines stand further down."""

    stage: str
    title: str
    reason: str | None = None
    """Why there are no counts."""
    num_compared: int = 0
    num_equal: int = 0
    num_within_tolerance: int = 0
    num_mismatched: int = 0
    num_skipped: int = 0
    divergence: str | None = None
    replay: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrustItem:
    """One line of the trust box."""

    term: str
    value: str
    kind: str = "text"
    """`text`, `digest` or `command`."""
    is_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class Risk:
    """Something a reviewer has to accept knowingly."""

    kind: str
    """`waiver`, `difference`, `advisory`, `missing` or `trust`."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What was tried on purpose at one gate: its planted faults, and the way back."""

    stage: str
    num_planted: int
    num_caught: int
    planted: str
    """The first planted fault in words; one that slipped through comes first."""
    rollback: str
    rollback_holds: bool | None


def equivalence_rows(
    records: Mapping[str, StageRecord], statuses: tuple[StageStatus, ...], run_name: str
) -> tuple[EquivalenceRow, ...]:
    """Return the counts of every gated stage, with its first divergence and the command that replays it."""
    rows = []
    states = {status.stage: status.state for status in statuses}
    for stage in GATED_STAGES:
        record = records.get(stage)
        if record is None:
            rows.append(EquivalenceRow(stage=stage, title=TITLES[stage], reason=states.get(stage, "not run")))
            continue
        seen = [item for item in record.observations.values() if isinstance(item, Equality)]
        first = next((item.first_divergence for item in seen if item.first_divergence is not None), None)
        rows.append(
            EquivalenceRow(
                stage=stage,
                title=TITLES[stage],
                reason=None if seen else "nothing was compared",
                num_compared=sum(item.num_compared for item in seen),
                num_equal=sum(item.num_equal for item in seen),
                num_within_tolerance=sum(item.num_within_tolerance for item in seen),
                num_mismatched=sum(item.num_mismatched for item in seen),
                num_skipped=sum(item.num_skipped for item in seen),
                divergence=f"{first.where}: legacy {first.legacy}, candidate {first.candidate}"
                if first is not None
                else None,
                replay=f"dualtrack replay reports/{run_name}/{first.bundle}"
                if first is not None and first.bundle
                else None,
            )
        )
    return tuple(rows)


def noise_floor_text(records: Mapping[str, StageRecord]) -> str:
    """Return the noise floor: legacy against legacy, in bits and in time."""
    baseline = records.get(GATED_STAGES[0])
    if baseline is None:
        return "not measured: stage 0 was not run"
    lines = [line for line in baseline.verdict.lines if line.observation in ("legacy_repeats", "noise_floor_ratio")]
    return "; ".join(line.statistic for line in lines) or "not measured"


def rehearsals(records: Mapping[str, StageRecord]) -> tuple[Rehearsal, ...]:
    """Return, for each gate that was judged, its planted faults and its rollback."""
    rows = []
    for stage in GATED_STAGES:
        record = records.get(stage)
        if record is None:
            continue
        faults = sorted(record.planted_faults, key=lambda fault: fault.caught)
        rollback, holds = (
            "none asked for" if stage == GATED_STAGES[0] else "not rehearsed",
            None if stage == GATED_STAGES[0] else False,
        )
        if record.rollback is not None:
            done = record.rollback
            word = "verified" if done.verified else "NOT verified"
            counts = f"{done.num_steps_equal} of {done.num_steps_compared} steps equal"
            rollback = f"{done.from_path} → {done.to_path} {word}: {counts}, {with_time_unit(done.seconds)}"
            holds = done.verified
        rows.append(
            Rehearsal(
                stage=stage,
                num_planted=len(faults),
                num_caught=sum(fault.caught for fault in faults),
                planted=faults[0].what if faults else "no fault was planted",
                rollback=rollback,
                rollback_holds=holds,
            )
        )
    return tuple(rows)


def open_risks(
    records: Mapping[str, StageRecord], statuses: tuple[StageStatus, ...], ledger: LedgerFacts
) -> tuple[Risk, ...]:
    """Return what stays open, worst first: waivers, lines that only advise, allowed differences, what was not measured or not run."""
    risks = [Risk(kind="waiver", text=text) for text in (ledger.problem, *ledger.waivers) if text]
    for stage, line in _lines(records):
        if line.advisory and line.state is not State.PASSED:
            risks.append(
                Risk(
                    kind="advisory",
                    text=f"stage {stage[0]}, {line.what}: {line.statistic}; it only advises (limit {line.limit})",
                )
            )
    for stage, record in records.items():
        for seen in record.observations.values():
            if isinstance(seen, Equality) and (seen.num_within_tolerance or seen.num_skipped):
                parts = (
                    [f"{seen.num_within_tolerance:,} within tolerance {seen.tolerance:g}"]
                    if seen.num_within_tolerance and seen.tolerance
                    else []
                )
                parts += [f"{seen.num_skipped:,} skipped"] if seen.num_skipped else []
                risks.append(
                    Risk(
                        kind="difference",
                        text=f"stage {stage[0]}, {seen.what}: {', '.join(parts)} of {seen.num_compared:,}",
                    )
                )
    missing = [(stage, line) for stage, line in _lines(records) if line.state is State.NOT_MEASURED]
    if missing:
        names = "; ".join(f"stage {stage[0]}: {line.what}" for stage, line in missing)
        reason = " without a CUDA device" if all(line.needs == "cuda" for _, line in missing) else ""
        risks.append(
            Risk(
                kind="missing",
                text=f"{len(missing)} gate {_plural(len(missing), 'line')} not measured{reason} ({names})",
            )
        )
    absent = [status.number for status in statuses if status.state == "not run" and status.stage in GATED_STAGES]
    if absent:
        risks.append(Risk(kind="missing", text=f"not run: {_plural(len(absent), 'stage')} {', '.join(absent)}"))
    return tuple(risks)


def trust_items(
    records: Mapping[str, StageRecord], summary: RunSummary | None, run_name: str, evidence_root: str | None
) -> tuple[TrustItem, ...]:
    """Return what lets a reviewer check the run without the machine that made it."""
    items = [
        _root_item(evidence_root),
        TrustItem(term="Check it", value=f"dualtrack verify reports/{run_name}", kind="command"),
        _one_value("Frozen inputs", {record.frozen_inputs_digest[:16] for record in records.values()}, "digest"),
        *_conditions(records),
    ]
    is_complete = summary is not None and summary.complete
    how_far = (
        "complete"
        if is_complete
        else "partial: " + ("run.json is missing" if summary is None else _unfinished(summary))
    )
    return (*items, TrustItem(term="Run", value=f"{how_far}; {_when(records, summary)}", is_bad=not is_complete))


def _root_item(evidence_root: str | None) -> TrustItem:
    is_digest = evidence_root is not None and re.fullmatch(r"[0-9a-f]{64}", evidence_root) is not None
    return TrustItem(
        term="Evidence root",
        value=evidence_root or NOT_COLLECTED,
        kind="digest" if is_digest else "text",
        is_bad=not is_digest,
    )


def _one_value(term: str, values: set[str], kind: str = "text") -> TrustItem:
    """Return an item for something that has to be the same in all stages; two values are shown as a fault."""
    if not values:
        return TrustItem(term=term, value=NOT_COLLECTED)
    joined = " ≠ ".join(sorted(values))
    return TrustItem(
        term=term,
        value=joined if len(values) == 1 else f"differs between stages: {joined}",
        kind=kind,
        is_bad=len(values) > 1,
    )


def _conditions(records: Mapping[str, StageRecord]) -> Iterator[TrustItem]:
    befores: list[Mapping[str, Any]] = [record.conditions.get("before") or {} for record in records.values()]
    yield _code_item([_group(before, "code") for before in befores])
    yield _one_value("Environment", {_environment_text(before) for before in befores})
    yield TrustItem(
        term="Hardware", value="; ".join(sorted({_hardware_text(before) for before in befores})) or NOT_COLLECTED
    )


def _group(before: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a group of conditions; one that could not be collected is a word instead of a mapping."""
    group = before.get(name)
    return group if isinstance(group, Mapping) else {}


def _code_item(codes: list[Mapping[str, Any]]) -> TrustItem:
    """Return commit and state of the code; a changed tree, or one that changed during the run, is a fault."""
    texts = {_code_text(code) for code in codes}
    is_bad = len(texts) > 1 or any(code.get("state") == "dirty" for code in codes)
    if len(texts) <= 1:
        return TrustItem(term="Code", value=next(iter(texts), NOT_COLLECTED), is_bad=is_bad)
    commits = sorted({str(code.get("commit", NOT_COLLECTED))[:12] for code in codes})
    states = sorted({str(code.get("state", NOT_COLLECTED)) for code in codes})
    return TrustItem(
        term="Code",
        value=f"changed during the run: commit {', '.join(commits)}; {', '.join(states)}; see Conditions",
        is_bad=is_bad,
    )


def _code_text(code: Mapping[str, Any]) -> str:
    if "commit" not in code:
        return NOT_COLLECTED
    text = f"commit {str(code['commit'])[:12]}, {code.get('state', 'clean or dirty not collected')}"
    if code.get("state") == "dirty":
        text += f": {code.get('num_changed')} changed, {code.get('num_untracked')} untracked, difference {str(code.get('difference_digest'))[:12]}"
    return text


def _environment_text(before: Mapping[str, Any]) -> str:
    packages, platform = _group(before, "packages"), _group(before, "platform")
    versions = {
        "Python": _group(before, "python").get("version"),
        "torch": packages.get("torch"),
        "numpy": packages.get("numpy"),
        str(platform.get("system", "kernel")): platform.get("kernel"),
        "CUDA": _group(before, "torch").get("cuda"),
        "driver": _group(before, "gpu").get("driver"),
    }
    return (
        ", ".join(f"{name} {value}" for name, value in versions.items() if value not in (None, NOT_COLLECTED))
        or NOT_COLLECTED
    )


def _hardware_text(before: Mapping[str, Any]) -> str:
    gpu, cpu, memory = _group(before, "gpu"), _group(before, "cpu"), _group(before, "memory")
    parts = []
    if gpu.get("name", NOT_COLLECTED) != NOT_COLLECTED:
        parts.append(f"{gpu.get('num_devices', 1)} x {gpu['name']}")
    if cpu.get("model", NOT_COLLECTED) != NOT_COLLECTED:
        parts.append(f"{cpu['model']}, {cpu.get('num_allowed', cpu.get('num_logical'))} CPUs")
    if isinstance(memory.get("total_bytes"), int):
        parts.append(f"{with_binary_prefix(memory['total_bytes'])} memory")
    return ", ".join(parts) or NOT_COLLECTED


def _when(records: Mapping[str, StageRecord], summary: RunSummary | None) -> str:
    starts = [record.started_at for record in records.values()] + ([summary.started_at] if summary else [])
    ends = [record.ended_at for record in records.values()] + ([summary.ended_at] if summary else [])
    if not starts:
        return f"time {NOT_COLLECTED}"
    return f"{min(starts):%Y-%m-%d %H:%M} UTC, {with_time_unit((max(ends) - min(starts)).total_seconds())}"


def _unfinished(summary: RunSummary) -> str:
    settled = {state.value for state in State}
    left = [f"stage {stage[0]} {state}" for stage, state in summary.stages.items() if state not in settled]
    return "; ".join(left) or "the runner stopped early"


def _lines(records: Mapping[str, StageRecord]) -> Iterator[tuple[str, GateLine]]:
    for stage, record in records.items():
        for line in record.verdict.lines:
            yield stage, line


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"
