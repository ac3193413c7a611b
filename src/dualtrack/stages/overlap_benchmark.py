"""How much of the transfer is hidden: each data path's step against the cached batch's, the most that any loader could win.

Fresh processes, one a track and round, the order reversed every second round; a run's figure is its mean step over a window that is
synchronised at both ends, so a stall in it counts. The number of rounds is fixed before the run.

    python -m dualtrack.stages.overlap_benchmark --json OUT                       (one case, 10 pairs; about 6 minutes on an H200)
    python -m dualtrack.stages.overlap_benchmark --json OUT --quick               (all cases, one round)
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.observations import Fact, Pair
from dualtrack.facts.statistics import RatioInterval, ratio_interval
from dualtrack.measuring.trials import run_in_fresh_process
from dualtrack.stages.overlap_tracks import CASES
from dualtrack.training.loop import choose_device

TRACKS = "dualtrack.stages.overlap_tracks"
COMPARISONS = {
    "prefetched": "cached", "legacy": "cached", "pin_memory": "cached", "plain": "cached", "shadow": "legacy", "retired": "prefetched",
}  # fmt: skip
"""Track -> what its step is divided by."""
LIMIT_POINT, LIMIT_HIGH = 1.005, 1.01
NOTHING_TO_WIN = 1.01
TRIAL_DEADLINE_SECONDS = 180.0
DEADLINE_SECONDS = 345.0  # a run fits into six minutes
STEPS, QUICK_STEPS = (10, 30), (6, 10)
"""Warm-up steps and steps of the window."""
NUM_SIDE_ROUNDS = 2


class OverlapRun(Fact):
    """One track of one case in one fresh process."""

    case: str
    track: str
    round: int
    position: int
    """Place in the order of execution."""
    seconds_per_step: float | None
    """None when the process failed."""
    failure: str | None = None
    prefetcher: dict[str, Any] | None = None
    """The prefetcher's own figures, without the timeline."""


class OverlapRatio(Fact):
    """One track's step over another's, paired by round."""

    case: str
    track: str
    against: str
    ratio: float
    interval: RatioInterval | None
    """None for a single pair."""
    num_pairs: int
    verdict: str


class OverlapReport(Fact):
    """What the benchmark saw."""

    device: str
    num_steps: int
    num_warmup_steps: int
    num_planned_rounds: dict[str, int]
    """Rounds by track."""
    runs: tuple[OverlapRun, ...]
    ratios: tuple[OverlapRatio, ...]
    seconds: float
    is_complete: bool
    """False when the time ran out before the planned rounds were done."""


