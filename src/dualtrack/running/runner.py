"""Run the stage notebooks in sequence into one folder, stop at the first failed gate, and still build the report.

A stage counts as done when its own completion mark agrees with its record; what papermill says of a notebook is not evidence.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dualtrack.facts.derivations import combine_stable_digests
from dualtrack.facts.digests import sha256_file
from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.frozen_inputs import LIMITS_FILE, MANIFEST_FILE, load_manifest
from dualtrack.facts.observations import State
from dualtrack.facts.project import Project
from dualtrack.facts.records import STAGES, RunSummary, StageRecord
from dualtrack.reporting.manifest import write_manifest
from dualtrack.reporting.notebook_html import notebook_to_html
from dualtrack.reporting.report_page import write_page
from dualtrack.running.notebook_execution import Ending, execute_notebook
from dualtrack.running.parameters import SETTINGS

EXIT_PASSED, EXIT_FAILED, EXIT_USAGE, EXIT_UNDECIDED, EXIT_INCOMPLETE = 0, 1, 2, 3, 4
NOT_RUN = "not run"
SETTLED = {state.value for state in State}
PROGRESS_SECONDS = 15.0


class WorkbookRun:
    """One run of the workbook: its folder, its parameters, and how far it came."""

    def __init__(self, project: Project, workload: str, parameters: Mapping[str, Mapping[str, Any]], *, folder: Path | None = None,
                 stage_timeout_seconds: float = 3600.0, say: Callable[[str], None] = print) -> None:  # fmt: skip
        """Prepare a run in a new folder, or go on in `folder`; nothing is started.

        Args:
            project: Where notebooks, frozen inputs and reports are.
            workload: Reference of the workload.
            parameters: Validated parameters by stage.
            folder: An earlier run's folder to resume.
            stage_timeout_seconds: Longest that one cell of a stage may run.
            say: Takes one line of progress.
        """
        self.project, self.workload, self.say = project, workload, say
        # every setting is passed, so that a run does not take the notebooks' small defaults
        self.parameters = {
            stage: SETTINGS[stage].parse(dict(values)).model_dump(mode="json") for stage, values in parameters.items()
        }
        self.stage_timeout_seconds = stage_timeout_seconds
        self.is_resumed = folder is not None
        self.folder = (
            folder
            if folder is not None
            else project.new_run_folder(workload.rpartition(":")[0].rpartition(".")[2] or workload)
        )
        self.started_at = datetime.now(UTC)
        self.states = dict.fromkeys(STAGES, NOT_RUN)
        self.seconds: dict[str, float] = {}

    def execute(self, stages: Sequence[str] = STAGES) -> int:
        """Run the stages, build the page and the manifest, print a summary, and return the exit code."""
        self._write_summary(complete=False)
        stopped = ""
        for place, stage in enumerate(stages, 1):
            if stopped and stage != STAGES[-1]:
                continue
            if self.is_resumed and self._keep_finished(stage):
                continue
            self.states[stage] = self._run_stage(stage, f"[{place}/{len(stages)}]")
            if self.states[stage] not in (State.PASSED, State.INCONCLUSIVE, State.NOT_MEASURED):
                stopped = stage
            if self.states[stage].startswith("interrupted"):
                break
        complete = all(self.states[stage] in SETTLED for stage in stages) and tuple(stages) == STAGES
        summary = self._write_summary(complete)
        self._keep_frozen_facts()
        self._build_pages()
        self._conclude(summary, stopped)
        return summary.exit_code

    def _run_stage(self, stage: str, place: str) -> str:
        source = self.project.notebooks / f"{stage}.ipynb"
        target = self.folder / "notebooks" / source.name
        self._set_aside(stage)
        relative = self.folder.relative_to(self.project.root).as_posix()
        started = time.monotonic()
        with self._progress(f"{place} {stage}"):
            ending = execute_notebook(
                source,
                target,
                {**self.parameters[stage], "run_folder": relative},
                root=self.project.root,
                timeout_seconds=self.stage_timeout_seconds,
            )
        self.seconds[stage] = round(time.monotonic() - started, 3)
        state = self._state_after(stage, ending)
        self.say(
            f"{place} {stage}: {state} in {self.seconds[stage]:.0f} s"
            + (f"\n      {ending.detail}" if ending.detail else "")
        )
        return state

    def _state_after(self, stage: str, ending: Ending) -> str:
        """Believe the stage's own completion mark; without it the stage is incomplete, whatever papermill says."""
        try:
            return read_finished(self.folder, stage).verdict.state.value
        except EvidenceError as error:
            if ending.kind in ("dead kernel", "timeout", "interrupted"):
                return ending.detail
            return f"incomplete: {ending.detail or error}"[:400]

    def _keep_finished(self, stage: str) -> bool:
        """Keep a finished stage of the run being resumed if nothing that it rests on has changed."""
        try:
            record = read_finished(self.folder, stage)
            frozen = load_manifest(self.project.frozen_folder(record.workload))
        except EvidenceError as error:
            self.say(f"{stage}: runs again ({error})")
            return False
        settings = SETTINGS[stage].parse(self.parameters[stage])
        changed = [
            name
            for name, before, now in (
                ("its settings", record.settings_digest, settings.digest()),
                ("the workload", record.workload, self.workload),
                ("the code", record.conditions.get("before", {}).get("sources"), current_sources(record)),
                ("the frozen inputs", record.frozen_inputs_digest, frozen.digest),
            )
            if before != now
        ]
        if changed or record.verdict.state in (State.FAILED, State.TOOL_ERROR):
            self.say(
                f"{stage}: runs again ({' and '.join(changed)} changed)"
                if changed
                else f"{stage}: runs again (it had not passed)"
            )
            return False
        self.states[stage] = record.verdict.state.value
        self.say(f"{stage}: kept, {self.states[stage]} (verified)")
        return True

    def _set_aside(self, stage: str) -> None:
        """Move what an earlier attempt at this stage left to `superseded/`; nothing is overwritten."""
        leftovers = [
            *self.folder.glob(f"records/{stage}.*"),
            *self.folder.glob(f"notebooks/{stage}.ipynb"),
            *self.folder.glob(f"figures/{stage}*"),
        ]
        for path in leftovers:
            kept = self.folder / "superseded" / f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%fZ')}-{path.name}"
            kept.parent.mkdir(exist_ok=True)
            shutil.move(path, kept)

    @contextmanager
    def _progress(self, label: str) -> Iterator[None]:
        """Say every few seconds that the stage is still at work, and for how long."""
        done, started = threading.Event(), time.monotonic()

        def report() -> None:
            while not done.wait(PROGRESS_SECONDS):
                self.say(f"{label}: running, {time.monotonic() - started:.0f} s")

        self.say(f"{label}: started")
        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _write_summary(self, complete: bool) -> RunSummary:
        records = [read_finished(self.folder, stage) for stage, state in self.states.items() if state in SETTLED]
        summary = RunSummary(
            run=self.folder.name, workload=self.workload, started_at=self.started_at, ended_at=datetime.now(UTC), stages=self.states,
            seconds=self.seconds, complete=complete, exit_code=self._exit_code(complete), parameters=self.parameters,
            stable_digest=combine_stable_digests(records),
        )  # fmt: skip
        write_atomically(self.folder / "run.json", summary.model_dump_json(indent=1).encode(), overwrite=True)
        return summary

    def _exit_code(self, complete: bool) -> int:
        states = set(self.states.values())
        if states & {State.FAILED.value, State.TOOL_ERROR.value}:
            return EXIT_FAILED
        if not complete:
            return EXIT_INCOMPLETE
        return EXIT_UNDECIDED if states & {State.INCONCLUSIVE.value, State.NOT_MEASURED.value} else EXIT_PASSED

    def _keep_frozen_facts(self) -> None:
        """Copy manifest and limits into the run, so that it can be verified without the project."""
        source = self.project.frozen_folder(self.workload)
        for name in (MANIFEST_FILE, LIMITS_FILE):
            if (source / name).is_file():
                write_atomically(self.folder / "frozen" / name, (source / name).read_bytes(), overwrite=True)

    def _build_pages(self) -> None:
        for notebook in sorted((self.folder / "notebooks").glob("*.ipynb")):
            notebook_to_html(notebook, self.folder / "html" / f"{notebook.stem}.html")
        write_page(self.folder)

    def _conclude(self, summary: RunSummary, stopped: str) -> None:
        manifest_digest = write_manifest(self.folder)
        total = sum(self.seconds.values())
        relative = self.folder.relative_to(self.project.root).as_posix()
        self.say("")
        for stage, state in self.states.items():
            share = f"{self.seconds[stage]:6.1f} s" if stage in self.seconds else "       -"
            self.say(f"  {stage:<22}{share}  {state}")
        self.say(f"  {'together':<22}{total:6.1f} s")
        if stopped:
            self.say(f"Stopped at {stopped}; later stages were not run. The page says what failed and what to do.")
        elif summary.exit_code == EXIT_INCOMPLETE:
            self.say("The run is partial.")
        self.say(f"stable digest   {summary.stable_digest}")
        self.say(f"verify with     dualtrack verify {relative}")
        self.say(f"manifest        {manifest_digest}")
        self.say(f"report          {relative}/index.html")


def read_finished(folder: Path, stage: str) -> StageRecord:
    """Return the record of a stage whose completion mark agrees with it.

    Raises:
        EvidenceError: The stage left no mark, or the record changed after it was marked.
    """
    mark_path, record_path = folder / "records" / f"{stage}.completed.json", folder / "records" / f"{stage}.json"
    if not mark_path.is_file():
        raise EvidenceError(f"{stage} left no completion mark: it did not come to its end")
    if not record_path.is_file() or json.loads(mark_path.read_bytes()).get("record_sha256") != sha256_file(record_path):
        raise EvidenceError(f"the record of {stage} is not the one that its completion mark names")
    return StageRecord.load(record_path)


def current_sources(record: StageRecord) -> Any:
    """Return digests of the source files that a record names, as they are now."""
    before = record.conditions.get("before", {}).get("sources")
    if not isinstance(before, dict):
        return before
    package = Path(__file__).resolve().parents[1]
    return {name: _digest_or_none(package, name) for name in before}


def _digest_or_none(package: Path, name: str) -> str | None:
    for base in (package, package.parent):
        if (base / name).is_file():
            return sha256_file(base / name)
    return None
