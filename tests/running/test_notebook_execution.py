"""However a notebook ends, its ending is named; and what is kept of it carries no path of this machine."""

import os
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from dualtrack.running.notebook_execution import MAX_OUTPUT_CHARACTERS, Ending, execute_notebook


def make_notebook(folder: Path, *cells: str, tagged: bool = True) -> Path:
    """Write a notebook whose first code cell holds the parameters."""
    first = new_code_cell("number = 1")
    if tagged:
        first.metadata["tags"] = ["parameters"]
    notebook = new_notebook(cells=[new_markdown_cell("# purpose"), first, *[new_code_cell(cell) for cell in cells]])
    notebook.metadata["kernelspec"] = {"name": "kernel-of-another-machine", "display_name": "x", "language": "python"}
    path = folder / "source.ipynb"
    nbformat.write(notebook, path)
    return path


def run(folder: Path, *cells: str, timeout_seconds: float = 60.0, **parameters: object) -> tuple[Ending, str]:
    """Execute a notebook of the cells and return its ending and the text of the executed file."""
    target = folder / "out" / "executed.ipynb"
    ending = execute_notebook(
        make_notebook(folder, *cells), target, parameters, root=folder, timeout_seconds=timeout_seconds
    )
    return ending, target.read_text()


def test_parameters_arrive_typed_and_the_kernel_is_this_interpreter(tmp_path: Path) -> None:
    import sys

    ending, _ = run(
        tmp_path,
        f"import sys, os\nassert (number, ramp) == (5, [0.0, 1.0]) and sys.executable == {sys.executable!r}",
        number=5,
        ramp=[0.0, 1.0],
    )
    assert ending == Ending(kind="completed")


def test_a_killed_kernel_is_named_with_cell_and_signal_within_seconds(tmp_path: Path) -> None:
    started = time.monotonic()
    ending, _ = run(tmp_path, "import os, signal", "os.kill(os.getpid(), signal.SIGKILL)", "print('never')")
    assert ending.kind == "dead kernel"
    assert ending.detail == "crashed at cell 3: signal 9 (SIGKILL)"
    assert time.monotonic() - started < 30


def test_an_error_is_named_with_its_text(tmp_path: Path) -> None:
    ending, text = run(tmp_path, "raise ValueError('expected the planted fault')", "print('never')")
    assert ending.kind == "error"
    assert "planted fault" in ending.detail
    assert "'never'" not in text.replace("print('never')", "")


def test_an_early_exit_is_no_completion_of_the_later_cells(tmp_path: Path) -> None:
    ending, text = run(tmp_path, "import sys; sys.exit(0)", "open('reached', 'w')")
    assert not (tmp_path / "reached").exists()
    assert ending.kind in (
        "error",
        "completed",
        "dead kernel",
    )  # whatever papermill makes of it: the stage's own mark is missing
    assert text


def test_a_cell_past_its_time_is_named(tmp_path: Path) -> None:
    ending, _ = run(tmp_path, "import time; time.sleep(60)", timeout_seconds=2)
    assert (ending.kind, ending.cell) == ("timeout", 2)


def test_a_notebook_without_its_parameters_tag_is_refused_before_it_starts(tmp_path: Path) -> None:
    source = make_notebook(tmp_path, "open('reached', 'w')", tagged=False)
    with pytest.raises(ValueError, match="tagged 'parameters'"):
        execute_notebook(source, tmp_path / "out.ipynb", {}, root=tmp_path, timeout_seconds=10)
    assert not (tmp_path / "out.ipynb").exists()


def test_an_executed_notebook_is_never_overwritten(tmp_path: Path) -> None:
    source, target = make_notebook(tmp_path), tmp_path / "out.ipynb"
    target.write_text("evidence")
    with pytest.raises(FileExistsError):
        execute_notebook(source, target, {}, root=tmp_path, timeout_seconds=10)
    assert target.read_text() == "evidence"


def test_200_000_printed_lines_are_capped_with_a_note(tmp_path: Path) -> None:
    ending, text = run(tmp_path, "for line in range(200_000): print('line', line)")
    assert ending.kind == "completed"
    assert len(text) < 4 * MAX_OUTPUT_CHARACTERS
    assert "characters left out" in text
    assert "line 199999" in text


def test_a_brace_in_the_path_is_no_format_field(tmp_path: Path) -> None:
    folder = tmp_path / "a{b}c"
    folder.mkdir()
    ending, _ = run(folder, "print(number)")
    assert ending.kind == "completed"


def test_what_is_kept_carries_no_path_of_this_machine(tmp_path: Path) -> None:
    _, text = run(
        tmp_path,
        "import os, sys; print(os.getcwd(), sys.prefix)",
        "import dualtrack.facts.project as p; p.find_project(os.getcwd() + '/x')",
    )
    for place in (str(tmp_path), os.sys.prefix, str(Path(__file__).parents[2])):  # type: ignore[attr-defined]
        assert place not in text
    assert "<project>" in text
    assert "<environment>" in text
