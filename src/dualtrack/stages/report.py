"""Stage 4: read the records of a run, judge every stage again from its raw values, and lay out the result table. Nothing is measured."""

from collections.abc import Mapping

from dualtrack.facts.derivations import table_rows
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.observations import Divergence, Equality, Observation, State, Value
from dualtrack.facts.records import STAGES, StageRecord
from dualtrack.facts.verdicts import judge_stage, plant_fault
from dualtrack.stages.stage_run import Findings, StageRun, save_record

EXAMPLE_RUN = "example-digits-cpu"


def read_records(run: StageRun) -> dict[str, StageRecord]:
    """Return the records of stages 0 to 3 in this run's folder; a folder without any shows the committed example instead, and says so.

    Raises:
        EvidenceError: A record is damaged, or there are none at all.
    """
    for folder in (run.folder, run.project.reports / EXAMPLE_RUN):
        found = {stage: folder / "records" / f"{stage}.json" for stage in STAGES[:-1]}
        records = {stage: StageRecord.load(path) for stage, path in found.items() if path.is_file()}
        if records:
            if folder != run.folder:
                run.notes.append(
                    f"This folder has no records; shown is the committed example run reports/{EXAMPLE_RUN}."
                )
            return records
    raise EvidenceError(
        "expected records of earlier stages in this run folder, found none; run `dualtrack run`, or stage 0 in the same folder"
    )


def run_report_stage(run: StageRun, records: Mapping[str, StageRecord]) -> StageRecord:
    """Compare each recorded verdict with one computed again, count what has no figure, and save the record."""
    recomputed = compare_verdicts(records)
    rows = table_rows(list(records.values()))
    observations: dict[str, Observation] = {
        "verdicts_recomputed": recomputed,
        "num_table_rows": Value(what="rows of the result table with data", value=len(rows)),
    }
    run.notes.extend(f"{stage}: not run" for stage in STAGES[:-1] if stage not in records)
    edited = {stage: _with_edited_verdict(record) for stage, record in records.items()}
    fault = plant_fault(
        "a verdict edited in every record", "verdicts_recomputed", compare_verdicts(edited), run.limits, run.device
    )
    findings = Findings(
        observations=observations, stable_keys=("verdicts_recomputed", "num_table_rows"), planted_faults=[fault]
    )
    return save_record(run, findings)


def compare_verdicts(records: Mapping[str, StageRecord]) -> Equality:
    """Judge each record's raw values again, and count the gate lines that come out as recorded."""
    num_compared = num_equal = 0
    first: Divergence | None = None
    for stage, record in sorted(records.items()):
        again = judge_stage(record.observations, record.limits, record.planted_faults, record.device)
        recorded_lines, lines = [*record.verdict.lines, record.verdict.state], [*again.lines, again.state]
        num_compared += max(len(lines), len(recorded_lines))
        same = [before == now for before, now in zip(recorded_lines, lines, strict=False)]
        num_equal += sum(same)
        if not all(same) and first is None:
            place = same.index(False)
            first = Divergence(
                where=f"{stage}, gate line {place}",
                legacy=str(lines[place])[:200],
                candidate=str(recorded_lines[place])[:200],
            )
    return Equality(
        what="gate lines computed again from the raw values", num_compared=num_compared, num_equal=num_equal,
        num_mismatched=num_compared - num_equal, first_divergence=first,
    )  # fmt: skip


def _with_edited_verdict(record: StageRecord) -> StageRecord:
    other = State.PASSED if record.verdict.state is not State.PASSED else State.FAILED
    return record.model_copy(update={"verdict": record.verdict.model_copy(update={"state": other})})
