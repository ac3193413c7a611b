"""The data behind stage 3's figures: layout, gradient errors, curves, scaling, memory."""

import math
import statistics
from collections.abc import Mapping, Sequence

from dualtrack.facts.line_judges import judge_observation
from dualtrack.facts.records import Series, StageRecord, Trial
from dualtrack.stages.expansion_curves import loss_band, mean_losses
from dualtrack.stages.expansion_rung import Rung
from dualtrack.training.gradient_buckets import BucketLayout

CPU_NOTE = "CPU, gloo: shows this box's scheduler, says nothing about GPUs"


def rung_figures(rungs: Mapping[int, Rung], tolerances: Mapping[str, float], widening: float) -> dict[str, Series]:
    """Return the figures of the verified rungs."""
    if not rungs:
        return {}
    largest = rungs[max(rungs)]
    return {
        "bucket_layout": bucket_figure(rungs),
        "gradient_error": gradient_figure(rungs, tolerances),
        "loss_curves": curve_figure(largest, rungs, widening),
        "memory_per_rank": memory_figure(rungs),
    }


def rung_rows(record: StageRecord) -> list[dict[str, str]]:
    """Return the checks of every rung as words, one row a check and one column a world size, for a notebook's table."""
    rows: dict[str, dict[str, str]] = {}
    limits = {limit.observation: limit for limit in record.limits}
    for key, seen in record.observations.items():
        check, separator, rung = key.rpartition("_at_")
        if separator and rung.endswith("_ranks") and check in limits:
            judged = judge_observation(seen, limits[check])
            rows.setdefault(check, {"check": check})[rung.replace("_", " ")] = (
                f"{judged.state.value}: {judged.statistic}"
            )
    return list(rows.values())


def bucket_figure(rungs: Mapping[int, Rung]) -> Series:
    """Return bytes by bucket, predicted and as each rung built them."""
    first = next(iter(rungs.values()))
    lines = {"predicted": _bucket_points(first.legacy.predicted_layouts[0])}
    for size, rung in rungs.items():
        if rung.results[0]["layout"] is not None:
            lines[f"built by {size} ranks"] = _bucket_points(BucketLayout.model_validate(rung.results[0]["layout"]))
    return Series(
        title="Did DDP build the buckets that the cap predicts?",
        x_label="bucket, in order of reduction",
        y_label="bytes",
        lines=lines,
    )


def gradient_figure(rungs: Mapping[int, Rung], tolerances: Mapping[str, float]) -> Series:
    """Return the norm-wise error of each parameter's gradient, the largest over rungs and batches; a logarithm has no place for zero."""
    lines = {precision: _error_points(list(rungs.values()), precision) for precision in ("float32", "float64")}
    return Series(
        title="How far are averaged gradients from the legacy ones, on the worst rung?", x_label="parameter, in order of registration",
        y_label="relative error, log10", lines={name: points for name, points in lines.items() if points},
        bounds={name: math.log10(value) for name, value in tolerances.items()},
    )  # fmt: skip


def curve_figure(largest: Rung, rungs: Mapping[int, Rung], widening: float) -> Series:
    """Return each rung's float32 loss less the single process's, with the band of the permuted reruns."""
    base = largest.single["curve32"]["losses"]
    lines = {}
    for size, rung in rungs.items():
        lines[f"{size} ranks"] = tuple(
            (float(step), loss - base[step]) for step, loss in enumerate(mean_losses(rung.results, "curve32"))
        )
    num_steps = max(len(points) for points in lines.values())
    band = loss_band(largest.single, widening)[:num_steps]
    lines["band, low"] = tuple((float(step), low - room - base[step]) for step, (low, _, room) in enumerate(band))
    lines["band, high"] = tuple((float(step), high + room - base[step]) for step, (_, high, room) in enumerate(band))
    return Series(
        title="Do float32 losses stay in the band of permuted single-process reruns?",
        x_label="step",
        y_label="loss less the single process's",
        lines=lines,
    )


def memory_figure(rungs: Mapping[int, Rung]) -> Series:
    """Return the proportional set size of a rank by world size."""
    points = {
        "median rank": tuple((float(size), statistics.median(_pss(rung))) for size, rung in rungs.items()),
        "all ranks": tuple((float(size), float(sum(_pss(rung)))) for size, rung in rungs.items()),
    }
    return Series(title="What does a rank weigh?", x_label="ranks", y_label="bytes (PSS)", lines=points)


def scaling_figure(trials: Sequence[Trial], is_claim: bool) -> Series | None:
    """Return samples per second by world size from the timed launches, with the line of perfect scaling where it is a claim."""
    timed = [trial for trial in trials if trial.block == "paired" and trial.samples_per_second is not None]
    sizes = sorted({trial.world_size for trial in timed})
    if not sizes:
        return None
    medians = {size: statistics.median(_rates(timed, size)) for size in sizes}
    lines = {"measured": tuple((float(size), medians[size]) for size in sizes)}
    if is_claim and 1 in medians:
        lines["perfect"] = tuple((float(size), medians[1] * size) for size in sizes)
    title = (
        "Samples per second by number of ranks" if is_claim else f"Samples per second by number of ranks ({CPU_NOTE})"
    )
    return Series(title=title, x_label="ranks", y_label="samples per second", lines=lines)


def sweep_figure(seconds: Mapping[str, Sequence[float]], is_claim: bool) -> Series:
    """Return seconds a step by round, one line a bucket size."""
    title = "Which bucket size is fastest?" if is_claim else f"Bucket sizes in turn ({CPU_NOTE})"
    lines = {name: tuple((float(turn), value) for turn, value in enumerate(values)) for name, values in seconds.items()}
    return Series(title=title, x_label="round", y_label="seconds a step", lines=lines)


def _bucket_points(layout: BucketLayout) -> tuple[tuple[float, float], ...]:
    return tuple((float(place), float(bucket.num_bytes)) for place, bucket in enumerate(layout.buckets))


def _error_points(rungs: Sequence[Rung], precision: str) -> tuple[tuple[float, float], ...]:
    names = list(rungs[0].legacy.parameter_names)
    largest = dict.fromkeys(names, 0.0)
    for rung in rungs:
        for error in rung.results[0].get(precision, {}).get("errors", ()):
            largest[error["parameter"]] = max(largest[error["parameter"]], error["relative"])
    return tuple((float(names.index(name)), math.log10(value)) for name, value in largest.items() if value > 0)


def _pss(rung: Rung) -> list[float]:
    return [float(result["pss_bytes"]) for result in rung.results]


def _rates(trials: Sequence[Trial], world_size: int) -> list[float]:
    return [
        float(trial.samples_per_second)
        for trial in trials
        if trial.world_size == world_size and trial.samples_per_second is not None
    ]
