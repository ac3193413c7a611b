"""The figures of a stage's record, and their files: the same names for the page, for the notebooks and for the folder."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pandas as pd

from dualtrack.facts.records import StageRecord
from dualtrack.reporting import plots
from dualtrack.reporting.figure_style import ReportFigure, frame_to_csv, save_figure
from dualtrack.reporting.inline_figures import title_of


def stage_figures(record: StageRecord) -> Iterator[tuple[str, ReportFigure, pd.DataFrame]]:
    """Yield name, figure and plotted data of everything that a record can show; what it has no data for is left out."""
    for name, frame, draw in _drawings(record):
        yield name, draw(), frame


def cap_bytes_of(record: StageRecord) -> int | None:
    """Return the cap that the pools of a stage really had, as their own statistics say, or None where there was no pool."""
    caps = [trial.loader_stats.get("cap_bytes") for trial in record.trials]
    return max((cap for cap in caps if isinstance(cap, int) and cap > 0), default=None)


def write_stage_figures(record: StageRecord, folder: Path) -> dict[str, tuple[Path, str]]:
    """Write each figure as SVG and its data as CSV, and return name -> (path of the SVG, title).

    A picture whose data has not changed is kept: another version of matplotlib draws other bytes, and a finished run's digests must hold.
    """
    written = {}
    for name, frame, draw in _drawings(record):
        picture, data = folder / f"{name}.svg", folder / f"{name}.csv"
        if not (picture.is_file() and data.is_file() and data.read_text() == frame_to_csv(frame)):
            save_figure(draw(), frame, folder, name)
        written[name] = (picture, title_of(picture.read_text()))
    return written


def _drawings(record: StageRecord) -> Iterator[tuple[str, pd.DataFrame, Callable[[], ReportFigure]]]:
    """Yield name, data and how to draw it, since the data alone tell whether a picture is still right."""
    memory, cap_bytes = plots.memory_frame(record.trials), cap_bytes_of(record)
    if not memory.empty:
        if cap_bytes is not None:
            cap = pd.DataFrame(
                {"trial": ["cap"], "series": ["cap"], "bytes": [cap_bytes]}
            )  # drawn as a line, so part of the data
            memory = pd.concat([memory, cap], ignore_index=True)
        yield f"{record.stage}-memory", memory, partial(plots.plot_memory, record.trials, cap_bytes)
    throughput = plots.throughput_frame(record.trials)
    if throughput["samples_per_second"].notna().any():
        yield f"{record.stage}-throughput", throughput, partial(plots.plot_throughput, record.trials)
    latency = plots.step_latency_frame(record.trials)
    if not latency.empty:
        yield f"{record.stage}-step_latency", latency, partial(plots.plot_step_latency, record.trials)
    for key, series in sorted(record.figures.items()):
        name = f"{record.stage}-{re.sub(r'[^A-Za-z0-9_]+', '_', key)}"
        yield name, plots.series_frame(series), partial(plots.plot_series, series)
