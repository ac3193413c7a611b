"""The result table as the page shows it: stage x (core change, MFU, pinned peak, step latency, crash rate), in words.

The figures come from `facts.derivations.table_rows`, which `verify` and the notebooks use too; here they only get their words.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dualtrack.facts.derivations import table_rows
from dualtrack.facts.records import CORE_CHANGE, StageRecord
from dualtrack.facts.result_table import TableCell, TableRow
from dualtrack.reporting.page_states import GATED_STAGES, TITLES, StageStatus
from dualtrack.reporting.quantities import range_beside, with_digits, with_unit

WIDEST_SHOWN = 100
METRICS = ("MFU", "Pinned peak", "Step latency", "Crash rate")


@dataclass(frozen=True, kw_only=True)
class ResultCell:
    """One figure with what a reader needs to weigh it, or the reason why there is none."""

    metric: str
    value: str | None = None
    spread: str = ""
    """Interval or bound of the value."""
    num: str = ""
    change: str = ""
    """Ratio against the reference runs of the same session, with its interval."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One stage of the table, or one rung of stage 3."""

    stage: str
    title: str
    core_change: str
    is_last_rung: bool
    """False for a rung of stage 3 that a larger one follows; the first screen shows the largest."""
    cells: tuple[ResultCell, ...]


def result_rows(records: Mapping[str, StageRecord], statuses: tuple[StageStatus, ...]) -> tuple[ResultRow, ...]:
    """Return the rows, baseline first; a stage without a record says why it has no figures."""
    found = table_rows(list(records.values()))
    states = {status.stage: status.state for status in statuses}
    rows: list[ResultRow] = []
    for stage in GATED_STAGES:
        mine = [row for row in found if row.stage == stage]
        rows += [_row(row, is_last_rung=row is mine[-1]) for row in mine]
        if not mine:
            cells = tuple(ResultCell(metric=metric, reason=states.get(stage, "not run")) for metric in METRICS)
            rows.append(
                ResultRow(
                    stage=stage, title=TITLES[stage], core_change=CORE_CHANGE[stage], is_last_rung=True, cells=cells
                )
            )
    return tuple(rows)


def _row(row: TableRow, is_last_rung: bool) -> ResultRow:
    ranks = f", {row.world_size} ranks" if row.world_size > 1 else ""
    figures = (row.mfu, row.pinned_peak, row.step_latency, row.crash_rate)
    cells = tuple(_cell(metric, cell) for metric, cell in zip(METRICS, figures, strict=True))
    title = f"{TITLES[row.stage]}{ranks}"
    return ResultRow(stage=row.stage, title=title, core_change=row.core_change, is_last_rung=is_last_rung, cells=cells)


def _cell(metric: str, cell: TableCell) -> ResultCell:
    if cell.value is None:
        return ResultCell(metric=metric, reason=f"not measured: {cell.reason}")
    if cell.counted == "processes":
        bound = f"at most {with_digits(100 * cell.high)} %" if cell.high is not None else ""
        return ResultCell(metric=metric, value=f"{cell.value:.0f} of {cell.num:,}", spread=bound, num="fresh processes")
    spread = _interval(cell.low, cell.high, cell.value, cell.unit)
    num, change = f"n = {cell.num:,} {cell.counted if cell.num != 1 else cell.counted.removesuffix('s')}", ""
    if cell.change is not None:
        change = with_digits(cell.change.ratio)
        if cell.change.low is not None and cell.change.high is not None:
            change += f" ({_interval(cell.change.low, cell.change.high, cell.change.ratio, '')})"
            num = f"n = {cell.change.num:,} pairs"
    return ResultCell(metric=metric, value=with_unit(cell.value, cell.unit), spread=spread, num=num, change=change)


def _interval(low: float | None, high: float | None, value: float, unit: str) -> str:
    """Return an interval beside its value; two noisy runs can give one over many orders of magnitude, which says only that."""
    if low is None or high is None:
        return "no interval"
    if low > 0 and high / low > WIDEST_SHOWN:
        return f"interval over {WIDEST_SHOWN}-fold"
    return range_beside(low, high, value, unit)
