"""Figures of a migration, each with a question and its answer as title, drawn from records alone.

For each figure there is a tidy frame with exactly the plotted data: a test compares frames, a reader gets them as CSV. Nothing here needs a
display, and nothing here decides: gates do that.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from dualtrack.facts.records import Series, Trial
from dualtrack.reporting.figure_style import (
    CYCLE,
    LIMIT,
    MARKERS,
    MUTED,
    STYLE,
    TRACK_LOOK,
    ReportFigure,
    finish_panel,
    new_figure,
)
from dualtrack.reporting.figure_style import save_figure as save_figure
from dualtrack.reporting.plotted_data import memory_frame as memory_frame
from dualtrack.reporting.plotted_data import series_frame as series_frame
from dualtrack.reporting.plotted_data import step_latency_frame as step_latency_frame
from dualtrack.reporting.plotted_data import throughput_frame as throughput_frame
from dualtrack.reporting.quantities import with_binary_prefix, with_digits

REFERENCE_TRACKS = ("legacy", "single")
MAX_DRAWN_POINTS = 400  # a line; the CSV keeps every point, the page stays below 2 MB
_PANELS = {"pss": "process memory, MiB", "pool": "pool in use, MiB", "device": "device memory, MiB"}


def plot_memory(trials: Sequence[Trial], cap_bytes: int | None = None) -> ReportFigure:
    """Draw memory over the steps of every trial, legacy beside candidate, with the pool's cap as a line.

    Args:
        trials: Trials of one stage; those without memory samples are left out.
        cap_bytes: The hard cap of the pool, in bytes; None where the stage has no pool.
    """
    frame = memory_frame(trials)
    names = [name for name in _PANELS if (frame["series"] == name).any()] or ["pss"]
    with mpl.rc_context(STYLE):
        figure, panels = new_figure(_memory_title(frame, cap_bytes), len(names), 1.5 + 1.4 * len(names))
        over = "seconds" if frame["step"].isna().any() else "step"
        for name, panel in zip(names, panels, strict=True):
            _draw_memory(panel, frame[frame["series"] == name], over)
            if name == "pool" and cap_bytes is not None:
                panel.axhline(
                    cap_bytes / 2**20, color=LIMIT, linestyle="--", label=f"cap {with_binary_prefix(cap_bytes)}"
                )
            finish_panel(panel, _PANELS[name])
        panels[-1].set_xlabel("step, warm-up included" if over == "step" else "time since the first sample, s")
    return figure


def plot_throughput(trials: Sequence[Trial]) -> ReportFigure:
    """Draw each trial's throughput in order of execution, so that a drift of the machine shows; failed trials are crosses at zero."""
    frame = throughput_frame(trials)
    with mpl.rc_context(STYLE):
        figure, (panel,) = new_figure(_throughput_title(frame))
        floor = frame[(frame["block"] == "noise floor") & frame["samples_per_second"].notna()]
        if not floor.empty:
            low, high = floor["samples_per_second"].min(), floor["samples_per_second"].max()
            panel.axhspan(low, high, color=MUTED, alpha=0.18, linewidth=0, label="noise floor, range")
        for (track, block), rows in frame.groupby(["track", "block"], sort=False):
            _draw_runs(panel, rows, str(track), str(block))
        failed = frame[frame["samples_per_second"].isna()]
        if not failed.empty:
            panel.plot(
                failed["position"], [0] * len(failed), "x", color=LIMIT, markersize=8, clip_on=False, label="no figure"
            )
        panel.set_xlabel("run, in order of execution")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        finish_panel(panel, "samples per second")
    return figure


def plot_step_latency(trials: Sequence[Trial]) -> ReportFigure:
    """Draw median, 95th percentile and longest step of each trial, in order of execution."""
    frame = step_latency_frame(trials)
    with mpl.rc_context(STYLE):
        figure, (panel,) = new_figure(_latency_title(frame))
        if not frame.empty and frame["max_milliseconds"].max() > 8 * frame["p50_milliseconds"].median():
            panel.set_yscale("log")
        for track, rows in frame.groupby("track", sort=False):
            color, marker = _look(str(track))
            panel.vlines(
                rows["position"],
                rows["p50_milliseconds"],
                rows["p95_milliseconds"],
                color=color,
                linewidth=3,
                alpha=0.35,
            )
            panel.plot(rows["position"], rows["max_milliseconds"], linestyle="none", marker="_", color=color)
            panel.plot(
                rows["position"],
                rows["p50_milliseconds"],
                linestyle="none",
                marker=marker,
                color=color,
                label=str(track),
            )
        panel.set_xlabel("run, in order of execution (marker: median; bar: to the 95th percentile; dash: longest)")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        finish_panel(panel, "step, ms")
    return figure