def plan_rounds(tracks: dict[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Give each round and its tracks in order: those with rounds left, reversed every second round, so that a drift cancels."""
    for number in range(max(tracks.values(), default=0)):
        names = [name for name, num_rounds in tracks.items() if number < num_rounds]
        yield number, names if number % 2 == 0 else names[::-1]


def run_benchmark(
    cases: list[str],
    tracks: dict[str, int],
    device: str,
    steps: tuple[int, int],
    deadline_seconds: float = DEADLINE_SECONDS,
) -> OverlapReport:
    """Run every round of every case.

    Args:
        cases: Names of `CASES`.
        tracks: Track -> planned rounds.
        device: As for `choose_device`.
        steps: Warm-up steps and steps of the window.
        deadline_seconds: No process is started that would, like the longest so far, end after this.
    """
    started, longest, is_complete = time.monotonic(), 0.0, True
    runs: list[OverlapRun] = []
    for number, names in plan_rounds(tracks):
        for case in cases:
            for track in names:
                if time.monotonic() - started + longest > deadline_seconds:
                    is_complete = False
                    continue
                began = time.monotonic()
                runs.append(_run_once(case, track, number, len(runs), device, steps))
                longest = max(longest, time.monotonic() - began)
                _say_run(runs[-1], time.monotonic() - began)
    return OverlapReport(
        device=_device_name(device), num_warmup_steps=steps[0], num_steps=steps[1], num_planned_rounds=tracks, runs=tuple(runs),
        ratios=tuple(ratios_of(runs)), seconds=time.monotonic() - started, is_complete=is_complete,
    )  # fmt: skip


def _run_once(case: str, track: str, number: int, position: int, device: str, steps: tuple[int, int]) -> OverlapRun:
    arguments = {"case": case, "track": track, "device": device, "num_warmup_steps": steps[0], "num_steps": steps[1]}
    result, outcome = run_in_fresh_process(f"{TRACKS}:measure_track", arguments, TRIAL_DEADLINE_SECONDS)
    failure = None if outcome.state == "completed" else f"{outcome.cause}: {(outcome.detail or '')[-400:]}"
    return OverlapRun(
        case=case, track=track, round=number, position=position, failure=failure,
        **(result or {"seconds_per_step": None}),
    )  # fmt: skip


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if choose_device(device).type == "cuda" else "cpu"


def ratios_of(runs: list[OverlapRun]) -> Iterator[OverlapRatio]:
    """Pair the runs of each comparison by round; `cached` against `cached` of the round before is the floor."""
    seconds = {
        (run.case, run.track, run.round): run.seconds_per_step for run in runs if run.seconds_per_step is not None
    }
    for case in dict.fromkeys(run.case for run in runs):
        for track, against in COMPARISONS.items():
            numbers = [
                number
                for name, kind, number in seconds
                if (name, kind) == (case, track) and (case, against, number) in seconds
            ]
            pairs = [_pair(seconds[case, against, number], seconds[case, track, number], number) for number in numbers]
            if pairs:
                yield _ratio(case, track, against, pairs)
        floor = [
            _pair(seconds[case, "cached", number - 1], seconds[case, "cached", number], number)
            for name, kind, number in seconds
            if (name, kind) == (case, "cached") and number % 2 and (case, "cached", number - 1) in seconds
        ]
        if floor:
            yield _ratio(case, "cached", "cached", floor)


def _ratio(case: str, track: str, against: str, pairs: list[Pair]) -> OverlapRatio:
    interval = ratio_interval(pairs) if len(pairs) >= 2 else None
    ratio = interval.ratio if interval is not None else pairs[0].candidate / pairs[0].legacy
    verdict = _judge(track, interval) if interval is not None else "one pair decides nothing"
    return OverlapRatio(
        case=case, track=track, against=against, ratio=ratio, interval=interval, num_pairs=len(pairs), verdict=verdict
    )


def _pair(legacy: float, candidate: float, number: int) -> Pair:
    return Pair(legacy=legacy, candidate=candidate, order="legacy first" if number % 2 == 0 else "candidate first")


def _judge(track: str, interval: RatioInterval) -> str:
    if track == "prefetched":
        if interval.ratio <= LIMIT_POINT and interval.high <= LIMIT_HIGH:
            return "hidden"
        wanted = f"wanted at most {LIMIT_POINT} with the upper end at most {LIMIT_HIGH}"
        return (
            f"not hidden: {wanted}" if interval.low > LIMIT_POINT else f"cannot be decided with these pairs: {wanted}"
        )
    if track == "cached":
        return "noise floor"
    if track == "legacy" and interval.high <= NOTHING_TO_WIN:
        return "nothing to win here: the legacy path already runs at the cached batch's rate"
    return ""


def _say_run(run: OverlapRun, seconds: float) -> None:
    figure = (
        f"{run.seconds_per_step * 1e3:9.2f} ms/step" if run.seconds_per_step is not None else f"FAILED {run.failure}"
    )
    click.echo(f"round {run.round:2} {run.case:15} {run.track:10} {figure}   ({seconds:.1f} s)")


def say_ratios(report: OverlapReport) -> None:
    """Print the table of ratios."""
    if report.device == "cpu":
        click.echo("CPU figures: they show that the paths run and say nothing of a GPU")
    for found in report.ratios:
        bounds = (
            f"({found.interval.low:.4f}-{found.interval.high:.4f})" if found.interval is not None else "(no interval)  "
        )
        click.echo(
            f"{found.case:15} {found.track:10} / {found.against:10} {found.ratio:.4f} {bounds} n={found.num_pairs}  {found.verdict}"
        )
    click.echo(
        f"{report.device}: {len(report.runs)} processes in {report.seconds:.0f} s{'' if report.is_complete else ', time ran out'}"
    )


@click.command()
@click.option(
    "--json", "path", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Where the report goes."
)
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=click.Choice(list(CASES)),
    help="Default: resnet50_fp32; --quick: all full ones.",
)
@click.option(
    "--track", "chosen", multiple=True, type=click.Choice(list(COMPARISONS)), help="Default: all; cached always runs."
)
@click.option("--device", default="cuda", show_default=True)
@click.option("--num-pairs", default=10, show_default=True, help="Rounds of cached and prefetched; the others get 2.")
@click.option("--quick", is_flag=True, help="All full cases, one round, few steps.")
def main(path: Path, cases: tuple[str, ...], chosen: tuple[str, ...], device: str, num_pairs: int, quick: bool) -> None:
    """Measure how much of the transfer each data path hides; a report of the runs and their ratios goes to a file."""
    names = list(cases) or ([name for name in CASES if name != "small"] if quick else ["resnet50_fp32"])
    num_rounds = 1 if quick else num_pairs
    tracks = {"cached": num_rounds}
    for track in chosen or COMPARISONS:
        tracks |= {track: num_rounds if track == "prefetched" else min(num_rounds, NUM_SIDE_ROUNDS)}
    report = run_benchmark(names, tracks, device, QUICK_STEPS if quick else STEPS)
    write_atomically(path, report.model_dump_json(indent=1).encode(), overwrite=True)
    say_ratios(report)


if __name__ == "__main__":
    main()
