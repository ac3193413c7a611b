"""The sequence: a stage counts by its own mark only, a failed one stops the next, and the report is built all the same."""

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from dualtrack.facts.project import Project, find_project
from dualtrack.facts.records import STAGES, RunSummary
from dualtrack.running.parameters import collect_parameters
from dualtrack.running.runner import EXIT_INCOMPLETE, WorkbookRun

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))
from example_run import write_example_run

FINISH = "import shutil\nfor ending in ('json', 'completed.json'):\n    (p := __import__('pathlib').Path(run_folder) / 'records').mkdir(exist_ok=True)\n    shutil.copy(f'example/records/{stage}.{ending}', p / f'{stage}.{ending}')"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a project whose notebooks finish with the records of an example run."""
    (tmp_path / "dualtrack.toml").write_text('workload = "digits"\n')
    write_example_run(tmp_path / "runs", "passed").rename(tmp_path / "example")
    project = find_project(tmp_path)
    project.notebooks.mkdir()
    for stage in STAGES:
        write_notebook(project, stage, FINISH)
    return project


def write_notebook(project: Project, stage: str, source: str) -> None:
    """Write a stage's notebook: parameters, then one cell."""
    parameters = new_code_cell('run_folder = ""')
    parameters.metadata["tags"] = ["parameters"]
    cells = [parameters, new_code_cell(f"stage = {stage!r}\n{source}")]
    nbformat.write(new_notebook(cells=cells), project.notebooks / f"{stage}.ipynb")


def run(project: Project, **options: Any) -> tuple[WorkbookRun, int, list[str]]:
    """Run the workbook and return it, its exit code and what it said."""
    said: list[str] = []
    workbook = WorkbookRun(project, "digits", collect_parameters([], {}), say=said.append, **options)
    return workbook, workbook.execute(), said


def summary_of(workbook: WorkbookRun) -> RunSummary:
    """Read what the runner wrote last."""
    return RunSummary.model_validate_json((workbook.folder / "run.json").read_bytes())


def test_all_stages_run_into_one_folder_with_page_and_manifest(project: Project) -> None:
    workbook, _, said = run(project)
    assert summary_of(workbook).complete
    assert set(summary_of(workbook).stages.values()) == {"passed"}
    assert (workbook.folder / "index.html").is_file()
    assert (workbook.folder / "manifest.json").is_file()
    assert said[-1].startswith("report")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed at cell 2: signal 9"),
        ("import sys; sys.exit(0)", "incomplete"),
        ("raise RuntimeError('planted')", "incomplete: RuntimeError: planted"),
        ("pass", "incomplete"),
    ],
)
def test_a_stage_without_its_mark_is_no_stage_and_stops_the_next(project: Project, source: str, words: str) -> None:
    write_notebook(project, "2_stream_prefetcher", source)
    workbook, code, _ = run(project)
    summary = summary_of(workbook)
    assert code == EXIT_INCOMPLETE
    assert not summary.complete
    assert summary.stages["2_stream_prefetcher"].startswith(words)
    assert summary.stages["3_ddp_expansion"] == "not run"
    assert (workbook.folder / "index.html").is_file()


def test_a_resumed_run_goes_on_in_its_folder_and_keeps_what_an_attempt_left(project: Project) -> None:
    write_notebook(project, "2_stream_prefetcher", "raise RuntimeError('planted')")
    first, _, _ = run(project)
    write_notebook(project, "2_stream_prefetcher", FINISH)
    again, _, _ = run(project, folder=first.folder)
    assert again.folder == first.folder
    assert summary_of(again).complete
    assert list((first.folder / "superseded").glob("*2_stream_prefetcher.ipynb"))


def test_two_runs_never_share_a_folder(project: Project) -> None:
    folders = {WorkbookRun(project, "digits", collect_parameters([], {})).folder for _ in range(3)}
    assert len(folders) == 3