def plot_series(series: Series) -> ReportFigure:
    """Draw a series that a stage recorded; its title is the stage's own, and bytes are drawn as MiB."""
    y_label, scale = (
        (series.y_label.replace("bytes", "MiB", 1), 2.0**-20)
        if series.y_label.startswith("bytes")
        else (series.y_label, 1.0)
    )
    with mpl.rc_context(STYLE):
        figure, (panel,) = new_figure(series.title)
        for index, (name, points) in enumerate(series.lines.items()):
            x, y = thin(np.array([point[0] for point in points]), scale * np.array([point[1] for point in points]))
            marker = MARKERS[index % len(MARKERS)] if len(points) <= 40 else ""
            style = "-" if index < len(CYCLE) else "--"
            panel.plot(x, y, style, color=CYCLE[index % len(CYCLE)], marker=marker, label=name)
        for name, bound in series.bounds.items():
            panel.axhline(scale * bound, color=LIMIT, linestyle="--", label=f"{name} {with_digits(scale * bound)}")
        crosses = [x for points in series.lines.values() for x, _ in points]
        if crosses and min(crosses) > 0 and max(crosses) > 50 * min(crosses):
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.set_xlabel(series.x_label)
        lowest = min((y for points in series.lines.values() for _, y in points), default=0.0)
        finish_panel(panel, y_label, from_zero=lowest >= 0)
    return figure


def thin(x: Any, y: Any, num_most: int = MAX_DRAWN_POINTS) -> tuple[Any, Any]:
    """Return at most `num_most` points that keep the lowest and the highest of every stretch, so that no peak is lost in a drawing."""
    if len(x) <= num_most:
        return x, y
    stretches = np.array_split(np.arange(len(x)), num_most // 2)
    kept = sorted({int(part[f]) for part in stretches for f in (np.argmin(y[part]), np.argmax(y[part]))})
    return x[kept], y[kept]


def _draw_memory(panel: Axes, frame: pd.DataFrame, over: str) -> None:
    for track, rows in frame.groupby("track", sort=False):
        color, _ = _look(str(track))
        for index, (_, samples) in enumerate(rows.groupby("trial", sort=False)):
            x, y = thin(samples[over].to_numpy(dtype="float64"), samples["bytes"].to_numpy() / 2**20)
            # the reference is drawn first and wider, so that a candidate that equals it stays visible on top
            width = 3.0 if track in REFERENCE_TRACKS else 1.4
            panel.plot(
                x,
                y,
                color=color,
                linewidth=width,
                alpha=1 if index == 0 else 0.35,
                label=str(track) if index == 0 else None,
            )


def _draw_runs(panel: Axes, rows: pd.DataFrame, track: str, block: str) -> None:
    color, marker = _look(track)
    hollow = block == "noise floor"
    panel.plot(
        rows["position"],
        rows["samples_per_second"],
        linestyle="none" if hollow or block == "extra" else ":",
        linewidth=1,
        color=color,
        marker=marker,
        markerfacecolor="none" if hollow else color,
        label=f"{track} (noise floor)" if hollow else track,
    )


def _look(track: str) -> tuple[str, str]:
    name, _, ranks = track.partition(",")
    color, marker = TRACK_LOOK.get(name, (MUTED, "X"))
    by_ranks = {" 4 ranks": (CYCLE[0], "s"), " 8 ranks": (CYCLE[2], "^"), " 32 ranks": (CYCLE[3], "D")}
    return by_ranks.get(ranks, (color, marker))


def _memory_title(frame: pd.DataFrame, cap_bytes: int | None) -> str:
    pool = frame[frame["series"] == "pool"]
    if cap_bytes is None or pool.empty:
        peaks = frame[frame["series"] == "pss"].groupby("track", sort=False)["bytes"].max()
        answer = ", ".join(f"{track} at most {with_binary_prefix(peak)}" for track, peak in peaks.items())
        return f"How much memory does a run take? {answer or 'Not measured'}"
    peak = int(pool["bytes"].max())
    word = "Yes" if peak <= cap_bytes else "No"
    return f"Does the pool stay below its cap? {word}: at most {with_binary_prefix(peak)} of {with_binary_prefix(cap_bytes)}"


def _throughput_title(frame: pd.DataFrame) -> str:
    paired = frame[(frame["block"] == "paired") & frame["samples_per_second"].notna()]
    references = paired[paired["track"].isin(REFERENCE_TRACKS)]
    reference = references.groupby("pair")["samples_per_second"].mean()
    answers = []
    for track, rows in paired[~paired["track"].isin(REFERENCE_TRACKS)].groupby("track", sort=False):
        ratios = (rows.groupby("pair")["samples_per_second"].mean() / reference).dropna()
        if len(ratios):
            answers.append(
                f"{track}: {ratios.median():.2f} x {references['track'].iloc[0]} (median of {len(ratios)} pairs)"
            )
    if answers:
        return f"How fast is each run, and does the machine drift? {'; '.join(answers)}"
    medians = frame.groupby("track", sort=False)["samples_per_second"].median().dropna()
    answer = ", ".join(f"{track} {with_digits(value)} samples/s" for track, value in medians.items())
    return f"How fast is each run, and does the machine drift? {answer or 'Not measured'}"


def _latency_title(frame: pd.DataFrame) -> str:
    medians = frame.groupby("track", sort=False)[["p50_milliseconds", "p95_milliseconds"]].median()
    parts = [f"{track} {with_digits(row.iloc[0])} / {with_digits(row.iloc[1])} ms" for track, row in medians.iterrows()]
    return f"How long is a step, typical / 95th percentile? {', '.join(parts) or 'Not measured'}"
