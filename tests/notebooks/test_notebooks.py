"""The notebooks: their order and size, and their committed outputs under nbval, which really compares."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-4]_*.ipynb"))
IGNORED = "nbval-ignore-output"
# Code cells whose committed text nbval compares; a number that falls means that a comparison was lost.
NUM_COMPARED_CELLS = {
    "0_freeze_baseline": 5,
    "1_pinned_pool": 4,
    "2_stream_prefetcher": 4,
    "3_ddp_expansion": 4,
    "4_migration_report": 4,
}


def code_cells(path: Path) -> list[Any]:
    """Return the code cells of a notebook."""
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def is_compared(cell: Any) -> bool:
    """Return whether nbval compares a cell: it was executed and is not marked."""
    return cell.execution_count is not None and IGNORED not in cell.metadata.get("tags", [])


def run_nbval(path: Path) -> tuple[int, str]:
    """Run one notebook under nbval and return the number of passed cells and the output."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--nbval",
        "--nbval-current-env",
        "--nbval-cell-timeout=280",
        "--timeout=290",
        str(path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    match = re.search(r"(\d+) passed", done.stdout)
    failed = re.search(r"(\d+) failed", done.stdout)
    return (0 if failed or not match or done.returncode else int(match[1])), done.stdout + done.stderr


def test_there_are_five_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(NUM_COMPARED_CELLS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_defines_nothing(path: Path) -> None:
    cells = code_cells(path)
    assert cells[0].metadata.get("tags") == ["parameters"]
    assert "read_parameters" in cells[1].source
    for cell in cells:
        assert cell.source.count("\n") < 16
        assert not re.search(r"^(def|class|async def) ", cell.source, re.MULTILINE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_was_executed_and_no_path_of_a_machine_was_committed(path: Path) -> None:
    assert [cell.execution_count for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))
    text = path.read_text()
    assert not re.search(r"/(home|root|work|Users|tmp)/", text)
    assert json.loads(text)["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_compared_and_repeat(path: Path) -> None:
    compared = sum(is_compared(cell) for cell in code_cells(path))
    assert compared == NUM_COMPARED_CELLS[path.stem]
    num_passed, output = run_nbval(path)
    assert num_passed == len(code_cells(path)), output[-4000:]


def test_a_changed_committed_output_is_noticed(tmp_path: Path) -> None:
    source = next(path for path in NOTEBOOKS if path.stem == "4_migration_report")
    notebook = nbformat.read(source, as_version=4)
    (cell,) = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and "numeric_words" in cell.source and "print" in cell.source and is_compared(cell)
    ]
    assert "0 of" in cell.outputs[0].text
    cell.outputs[0].text = cell.outputs[0].text.replace("0 of", "1 of")
    copy = ROOT / "notebooks" / "changed_for_a_test.ipynb"
    try:
        nbformat.write(notebook, copy)
        num_passed, output = run_nbval(copy)
    finally:
        copy.unlink()
    assert num_passed == 0
    assert "1 of" in output


@pytest.mark.parametrize("folder", ["/", str(ROOT / "notebooks")])
def test_plain_papermill_runs_from_any_folder(folder: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(ROOT / "notebooks" / "4_migration_report.ipynb"),
        str(tmp_path / "out.ipynb"),
        "-p",
        "seed",
        "7",
        "-k",
        "python3",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_plain_papermill_refuses_a_misspelt_parameter(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(ROOT / "notebooks" / "1_pinned_pool.ipynb"),
        str(tmp_path / "out.ipynb"),
        "-p",
        "num_piars",
        "3",
        "-k",
        "python3",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "unknown parameter 'num_piars'; did you mean 'num_pairs'?" in done.stderr


def test_a_copied_notebook_without_its_tag_does_not_run_on_its_own_defaults(tmp_path: Path) -> None:
    """papermill puts injected values on top where no cell is tagged, and the notebook's own assignments override them: the guard must see it."""
    notebook = nbformat.read(ROOT / "notebooks" / "4_migration_report.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("tags", None)
    nbformat.write(notebook, tmp_path / "untagged.ipynb")
    from dualtrack.running.notebook_execution import require_parameters_cell

    with pytest.raises(ValueError, match="tagged 'parameters'"):
        require_parameters_cell(tmp_path / "untagged.ipynb")
