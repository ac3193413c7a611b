"""Execute one notebook with papermill in a kernel of this interpreter, and say truthfully how it ended.

papermill marks every cell "completed" when a kernel dies; here the cell and the signal are named, and completion is judged elsewhere by
the stage's own mark. Outputs are capped and machine paths taken out before anything is kept.
"""

import contextlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbclient.util import run_sync
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from traitlets.config import Config

from dualtrack.facts.durable_files import write_atomically

KERNEL_NAME = "dualtrack-own-interpreter"
MAX_OUTPUT_CHARACTERS = 100_000
# sockets in the file system: no port to race for, nothing on the network
KERNEL_CONFIG = Config({"ConnectionFileMixin": {"transport": "ipc"}})


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a notebook's execution ended: `completed`, `error`, `timeout`, `dead kernel` or `interrupted`."""

    kind: str
    cell: int | None = None
    detail: str = ""


def execute_notebook(
    source: Path, target: Path, parameters: dict[str, Any], *, root: Path, timeout_seconds: float
) -> Ending:
    """Execute `source` with `parameters` into `target`.

    Args:
        source: The notebook; it is not changed.
        target: Where the executed notebook goes; must not exist yet.
        parameters: Typed values; injected after the cell tagged `parameters`.
        root: Working directory of the kernel.
        timeout_seconds: Longest that one cell may run.

    Raises:
        FileExistsError: `target` is there already; evidence is never overwritten.
        ValueError: `source` has no cell tagged `parameters`, so injected values would silently be ignored.
    """
    if target.exists():
        raise FileExistsError(f"expected no {target.name} yet, found one; choose another run folder")
    require_parameters_cell(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    client = _watching_engine()
    with _own_kernel(), _quiet():
        import papermill

        ending = Ending(kind="completed")
        try:
            papermill.execute_notebook(
                _escaped(source), _escaped(target), parameters=parameters, kernel_name=KERNEL_NAME, language="python", engine_name=client.name, cwd=str(root),
                progress_bar=False, execution_timeout=int(timeout_seconds), start_timeout=120, autosave_cell_every=0,
            )  # fmt: skip
        except papermill.PapermillExecutionError as error:
            ending = Ending(kind="error", cell=error.cell_index, detail=f"{error.ename}: {error.evalue}")
        except CellTimeoutError:
            ending = Ending(
                kind="timeout", cell=client.cell, detail=f"cell {client.cell} ran longer than {timeout_seconds:.0f} s"
            )
        except DeadKernelError:
            ending = Ending(
                kind="dead kernel", cell=client.cell, detail=f"crashed at cell {client.cell}: {client.death()}"
            )
        except KeyboardInterrupt:
            ending = Ending(kind="interrupted", cell=client.cell, detail=f"interrupted in cell {client.cell}")
    if target.exists():
        clean_notebook(target, root)
    return ending


def store_default_outputs(notebook: Path, root: Path) -> Ending:
    """Run a notebook on its own defaults and store its outputs in place, without the marks that papermill leaves; nbval compares with them."""
    with tempfile.TemporaryDirectory(prefix="dualtrack-notebook-") as scratch:
        executed = Path(scratch) / notebook.name
        ending = execute_notebook(notebook, executed, {}, root=root, timeout_seconds=600.0)
        if ending.kind != "completed":
            return ending
        content = nbformat.read(executed, as_version=4)
    content.metadata.pop("papermill", None)
    content.metadata["language_info"] = {"name": "python"}
    for cell in content.cells:
        for mark in ("papermill", "execution"):
            cell.metadata.pop(mark, None)
        if not cell.metadata.get("tags"):
            cell.metadata.pop("tags", None)
    write_atomically(notebook, nbformat.writes(content).encode() + b"\n", overwrite=True)
    return ending


def require_parameters_cell(source: Path) -> None:
    """Check that the first code cell is tagged `parameters`.

    Raises:
        ValueError: It is not; papermill would put its values where the notebook overrides them.
    """
    cells = [cell for cell in nbformat.read(source, as_version=4).cells if cell.cell_type == "code"]
    if not cells or "parameters" not in cells[0].metadata.get("tags", []):
        raise ValueError(
            f"{source.name}: expected the first code cell to be tagged 'parameters'; put the tag back, else no value reaches the notebook"
        )


def clean_notebook(path: Path, root: Path) -> None:
    """Cap long outputs with a note and take machine paths out of an executed notebook, in place."""
    notebook = nbformat.read(path, as_version=4)
    join_streams = CoalesceStreamsPreprocessor()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            join_streams.preprocess_cell(cell, {}, 0)  # a kernel sends many lines in thousands of pieces
            for output in cell.outputs:
                _cap(output)
    papermill_block = notebook.metadata.get("papermill", {})
    for key in ("input_path", "output_path"):
        if papermill_block.get(key):
            papermill_block[key] = Path(papermill_block[key]).name
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    text = nbformat.writes(notebook)
    write_atomically(path, without_machine_paths(text, root).encode(), overwrite=True)


def without_machine_paths(text: str, root: Path) -> str:
    """Replace the folders of this machine by what they are, longest first."""
    places = {
        str(root): "<project>", str(Path(__file__).resolve().parents[2]): "<source>", sys.prefix: "<environment>", sys.base_prefix: "<python>",
        str(Path.home()): "<home>", tempfile.gettempdir(): "<temporary>",
    }  # fmt: skip
    for place in sorted(places, key=len, reverse=True):
        if len(place) > 1:
            text = re.sub(re.escape(place) + r"(?=[/\\\"'\s:,)\]]|$)", places[place], text)
    return text


def _cap(output: Any) -> None:
    texts = (
        [(output, "text")]
        if output.output_type == "stream"
        else [(output.get("data", {}), key) for key in ("text/plain", "text/html")]
    )
    for holder, key in texts:
        text = holder.get(key)
        if isinstance(text, str) and len(text) > MAX_OUTPUT_CHARACTERS:
            half, dropped = MAX_OUTPUT_CHARACTERS // 2, len(text) - MAX_OUTPUT_CHARACTERS
            holder[key] = (
                f"{text[:half]}\n[... {dropped:,} characters left out: outputs are capped at {MAX_OUTPUT_CHARACTERS:,} ...]\n{text[-half:]}"
            )


def _escaped(path: Path) -> str:
    """Double the braces: papermill takes both paths as format strings."""
    return str(path).replace("{", "{{").replace("}", "}}")


@contextlib.contextmanager
def _own_kernel() -> Iterator[None]:
    """Offer a kernel of this very interpreter under a name of our own, whatever kernels the machine has."""
    before = os.environ.get("JUPYTER_PATH")
    with tempfile.TemporaryDirectory(prefix="dualtrack-kernel-") as folder:
        spec = Path(folder) / "kernels" / KERNEL_NAME / "kernel.json"
        spec.parent.mkdir(parents=True)
        argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "dualtrack", "language": "python"}))
        os.environ["JUPYTER_PATH"] = folder if not before else f"{folder}{os.pathsep}{before}"
        try:
            yield
        finally:
            if before is None:
                del os.environ["JUPYTER_PATH"]
            else:
                os.environ["JUPYTER_PATH"] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep papermill's and the kernel's own chatter out of the terminal; what matters comes back as an `Ending`."""
    logger = logging.getLogger("papermill")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


class _Watch:
    """What the engine saw of the running notebook: the current cell, and how the kernel died."""

    def __init__(self) -> None:
        self.name, self.cell, self.exit_code = "dualtrack", None, None  # type: tuple[str, int | None, int | None]

    def death(self) -> str:
        if self.exit_code is None:
            return "the kernel died"
        if self.exit_code < 0:
            return f"signal {-self.exit_code} ({signal.Signals(-self.exit_code).name})"
        return f"the kernel exited with {self.exit_code}"


def _watching_engine() -> Any:
    """Register a papermill engine that notes the running cell and the exit code of a dead kernel; return its notes."""
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine, papermill_engines

    watch = _Watch()

    class WatchedClient(PapermillNotebookClient):  # type: ignore[misc]
        def execute_cell(self, cell: Any, cell_index: int, *args: Any, **keywords: Any) -> Any:
            watch.cell = cell_index
            return super().execute_cell(cell, cell_index, *args, **keywords)

        def papermill_execute_cells(self) -> None:
            try:
                super().papermill_execute_cells()
            except DeadKernelError:
                watch.exit_code = run_sync(self.km.provisioner.poll)()
                raise

    class WatchedEngine(NBClientEngine):  # type: ignore[misc]
        @classmethod
        def execute_managed_notebook(
            cls, nb_man: Any, kernel_name: str, *, start_timeout: int = 60, execution_timeout: Any = None, **rest: Any
        ) -> Any:
            client = WatchedClient(
                nb_man,
                timeout=execution_timeout,
                startup_timeout=start_timeout,
                kernel_name=kernel_name,
                config=KERNEL_CONFIG,
            )
            return client.execute()

    papermill_engines.register(watch.name, WatchedEngine)
    return watch
