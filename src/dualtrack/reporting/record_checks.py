"""What must follow from a record's raw content: its digests, its derived observations, its planted faults and its verdict.

Each check is a generator of differences in words; a sound record gives none.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

from dualtrack.facts import verdicts
from dualtrack.facts.derivations import (
    TRACK_OF_STAGE,
    failures_from_trials,
    in_order,
    peak_from_trials,
    ratio_from_trials,
)
from dualtrack.facts.digests import sha256_file, sha256_json
from dualtrack.facts.observations import Fact, Failures, GateLine, Maximum, Ratio, Value
from dualtrack.facts.records import StageRecord, Trial
from dualtrack.facts.trial_pairs import Statistic
from dualtrack.facts.verdicts import judge_planted, judge_stage

RATIO_KEYS: dict[str, Statistic] = {
    "step_latency_ratio": "p50",
    "step_latency_p95_ratio": "p95",
    "step_latency_max_ratio": "max",
}
PEAK_KEYS = ("pinned_peak_bytes", "pool_peak_bytes")
JUDGING_SOURCES = tuple(f"dualtrack/facts/{name}.py" for name in ("verdicts", "line_judges", "statistics"))


def check_record(record: StageRecord, floor_trials: tuple[Trial, ...] = ()) -> Iterator[str]:
    """Yield what in a record does not follow from the rest of it.

    Args:
        record: A record whose schema and stable digest were checked when it was loaded.
        floor_trials: Trials of stage 0, whose noise floor the other stages of the session may use.
    """
    if record.settings_digest != sha256_json(record.settings):
        yield "settings_digest does not follow from the settings; a margin or a number of pairs was changed afterwards"
    yield from _check_trials(record)
    yield from _check_derived(record, floor_trials)
    yield from _check_planted(record)
    yield from _check_verdict(record)


def _check_trials(record: StageRecord) -> Iterator[str]:
    for place, trial in enumerate(in_order(record.trials)):
        if trial.position != place:
            yield f"trial {trial.name}: expected position {place}, got {trial.position}; a trial was taken out or put in"
            return
        if trial.step_seconds and len(trial.step_seconds) != trial.num_steps:
            yield f"trial {trial.name}: expected {trial.num_steps} step times, got {len(trial.step_seconds)}"
        if trial.outcome.state == "completed" and trial.num_steps == 0 and trial.block == "paired":
            yield f"trial {trial.name}: completed without a timed step"


def _check_derived(record: StageRecord, floor_trials: tuple[Trial, ...]) -> Iterator[str]:
    """Derive again what can be derived; an observation of another kind under such a key says that nothing was measured."""
    track = TRACK_OF_STAGE.get(record.stage)
    for key, seen in record.observations.items():
        expected: tuple[Fact, ...] = ()
        if isinstance(seen, Ratio) and key in RATIO_KEYS and track is not None:
            expected = _ratios(record, track, seen, RATIO_KEYS[key], floor_trials)
            planned = record.settings.get("num_pairs")
            if planned is not None and seen.num_planned_pairs != planned:
                yield f"{key}: expected {planned} planned pairs as in the settings, got {seen.num_planned_pairs}"
        elif isinstance(seen, Failures) and key == "trial_failures":
            expected = (failures_from_trials(record.trials, seen.what),)
        elif isinstance(seen, Maximum) and key in PEAK_KEYS and track is not None:
            expected = (peak_from_trials(record.trials, track, key, seen.what, seen.unit),)
        elif isinstance(seen, Value) and key == "rollback_verified":
            yield from _check_rollback(record, seen)
        if expected and seen not in expected:
            yield f"{key}: the observation does not follow from the {len(record.trials)} raw trials"


def _ratios(
    record: StageRecord, track: str, seen: Ratio, statistic: Statistic, floor_trials: tuple[Trial, ...]
) -> tuple[Fact, ...]:
    """Return what the ratio may be: with or without stage 0's noise floor, over all world sizes or, as in stage 3, over one."""
    sizes = {trial.world_size for trial in record.trials if trial.track == track}
    return tuple(
        ratio_from_trials(record.trials, track, seen.what, statistic=statistic, floor_trials=floor, world_size=size)
        for floor in ((), floor_trials)
        for size in (None, *sorted(sizes))
    )


def _check_rollback(record: StageRecord, seen: Value) -> Iterator[str]:
    verified = record.rollback is not None and record.rollback.verified
    if seen.value is not verified:
        done = "no rollback is recorded" if record.rollback is None else f"the recorded rollback verified: {verified}"
        yield f"rollback_verified: expected {verified}, got {seen.value} ({done})"


def _check_planted(record: StageRecord) -> Iterator[str]:
    for fault in record.planted_faults:
        caught = judge_planted(fault, record.limits, record.device)
        if caught != fault.caught:
            yield f"planted fault {fault.what!r}: recorded as {'caught' if fault.caught else 'not caught'}, judged again it is {'caught' if caught else 'not caught'}"


def is_worded_by_another_version(record: StageRecord) -> bool:
    """Tell whether the record was judged by other source files than the ones that judge it now."""
    before = record.conditions.get("before")
    sources = before.get("sources") if isinstance(before, Mapping) else None
    if not isinstance(sources, Mapping):
        return False
    package = Path(verdicts.__file__).parents[1]
    return any(sources.get(name) not in (None, sha256_file(package.parent / name)) for name in JUDGING_SOURCES)


def _check_verdict(record: StageRecord) -> Iterator[str]:
    """Judge again from the raw observations and name the first line that comes out otherwise.

    Wording may change from version to version; states, figures and limits may not.
    """
    try:
        again = judge_stage(record.observations, record.limits, record.planted_faults, record.device)
    except ValueError as error:
        yield f"the limits can't be judged: {error}"
        return
    skipped = {"statistic", "next_action"} if is_worded_by_another_version(record) else set()
    for recorded, judged in zip_longest(record.verdict.lines, again.lines):
        if recorded is None or judged is None or _content(recorded, skipped) != _content(judged, skipped):
            yield f"verdict on {(recorded or judged).observation}: recorded {_words(recorded)}, judged again {_words(judged)}"
            return
    for name in ("state", "scope", "deciding", "next_action"):
        before, now = getattr(record.verdict, name), getattr(again, name)
        if before != now and name not in skipped:
            yield f"verdict: {name} is recorded as {str(before)!r}, judged again it is {str(now)!r}"
            return


def _content(line: GateLine, skipped: set[str]) -> str:
    return line.model_dump_json(exclude=skipped)


def _words(line: GateLine | None) -> str:
    return "no line" if line is None else f"{line.state} [{line.statistic}]"
