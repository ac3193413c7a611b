"""Two blocks of the first screen: what was compared, and what stays open or was tried on purpose."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dualtrack.facts.observations import Equality, GateLine, State
from dualtrack.facts.records import StageRecord
from dualtrack.reporting.page_ledger import LedgerFacts
from dualtrack.reporting.page_states import GATED_STAGES, TITLES, StageStatus
from dualtrack.reporting.quantities import with_time_unit


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
        seen = _judged_equalities(record)
        first = next(
            (item.first_divergence for item in seen if item.num_mismatched and item.first_divergence is not None), None
        )
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


def _judged_equalities(record: StageRecord) -> list[Equality]:
    """Return the comparisons that a limit judges; stage 3 also keeps each of them rung by rung, which would count twice."""
    named = dict.fromkeys(limit.observation for limit in record.limits)
    return [seen for key in named if isinstance(seen := record.observations.get(key), Equality)]


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
            text = f"stage {stage[0]}, {line.what}: {line.statistic}; it only advises (limit {line.limit})"
            risks.append(Risk(kind="advisory", text=text))
    risks += [Risk(kind="difference", text=text) for text in _allowed_differences(records)]
    missing = [(stage, line) for stage, line in _lines(records) if line.state is State.NOT_MEASURED]
    if missing:
        names = "; ".join(f"stage {stage[0]}: {line.what}" for stage, line in missing)
        reason = " without a CUDA device" if all(line.needs == "cuda" for _, line in missing) else ""
        text = f"{len(missing)} gate {_plural(len(missing), 'line')} not measured{reason} ({names})"
        risks.append(Risk(kind="missing", text=text))
    absent = [status.number for status in statuses if status.state == "not run" and status.stage in GATED_STAGES]
    if absent:
        risks.append(Risk(kind="missing", text=f"not run: {_plural(len(absent), 'stage')} {', '.join(absent)}"))
    return tuple(risks)


def _allowed_differences(records: Mapping[str, StageRecord]) -> Iterator[str]:
    for stage, record in records.items():
        for seen in _judged_equalities(record):
            if seen.num_within_tolerance or seen.num_skipped:
                tolerance = "an undeclared tolerance" if seen.tolerance is None else f"tolerance {seen.tolerance:g}"
                parts = [f"{seen.num_within_tolerance:,} within {tolerance}"] if seen.num_within_tolerance else []
                parts += [f"{seen.num_skipped:,} skipped"] if seen.num_skipped else []
                yield f"stage {stage[0]}, {seen.what}: {', '.join(parts)} of {seen.num_compared:,}"


def _lines(records: Mapping[str, StageRecord]) -> Iterator[tuple[str, GateLine]]:
    for stage, record in records.items():
        for line in record.verdict.lines:
            yield stage, line


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"
