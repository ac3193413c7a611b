"""The figures of a stage's record, and their files: the same names for the page, for the notebooks and for the folder."""

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from dualtrack.facts.records import StageRecord
from dualtrack.reporting import plots
from dualtrack.reporting.figure_style import ReportFigure, frame_to_csv, save_figure


def stage_figures(record: StageRecord) -> Iterator[tuple[str, ReportFigure, pd.DataFrame]]:
    """Yield name, figure and plotted data of everything that a record can show; what it has no data for is left out."""
    memory = plots.memory_frame(record.trials)
    if not memory.empty:
        yield f"{record.stage}-memory", plots.plot_memory(record.trials, cap_bytes_of(record)), memory
    throughput = plots.throughput_frame(record.trials)
    if throughput["samples_per_second"].notna().any():
        yield f"{record.stage}-throughput", plots.plot_throughput(record.trials), throughput
    latency = plots.step_latency_frame(record.trials)
    if not latency.empty:
        yield f"{record.stage}-step_latency", plots.plot_step_latency(record.trials), latency
    for key, series in sorted(record.figures.items()):
        yield (
            f"{record.stage}-{re.sub(r'[^A-Za-z0-9_]+', '_', key)}",
            plots.plot_series(series),
            plots.series_frame(series),
        )


def cap_bytes_of(record: StageRecord) -> int | None:
    """Return the pool's cap as the stage was asked for it, or None where it has none."""
    cap = record.settings.get("cap_bytes")
    return cap if isinstance(cap, int) and not isinstance(cap, bool) else None


def write_stage_figures(record: StageRecord, folder: Path) -> dict[str, tuple[Path, str]]:
    """Write each figure as SVG and its data as CSV, and return name -> (path of the SVG, title).

    A picture whose data has not changed is kept: another version of matplotlib draws other bytes, and a finished run's digests must hold.
    """
    written = {}
    for name, figure, frame in stage_figures(record):
        picture, data = folder / f"{name}.svg", folder / f"{name}.csv"
        text = frame_to_csv(frame)
        if not (picture.is_file() and data.is_file() and data.read_text() == text):
            save_figure(figure, frame, folder, name)
        written[name] = (picture, str(figure.get_label()))
    return written
