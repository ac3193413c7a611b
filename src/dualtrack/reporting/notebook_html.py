"""Executed notebooks as pages that stay whole offline: no script, no network reference, no path of the machine, inputs folded, outputs capped.

The notebook itself remains the evidence; its page is for reading. nbconvert renders it with its `basic` template, which has no scripts.
"""

import re
from pathlib import Path
from typing import Any

import nbformat
from bs4 import BeautifulSoup
from nbconvert.exporters import HTMLExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from traitlets.config import Config

from dualtrack.facts.durable_files import write_atomically

MAX_STREAM_LINES = (
    400  # an output longer than that keeps its first and last half; 200,000 lines were 11.8 MB of HTML without a cap
)
MAX_LINE_CHARACTERS = 2000
MAX_MARKUP_CHARACTERS = 300_000  # an HTML output above that is left out, not cut: half a table misleads
MAX_OUTPUTS = 100  # of one cell
_TEMPLATES = Path(__file__).parent / "templates"
_ACTIVE_ELEMENTS = ("script", "link", "iframe", "object", "embed", "base", "form", "audio", "video", "source")
# /dev, /proc and /sys are the same everywhere and say nothing about whose machine it was
_ABSOLUTE_PATH = re.compile(
    r"(?P<kept><(?:project|source|environment|python|home|temporary)>[^\s\"']*)|(?:file://|(?<![\w.<:/~-]))/(?!dev/|proc/|sys/)(?:[\w.+@~%-]+/)+(?P<name>[\w.+@~%-]*)|(?<!\w)[A-Za-z]:\\(?:[\w .+@~-]+\\)+(?P<file>[\w.+@~-]*)"
)
_QUOTED_PATH = re.compile(r"""(?<=["'])(?:/|[A-Za-z]:\\)[^"'\n]+(?=["'])""")


def notebook_to_html(ipynb: Path, out: Path) -> None:
    """Render an executed notebook as one self-contained page; the same notebook gives the same bytes.

    Args:
        ipynb: The executed notebook; a partly executed one is rendered as far as it came.
        out: The page to write; an existing one is replaced. Its link back to the report assumes `RUN/html/STAGE.html`.
    """
    notebook: Any = nbformat.reads(ipynb.read_text(encoding="utf-8"), as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = _QUOTED_PATH.sub(lambda found: without_machine_paths(found[0]), cell.source)
            cell.outputs = _tame_outputs(cell)
    notebook.metadata.pop("widgets", None)
    config = Config(HTMLExporter={"template_name": "basic", "template_file": str(_TEMPLATES / "notebook.html.j2")})
    exporter: Any = HTMLExporter(config=config, filters={"first_line": _first_line}, exclude_anchor_links=True)
    resources = {"title": ipynb.stem, "page_css": (_TEMPLATES / "notebook.css").read_text()}
    body, _ = exporter.from_notebook_node(notebook, resources)
    write_atomically(out, _quieten(body).encode(), overwrite=True)


def without_machine_paths(text: str) -> str:
    """Return `text` with every absolute path shortened to its last part: `/home/me/run/pool.py` becomes `…/pool.py`."""
    return _ABSOLUTE_PATH.sub(lambda found: found["kept"] or f"…/{found['name'] or found['file'] or ''}", text)


def capped(text: str, num_most: int = MAX_STREAM_LINES) -> str:
    """Return `text` as a terminal would show it at the end, with the middle of a long one replaced by a note of how much is missing."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    lines = [
        line if len(line) <= MAX_LINE_CHARACTERS else f"{line[:MAX_LINE_CHARACTERS]} … ({len(line):,} characters)"
        for line in lines
    ]
    if len(lines) <= num_most:
        return "\n".join(lines)
    half = num_most // 2
    note = f"… {len(lines) - 2 * half:,} lines left out here; the notebook beside this page may hold more …"
    return "\n".join([*lines[:half], note, *lines[-half:]])


def _tame_outputs(cell: Any) -> list[Any]:
    """Join streams first, since a kernel sends 200,000 lines in thousands of pieces, then cap each output and their number."""
    preprocessor: Any = CoalesceStreamsPreprocessor()
    cell, _ = preprocessor.preprocess_cell(cell, {}, 0)
    outputs = [_tame(output) for output in cell.outputs[:MAX_OUTPUTS]]
    if len(cell.outputs) > MAX_OUTPUTS:
        text = f"… {len(cell.outputs) - MAX_OUTPUTS:,} further outputs of this cell are left out here; see the notebook …\n"
        outputs.append(nbformat.from_dict({"output_type": "stream", "name": "stdout", "text": text}))
    return outputs


def _tame(output: Any) -> Any:
    """Cap one output and take machine paths out of its text; pictures stay as they are."""
    if output.output_type == "stream":
        output.text = without_machine_paths(capped(output.text))
        return output
    if output.output_type == "error":
        output.traceback = [without_machine_paths(capped(line)) for line in output.traceback]
        return output
    data = output.data
    data.pop("application/javascript", None)
    data.pop("application/vnd.jupyter.widget-view+json", None)  # needs a script; its plain text says the same
    for kind in ("text/plain", "text/markdown", "text/latex"):
        if kind in data:
            data[kind] = without_machine_paths(capped(data[kind]))
    if "text/html" in data:
        size = len(data["text/html"])
        note = f'<p class="left-out">An output of {size:,} characters is left out here; see the notebook.</p>'
        data["text/html"] = without_machine_paths(data["text/html"]) if size <= MAX_MARKUP_CHARACTERS else note
    if "image/png" in data and "alt" not in output.metadata.get("image/png", {}):
        output.metadata.setdefault("image/png", {})["alt"] = data.get("text/plain", "figure of this cell")
    return output


def _quieten(body: str) -> str:
    """Take out whatever would run or load something, including what a cell's own HTML or Markdown brought along."""
    soup = BeautifulSoup(body, features="html.parser")
    for element in soup(list(_ACTIVE_ELEMENTS)):
        element.decompose()
    for element in soup(True):
        for name in [key for key in element.attrs if key.startswith("on")]:
            del element[name]
        for name in ("src", "srcset", "background", "poster"):
            if name in element.attrs and not str(element[name]).startswith("data:"):
                element.replace_with(f"[not shown: {element.name} from outside this page]")
                break
        if "url(" in str(element.get("style", "")):
            del element["style"]
    for element in soup("a", href=re.compile(r"^(?!#|\.\./index\.html$)")):
        address = str(element["href"])
        element.replace_with(
            f"{element.get_text()} ({without_machine_paths(address)})" if address != element.get_text() else address
        )
    return str(soup)


def _first_line(source: str) -> str:
    """Return the first line of a cell that does something, for the folded view."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("#")), lines[0] if lines else "")[:100]
