"""Write `index.html` of a run: one self-contained file that a reviewer opens offline, from records alone and without torch.

The same run folder gives the same bytes: no clock is read, and everything is sorted.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from pydantic import ValidationError

from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.records import STAGES, RunSummary, StageRecord
from dualtrack.reporting import quantities
from dualtrack.reporting.inline_figures import inline_svg
from dualtrack.reporting.manifest import LEDGER_NAME, MANIFEST_NAME, evidence_root
from dualtrack.reporting.page_ledger import read_ledger
from dualtrack.reporting.page_model import PageModel, build_page
from dualtrack.reporting.page_states import slug
from dualtrack.reporting.stage_figures import write_stage_figures

MAX_PAGE_BYTES = 2_000_000
_TEMPLATES = Path(__file__).parent / "templates"


def write_page(run_folder: Path) -> Path:
    """Build `index.html` from `records/*.json`, `run.json` and the ledger of a run; draw the figures that are missing.

    A run that stopped early gets its page too, marked partial. Call this before the manifest is written.

    Returns:
        The path of the page.

    Raises:
        EvidenceError: The folder holds neither a record nor a `run.json`, or the page would be larger than 2 MB.
    """
    records, unreadable = load_records(run_folder)
    summary = load_summary(run_folder)
    if not records and not unreadable and summary is None:
        raise EvidenceError(
            f"expected records/ or run.json in {run_folder.name}/, found neither; start a run with `dualtrack run`"
        )
    figures = {stage: _inlined(record, run_folder) for stage, record in records.items()}
    ended_at = max(
        [record.ended_at for record in records.values()] + ([summary.ended_at] if summary is not None else []),
        default=None,
    )
    ledger = read_ledger(run_folder / LEDGER_NAME, records, ended_at)
    model = build_page(
        records,
        summary,
        unreadable=unreadable,
        ledger=ledger,
        evidence_root=_root_or_problem(run_folder),
        folder=run_folder,
    )
    page = render_page(model, figures, _raw_files(run_folder)).encode()
    if len(page) > MAX_PAGE_BYTES:
        raise EvidenceError(
            f"expected a page of at most {MAX_PAGE_BYTES:,} bytes, got {len(page):,}; record fewer figures or trials a stage"
        )
    path = run_folder / "index.html"
    write_atomically(path, page, overwrite=True)
    return path


def load_records(run_folder: Path) -> tuple[dict[str, StageRecord], dict[str, str]]:
    """Return the records by stage, in order, and why others could not be read; one bad record does not hide the rest."""
    records, unreadable = {}, {}
    for stage in STAGES:
        path = run_folder / "records" / f"{stage}.json"
        if not path.is_file():
            continue
        try:
            records[stage] = StageRecord.load(path)
        except EvidenceError as error:
            unreadable[stage] = str(error).splitlines()[0]
    return records, unreadable


def load_summary(run_folder: Path) -> RunSummary | None:
    """Return `run.json`, or None where it is missing.

    Raises:
        EvidenceError: It is there and can't be read as a summary.
    """
    try:
        return RunSummary.model_validate_json((run_folder / "run.json").read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise EvidenceError(f"run.json is not a summary of schema 1: {error}") from error


def render_page(model: PageModel, figures: Mapping[str, list[dict[str, Any]]], raw_files: list[dict[str, str]]) -> str:
    """Return the HTML of a page model.

    Args:
        model: What the page says.
        figures: By stage: `svg` (safe markup), `title` and `data`, the address of the plotted data.
        raw_files: `label`, `address` and `kind` of the files that the page links to.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        slug=slug,
        prose=with_code_spans,
        digits=quantities.with_digits,
        time=quantities.with_time_unit,
        bytes=quantities.with_binary_prefix,
        plain_json=lambda value: json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, default=str),
        median=lambda values: sorted(values)[len(values) // 2] if values else None,
    )
    script = (_TEMPLATES / "page.js").read_text()
    script_digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("index.html.j2").render(
        page=model,
        figures=figures,
        raw_files=raw_files,
        style=Markup((_TEMPLATES / "page.css").read_text()),  # our own files
        script=Markup(script),
        script_digest=script_digest,
    )


def with_code_spans(text: str) -> Markup:
    """Return escaped text in which what stands between backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _root_or_problem(run_folder: Path) -> str:
    """Return the evidence root, after the figures were drawn; a folder without evidence, or with a link in it, says so on the page."""
    try:
        return evidence_root(run_folder)
    except EvidenceError as error:
        return f"none: {error}"


def _inlined(record: StageRecord, run_folder: Path) -> list[dict[str, Any]]:
    figures = []
    for name, (picture, title) in write_stage_figures(record, run_folder / "figures").items():
        svg = inline_svg(picture.read_text(), slug(name), f"{title}. The plotted data are in {name}.csv.")
        figures.append({"svg": svg, "title": title, "data": f"figures/{name}.csv", "picture": f"figures/{name}.svg"})
    return figures


def _raw_files(run_folder: Path) -> list[dict[str, str]]:
    """Return what the folder holds besides the page, sorted; links are relative, so that the folder can be moved."""
    kinds = (
        ("html/*.html", "executed notebook"),
        ("notebooks/*.ipynb", "notebook file"),
        ("records/*.json", "record"),
        ("figures/*.csv", "plotted data"),
        ("figures/*.svg", "figure"),
        ("baseline/*.json", "baseline"),
        ("bundles/*/*", "reproduction bundle"),
        ("run.json", "summary"),
    )
    found = [
        (kind, path.relative_to(run_folder).as_posix())
        for pattern, kind in kinds
        for path in sorted(run_folder.glob(pattern))
        if path.is_file()
    ]
    # the seal is written after the page, so its files are linked whether they are there yet or not
    found += [("seal: digest of every file", MANIFEST_NAME), ("ledger of this run", LEDGER_NAME)]
    return [{"kind": kind, "address": address} for kind, address in found]
