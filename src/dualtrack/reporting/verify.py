"""Check a run offline: every digest, and every verdict judged again from the raw record.

A changed byte is found by the digests. An edited verdict, observation or trial is found even where somebody computed all digests anew,
because verdicts and derived observations must follow from the rest. What this can't find is evidence made up consistently from the start:
compare the manifest's digest with the one that was printed or promoted. Nothing here imports torch.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualtrack.facts.derivations import combine_stable_digests
from dualtrack.facts.digests import sha256_file
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.frozen_inputs import LIMITS_FILE, MANIFEST_FILE, Baseline, FrozenManifest, load_limits
from dualtrack.facts.ledger import CleanEpochs, Ledger
from dualtrack.facts.observations import State, Value
from dualtrack.facts.records import STAGES, RunSummary, StageRecord
from dualtrack.reporting.manifest import LEDGER_NAME, MANIFEST_NAME
from dualtrack.reporting.record_checks import check_record, is_worded_by_another_version
from dualtrack.reporting.seal_checks import check_files, check_ledger, check_page

SETTLED = {state.value for state in State}


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What a verification found."""

    run: str
    differences: tuple[str, ...]
    """In the order in which they were found; empty when everything agrees."""
    num_files: int
    num_verdicts: int
    num_lines: int
    """Gate lines judged again."""
    evidence_root: str | None
    manifest_digest: str | None
    is_complete: bool
    """Whether the run came to its end; a partial run can be sound too."""
    notes: tuple[str, ...] = ()
    """What a reviewer should know of a sound run too."""

    @property
    def ok(self) -> bool:
        """True when nothing differs."""
        return not self.differences

    @property
    def first_difference(self) -> str | None:
        """The first thing that differs, in words; None when nothing does."""
        return self.differences[0] if self.differences else None

    def text(self) -> str:
        """Return the result for a terminal."""
        head = f"{self.run}: {self.num_files} files by digest, {self.num_verdicts} verdicts with {self.num_lines} gate lines judged again"
        lines = [
            f"{head}, {'complete' if self.is_complete else 'partial'} run",
            f"evidence root   {self.evidence_root or 'none'}",
            f"manifest        {self.manifest_digest or 'none'}",
        ]
        lines += [f"note            {note}" for note in self.notes]
        if self.ok:
            return "\n".join([*lines, "verified: nothing differs"])
        lines.append(f"NOT VERIFIED: {self.first_difference}")
        lines += [f"  also: {difference}" for difference in self.differences[1:10]]
        if len(self.differences) > 10:
            lines.append(f"  and {len(self.differences) - 10} more")
        return "\n".join(lines)


def verify_run(run_folder: Path) -> VerifyResult:
    """Recompute every digest and every verdict of a run from what is in its folder.

    Args:
        run_folder: A run under `reports/`, or a copy of one anywhere.

    Returns:
        The differences found, in a fixed order: seal, files, records by stage, frozen inputs, `run.json`, page. Whatever is wrong with
        the folder becomes a difference; nothing is raised for it.
    """
    # the seal first: a changed manifest would otherwise blame the files that it lists
    differences = _guarded("ledger.jsonl", check_ledger, run_folder)
    differences += _guarded("manifest.json", check_files, run_folder)
    records: dict[str, StageRecord] = {}
    differences += _guarded("records", _load_records, run_folder, records)
    floor_trials = records[STAGES[0]].trials if STAGES[0] in records else ()
    for stage, record in records.items():
        found = _guarded("check", check_record, record, floor_trials)
        differences += [f"records/{stage}.json: {difference}" for difference in found]
    differences += _guarded(LEDGER_NAME, _check_clean_epochs, run_folder, records)
    differences += _guarded("frozen inputs", _check_frozen, run_folder, records)
    differences += _guarded("run.json", _check_summary, run_folder, records)
    differences += _guarded("index.html", check_page, run_folder)
    manifest = _read_json(run_folder / MANIFEST_NAME)
    return VerifyResult(
        run=run_folder.resolve().name,
        differences=tuple(differences),
        num_files=len(files) if isinstance(files := manifest.get("files"), dict) else 0,
        num_verdicts=len(records),
        num_lines=sum(len(record.verdict.lines) for record in records.values()),
        evidence_root=manifest.get("evidence_root"),
        manifest_digest=sha256_file(run_folder / MANIFEST_NAME) if (run_folder / MANIFEST_NAME).is_file() else None,
        is_complete=_read_json(run_folder / "run.json").get("complete") is True,
        notes=tuple(
            f"{stage} was judged by another version of dualtrack; its wording was not compared, its states, figures and limits were"
            for stage, record in records.items()
            if is_worded_by_another_version(record)
        ),
    )


