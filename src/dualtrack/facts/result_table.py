"""The result table: stage x (core change, MFU, pinned peak, step latency, crash rate), each cell with interval or bound, n and change.

A cell without a figure carries the reason; a change is always against the legacy runs of the same stage and session, never against another
day's figure.
"""

import math
from collections.abc import Callable, Sequence

from dualtrack.facts.observations import Fact, Pair
from dualtrack.facts.records import CORE_CHANGE, StageRecord, Trial
from dualtrack.facts.statistics import failure_bound, mean_interval, ratio_interval
from dualtrack.facts.trial_pairs import REFERENCE_TRACKS, paired_trials, step_statistic


class Change(Fact):
    """A figure over the same figure of the reference runs."""

    ratio: float
    low: float | None = None
    """Interval of the ratio, where there are at least two pairs."""
    high: float | None = None
    num: int
    against: str
    """The reference track, `legacy` or `single`."""


class TableCell(Fact):
    """One figure of the table, or the reason why there is none."""

    value: float | None = None
    unit: str
    low: float | None = None
    """Interval of the value; for a peak the smallest value seen."""
    high: float | None = None
    """Interval of the value; for failures the exact upper bound of the rate."""
    num: int = 0
    counted: str
    """What `num` counts: `runs` or `processes`."""
    change: Change | None = None
    reason: str | None = None

    def in_words(self) -> str:
        """Return the cell as text with its interval or bound, n and change, for a notebook."""
        if self.value is None:
            return f"not measured: {self.reason}"
        if self.counted == "processes":
            return f"{self.value:.0f} of {self.num}, at most {100 * (self.high or 0):.1f} %"
        text = _figure(self.value, self.unit)
        if self.low is not None and self.high is not None and self.low != self.high:
            text += f" ({_figure(self.low, self.unit)} to {_figure(self.high, self.unit)})"
        text += f", n={self.num}"
        if self.change is not None:
            spread = "" if self.change.low is None else f" ({self.change.low:.3g} to {self.change.high:.3g})"
            text += f", x{self.change.ratio:.3g}{spread} {self.change.against}"
        return text


class TableRow(Fact):
    """One stage of the table; stage 3 has one row a world size."""

    stage: str
    core_change: str
    track: str
    world_size: int
    device: str
    mfu: TableCell
    pinned_peak: TableCell
    step_latency: TableCell
    crash_rate: TableCell

    def in_words(self) -> dict[str, str]:
        """Return the row as text, by column."""
        ranks = f", {self.world_size} ranks" if self.world_size > 1 else ""
        return {
            "stage": f"{self.stage}{ranks}", "core change": self.core_change, "MFU": self.mfu.in_words(),
            "pinned peak": self.pinned_peak.in_words(), "step latency": self.step_latency.in_words(), "crash rate": self.crash_rate.in_words(),
        }  # fmt: skip


def row_of_stage(record: StageRecord, track: str, world_size: int) -> TableRow:
    """Compute one row from a record's raw trials."""
    mine = [trial for trial in record.trials if trial.track == track and trial.world_size == world_size]
    timed = [trial for trial in mine if trial.block in ("paired", "noise floor") and trial.step_seconds]
    return TableRow(
        stage=record.stage, core_change=CORE_CHANGE[record.stage], track=track, world_size=world_size, device=record.device,
        mfu=_averaged(record, timed, _mfu, "fraction", _mfu_reason(mine)),
        pinned_peak=_peak(record, mine),
        step_latency=_averaged(record, timed, lambda trial: step_statistic(trial, "p50"), "s", f"no timed {track} run was completed"),
        crash_rate=_crashes(mine, track),
    )  # fmt: skip


def _averaged(
    record: StageRecord, timed: Sequence[Trial], value_of: Callable[[Trial], float | None], unit: str, reason: str
) -> TableCell:
    """Average one value a run; from two runs on with a t interval on the logarithms."""
    values = [value for value in map(value_of, timed) if value is not None and value > 0 and math.isfinite(value)]
    if not values:
        return TableCell(unit=unit, counted="runs", reason=reason)
    change = _change(record, timed[0], value_of)
    if len(values) < 2:
        return TableCell(value=values[0], unit=unit, num=1, counted="runs", change=change)
    mean = mean_interval(values)
    return TableCell(
        value=mean.ratio, low=mean.low, high=mean.high, unit=unit, num=len(values), counted="runs", change=change
    )


def _change(record: StageRecord, like: Trial, value_of: Callable[[Trial], float | None]) -> Change | None:
    if like.track in REFERENCE_TRACKS:
        return None
    pairs, against = [], ""
    for legacy, candidate in paired_trials(record.trials, like.track, like.world_size):
        if legacy is None or not legacy.step_seconds or not candidate.step_seconds:
            continue
        before, after = value_of(legacy), value_of(candidate)
        if before and after and before > 0 and after > 0:
            pairs.append(Pair(legacy=before, candidate=after, order="legacy first"))
            against = legacy.track
    if not pairs:
        return None
    if len(pairs) == 1:
        return Change(ratio=pairs[0].candidate / pairs[0].legacy, num=1, against=against)
    found = ratio_interval(pairs)
    return Change(ratio=found.ratio, low=found.low, high=found.high, num=len(pairs), against=against)


def _mfu(trial: Trial) -> float | None:
    return trial.mfu.value if trial.mfu is not None else None


def _mfu_reason(trials: Sequence[Trial]) -> str:
    reasons = [trial.mfu.reason for trial in trials if trial.mfu is not None and trial.mfu.reason is not None]
    return reasons[0] if reasons else "no run counted its FLOPs"


def _peak(record: StageRecord, trials: Sequence[Trial]) -> TableCell:
    """Return the largest pinned peak, beside the smallest; a change is largest over largest."""
    values = _peaks(trials)
    if not values:
        reasons = [
            peak.reason
            for trial in trials
            if (peak := trial.peaks.get("pinned_peak_bytes")) is not None and peak.reason
        ]
        return TableCell(
            unit="bytes", counted="runs", reason=reasons[0] if reasons else "no run measured its pinned memory"
        )
    track = trials[0].track
    others = (
        [trial for trial in record.trials if trial.track in REFERENCE_TRACKS] if track not in REFERENCE_TRACKS else []
    )
    before = _peaks(others)
    change = (
        Change(ratio=max(values) / max(before), num=len(before), against=others[0].track)
        if before and max(before) > 0
        else None
    )
    return TableCell(
        value=max(values),
        low=min(values),
        high=max(values),
        unit="bytes",
        num=len(values),
        counted="runs",
        change=change,
    )


def _peaks(trials: Sequence[Trial]) -> list[float]:
    found = [trial.peaks.get("pinned_peak_bytes") for trial in trials]
    return [peak.value for peak in found if peak is not None and peak.value is not None]


def _crashes(trials: Sequence[Trial], track: str) -> TableCell:
    if not trials:
        return TableCell(unit="processes", counted="processes", reason=f"no {track} run was started")
    failed = sum(trial.outcome.state == "failed" for trial in trials)
    return TableCell(
        value=failed, high=failure_bound(failed, len(trials)), unit="processes", num=len(trials), counted="processes"
    )


def _figure(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "bytes":
        return f"{value / 2**20:,.1f} MiB"
    return f"{100 * value:.3g} %" if unit == "fraction" else f"{value:.3g} {unit}"
