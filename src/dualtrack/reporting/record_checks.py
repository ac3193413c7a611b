"""What must follow from a record's raw content: its digests, its derived observations, its planted faults and its verdict.

Each check is a generator of differences in words; a sound record gives none.
"""

from collections.abc import Iterator
from itertools import zip_longest

from dualtrack.facts.derivations import (
    TRACK_OF_STAGE,
    failures_from_trials,
    in_order,
    peak_from_trials,
    ratio_from_trials,
)
from dualtrack.facts.digests import sha256_json
from dualtrack.facts.observations import Fact, Failures, Maximum, Ratio, Value
from dualtrack.facts.records import StageRecord, Trial
from dualtrack.facts.trial_pairs import Statistic
from dualtrack.facts.verdicts import judge_planted, judge_stage

RATIO_KEYS: dict[str, Statistic] = {
    "step_latency_ratio": "p50",
    "step_latency_p95_ratio": "p95",
    "step_latency_max_ratio": "max",
}
PEAK_KEYS = ("pinned_peak_bytes", "pool_peak_bytes")


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
    return tuple(
        ratio_from_trials(record.trials, track, seen.what, statistic=statistic, floor_trials=floor)
        for floor in ((), floor_trials)
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


def _check_verdict(record: StageRecord) -> Iterator[str]:
    """Judge again from the raw observations and name the first line that comes out otherwise."""
    try:
        again = judge_stage(record.observations, record.limits, record.planted_faults, record.device)
    except ValueError as error:
        yield f"the limits can't be judged: {error}"
        return
    if again.model_dump_json() == record.verdict.model_dump_json():
        return
    for recorded, judged in zip_longest(record.verdict.lines, again.lines):
        if recorded is None or judged is None or recorded.model_dump_json() != judged.model_dump_json():
            key = (recorded or judged).observation
            yield f"verdict on {key}: recorded {_words(recorded)}, judged again {_words(judged)}"
            return
    yield f"verdict: recorded {record.verdict.state} ({record.verdict.scope}), judged again {again.state} ({again.scope})"


def _words(line: Fact | None) -> str:
    return "no line" if line is None else f"{getattr(line, 'state', '')} [{getattr(line, 'statistic', '')}]"
