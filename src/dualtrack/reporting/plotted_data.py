"""The data behind each figure as a tidy frame: a test compares these, a reader gets them as CSV beside the picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from dualtrack.facts.records import Series, Trial


def timed(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials in order of execution, without those whose memory was read at every step: reading it slows them down."""
    return sorted((t for t in trials if t.block != "extra" or t.memory is None), key=lambda trial: trial.position)


def track_label(trial: Trial) -> str:
    """Return the name of a trial's track as the figures show it, with the number of ranks where there are many."""
    return f"{trial.track}, {trial.world_size} ranks" if trial.world_size > 1 else trial.track


def memory_frame(trials: Sequence[Trial]) -> pd.DataFrame:
    """Return one row a sample: trial, track, block, position, series (`pss`, `pool`, `device`), step, seconds, bytes.

    `step` counts from the first warm-up step where a trial has one sample a step, and is missing where it was sampled by the clock.
    """
    rows: list[tuple[Any, ...]] = []
    for trial in sorted(trials, key=lambda item: item.position):
        if trial.memory is None:
            continue
        series = {"pss": trial.memory.pss_bytes, "pool": trial.memory.pool_bytes, "device": trial.memory.device_bytes}
        seconds = trial.memory.seconds
        steps = (
            range(len(seconds)) if len(seconds) == trial.num_warmup_steps + trial.num_steps else [None] * len(seconds)
        )
        for name, values in series.items():
            points = zip(steps, seconds, values, strict=True) if values is not None else ()
            rows.extend((trial.name, track_label(trial), trial.block, trial.position, name, *point) for point in points)
    frame = pd.DataFrame(rows, columns=["trial", "track", "block", "position", "series", "step", "seconds", "bytes"])
    return frame.astype({"step": "Int64"})


def throughput_frame(trials: Sequence[Trial]) -> pd.DataFrame:
    """Return one row a trial in order of execution: position, trial, track, block, pair, samples_per_second, outcome.

    A run that failed has a row without a figure; one that came to its end and never was to be timed has none.
    """
    columns = ["position", "trial", "track", "block", "pair", "samples_per_second", "outcome"]
    rows = [
        (t.position, t.name, track_label(t), t.block, t.pair, t.samples_per_second, t.outcome.cause or t.outcome.state)
        for t in timed(trials)
        if t.samples_per_second is not None or t.outcome.state == "failed"
    ]
    return pd.DataFrame(rows, columns=columns).astype({"samples_per_second": "float64"})


def step_latency_frame(trials: Sequence[Trial]) -> pd.DataFrame:
    """Return one row a trial: position, trial, track, block, num_steps, then p50, p95 and max of its steps in milliseconds."""
    rows = []
    for trial in timed(trials):
        if trial.step_seconds:
            p50, p95, longest = np.percentile(np.asarray(trial.step_seconds) * 1e3, [50, 95, 100]).tolist()
            num_steps = len(trial.step_seconds)
            rows.append((trial.position, trial.name, track_label(trial), trial.block, num_steps, p50, p95, longest))
    columns = [
        "position",
        "trial",
        "track",
        "block",
        "num_steps",
        "p50_milliseconds",
        "p95_milliseconds",
        "max_milliseconds",
    ]
    return pd.DataFrame(rows, columns=columns)


def series_frame(series: Series) -> pd.DataFrame:
    """Return one row a point: line, x, y; bounds come last, as lines of their own with an empty x."""
    rows: list[tuple[str, float | None, float]] = [
        (name, x, y) for name, points in series.lines.items() for x, y in points
    ]
    rows.extend((f"bound: {name}", None, y) for name, y in series.bounds.items())
    return pd.DataFrame(rows, columns=["line", "x", "y"])