def _guarded(what: str, check: Callable[..., Iterator[str]], *arguments: Any) -> list[str]:
    """Run a check; what breaks it is a difference too, never a crash that looks like nothing to report."""
    differences: list[str] = []
    try:
        differences.extend(check(*arguments))
    except EvidenceError as error:
        differences.append(str(error))
    except Exception as error:  # noqa: BLE001 (damaged content can break a check in any way, and each means that it differs)
        differences.append(
            f"{what}: can't be checked, {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        )
    return differences


def _load_records(run_folder: Path, records: dict[str, StageRecord]) -> Iterator[str]:
    """Load every record into `records`; a file in `records/` that is neither a record nor a mark is a difference."""
    names = {f"{stage}{ending}" for stage in STAGES for ending in (".json", ".completed.json")}
    for path in sorted((run_folder / "records").glob("*")):
        stage = path.name.removesuffix(".json")
        if path.name not in names:
            yield f"records/{path.name}: is no record of a known stage"
        elif stage in STAGES:
            try:
                record = StageRecord.load(path)
            except (EvidenceError, ValueError, KeyError) as error:
                yield f"records/{path.name}: {str(error).splitlines()[0].removeprefix(f'{path.name}: ')}"
                continue
            if record.stage != stage:
                yield f"records/{path.name}: holds the record of {record.stage}"
            records[stage] = record


def _check_clean_epochs(run_folder: Path, records: dict[str, StageRecord]) -> Iterator[str]:
    """Compare the number of clean epochs that a record claims with what the run's ledger counts under any one key."""
    ledger = Ledger(run_folder / LEDGER_NAME)
    keys = {entry.key for entry in ledger.entries() if isinstance(entry, CleanEpochs)}
    counts = {ledger.clean_epochs(key) for key in keys}
    for stage, record in records.items():
        seen = record.observations.get("clean_epochs")
        if isinstance(seen, Value) and seen.value != 0 and seen.value not in counts:
            counted = ", ".join(map(str, sorted(counts))) or "none"
            yield f"records/{stage}.json: claims {seen.value} clean epochs, {LEDGER_NAME} counts {counted}"


def _check_frozen(run_folder: Path, records: dict[str, StageRecord]) -> Iterator[str]:
    """Compare the stages with one another, and with the copies of frozen inputs, limits and baselines in the run."""
    first = next(iter(records.values()), None)
    if first is None:
        return
    for stage, record in records.items():
        for name in ("workload", "frozen_inputs_digest", "hardware_identity"):
            if getattr(record, name) != getattr(first, name):
                yield f"records/{stage}.json: {name} is {getattr(record, name)}, in {first.stage} it is {getattr(first, name)}"
    frozen = run_folder / "frozen"
    if (frozen / MANIFEST_FILE).is_file():
        digest = FrozenManifest.model_validate_json((frozen / MANIFEST_FILE).read_bytes()).digest
        if digest != first.frozen_inputs_digest:
            yield f"frozen/{MANIFEST_FILE}: its digest is {digest[:16]}, the records name {first.frozen_inputs_digest[:16]}"
    if (frozen / LIMITS_FILE).is_file():
        limits = load_limits(frozen)
        for stage, record in records.items():
            if stage in limits and record.limits != limits[stage]:
                yield f"records/{stage}.json: its limits are not those of frozen/{LIMITS_FILE}"
    for path in sorted((run_folder / "baseline").glob("*.json")):
        baseline = Baseline.model_validate_json(path.read_bytes())
        if baseline.hardware_identity != path.stem or baseline.frozen_inputs_digest != first.frozen_inputs_digest:
            yield f"baseline/{path.name}: belongs to other hardware or other frozen inputs than the records name"


def _check_summary(run_folder: Path, records: dict[str, StageRecord]) -> Iterator[str]:
    """Compare `run.json` with the records and their completion marks."""
    path = run_folder / "run.json"
    if not path.is_file():
        yield "run.json: missing; the runner did not come to its end"
        return
    summary = RunSummary.model_validate_json(path.read_bytes())
    settled = {stage: state for stage, state in summary.stages.items() if state in SETTLED}
    for stage, state in settled.items():
        yield from _check_settled(run_folder, stage, state, records.get(stage))
        given = summary.parameters.get(stage, {})
        used = records[stage].settings if stage in records else {}
        for name in sorted(given.keys() & used.keys()):
            if given[name] != used[name]:
                yield f"run.json: parameter {name} of {stage} is {given[name]!r}, the record was made with {used[name]!r}"
    if summary.complete and set(settled) != set(STAGES):
        yield f"run.json: says complete, though {', '.join(sorted(set(STAGES) - set(settled)))} did not come to an end"
    all_passed = summary.complete and set(settled.values()) == {State.PASSED.value}
    if (summary.exit_code == 0) != all_passed:
        yield f"run.json: exit code {summary.exit_code} does not go with its stages"
    if summary.stable_digest != combine_stable_digests(record for stage, record in records.items() if stage in settled):
        yield "run.json: stable_digest does not follow from the records"


def _check_settled(run_folder: Path, stage: str, state: str, record: StageRecord | None) -> Iterator[str]:
    if record is None:
        yield f"run.json: says that {stage} {state}, and there is no record of it"
        return
    if record.verdict.state != state:
        yield f"run.json: says that {stage} {state}, its record says {record.verdict.state}"
    mark = _read_json(run_folder / "records" / f"{stage}.completed.json")
    if mark.get("record_sha256") != sha256_file(run_folder / "records" / f"{stage}.json"):
        yield f"records/{stage}.completed.json: missing, or made for another record"
    elif mark.get("state") != state:
        yield f"records/{stage}.completed.json: says {mark.get('state')}, run.json says {state}"


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty where there is none; that it is missing or damaged is found by the checks."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
