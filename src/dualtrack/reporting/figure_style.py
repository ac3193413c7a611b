"""One look for every figure: sharp on paper, readable in a dark page, told apart without colour.

Colours come from Okabe and Ito's palette, darkened until each has at least 3:1 against white; every track also has its own marker. The hex
values double as tokens: `inline_figures` replaces them by CSS variables, so a figure follows the page into dark mode.
"""

import io
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from dualtrack.facts.durable_files import write_atomically

INK, MUTED, GRID, CARD = "#1c2127", "#5b6471", "#dfe3e8", "#fffffe"
REFERENCE, CANDIDATE, SECOND, THIRD, LIMIT = "#b35900", "#0067a5", "#007a5a", "#8a4f9e", "#b3261d"
CYCLE = (CANDIDATE, REFERENCE, SECOND, THIRD, MUTED)
MARKERS = ("s", "o", "^", "D", "v")

TRACK_LOOK = {
    "legacy": (REFERENCE, "o"),
    "single": (REFERENCE, "o"),
    "pinned": (THIRD, "D"),
    "pooled": (CANDIDATE, "s"),
    "prefetched": (SECOND, "^"),
    "cached": (MUTED, "P"),
    "ddp": (CANDIDATE, "s"),
}

STYLE: Any = {
    "svg.hashsalt": "dualtrack",  # element ids follow from the content, so equal data gives equal bytes
    "svg.fonttype": "none",  # text stays text: small, searchable, read aloud, drawn in the page's own font
    "font.family": ["DejaVu Sans"],  # ships with matplotlib, so the layout is the same on every machine
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": CARD,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "figure.facecolor": CARD,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "path.simplify": True,
}


class ReportFigure(Figure):
    """A figure that shows itself in a notebook without pyplot; its label is its title, which also serves as alternative text."""

    def __repr__(self) -> str:
        """Return the title: stable text beside the picture in a saved notebook."""
        return f"Figure: {self.get_label()}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw at twice the screen's resolution for a notebook, with the title as alternative text."""
        width, height = (int(inches * 96) for inches in self.get_size_inches())
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            FigureCanvasAgg(self).print_figure(buffer, dpi=192, format="png")
        details = {"width": width, "height": height, "alt": str(self.get_label())}
        return {"image/png": buffer.getvalue(), "text/plain": repr(self)}, {"image/png": details}


def new_figure(title: str, num_panels: int = 1, height_inches: float = 3.3) -> tuple[ReportFigure, list[Axes]]:
    """Return an empty figure of the house style and its panels, top to bottom, which share the x axis."""
    figure = ReportFigure(figsize=(6.4, height_inches), layout="constrained")
    figure.set_label(title)
    figure.suptitle(textwrap.fill(title, 72), x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    return figure, list(panels)


def finish_panel(panel: Axes, y_label: str, from_zero: bool = True) -> None:
    """Label a panel, put its legend above the data and let the y axis begin at zero, so that a small change looks small."""
    panel.set_ylabel(y_label)
    if from_zero and panel.get_yscale() == "linear":
        panel.set_ylim(bottom=0, top=max(panel.get_ylim()[1], 1e-9) * 1.04)
    if panel.get_yscale() == "linear":
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    if not panel.has_data():
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", va="center", color=MUTED)
    handles, labels = panel.get_legend_handles_labels()
    if handles:
        panel.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2, handlelength=1.8
        )


def save_figure(figure: Figure, frame: pd.DataFrame, folder: Path, name: str) -> tuple[Path, Path]:
    """Write `name.svg` and, beside it, the plotted data as `name.csv`; equal data gives equal bytes, and there is no date in them.

    Returns:
        The paths of the SVG and of the CSV.
    """
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        FigureCanvasSVG(figure).print_figure(
            buffer, format="svg", metadata={"Title": str(figure.get_label()), "Date": None, "Creator": None}
        )
    picture, data = folder / f"{name}.svg", folder / f"{name}.csv"
    write_atomically(data, frame_to_csv(frame).encode(), overwrite=True)
    write_atomically(picture, buffer.getvalue().encode(), overwrite=True)
    return picture, data


def frame_to_csv(frame: pd.DataFrame) -> str:
    """Return the plotted data as CSV, nine significant digits."""
    return frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")
