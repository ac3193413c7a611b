"""Typed parameters from the command line, checked for every stage before anything starts."""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from dualtrack.facts.expansion_settings import ExpansionSettings
from dualtrack.facts.records import STAGES
from dualtrack.facts.settings import FreezeSettings, MemorySettings, ReportSettings, StageSettings, TransferSettings

SETTINGS: dict[str, type[StageSettings]] = {
    "0_freeze_baseline": FreezeSettings,
    "1_pinned_pool": MemorySettings,
    "2_stream_prefetcher": TransferSettings,
    "3_ddp_expansion": ExpansionSettings,
    "4_migration_report": ReportSettings,
}


def parse_value(text: str) -> Any:
    """Return the JSON value of `text`, or the text itself.

    A number must be written as JSON writes it: `007` and `1_000` stay text, and `12e4567`, which a float can't hold, does too; the
    stage's settings then refuse text where they want a number.
    """
    try:
        value = json.loads(text, parse_constant=str)
    except ValueError:
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Turn `name=value` texts into names and typed values.

    Raises:
        ValueError: An assignment has no equals sign.
    """
    parsed = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"expected name=value, got {assignment!r}")
        parsed[name.strip()] = parse_value(text.strip())
    return parsed


def collect_parameters(assignments: Iterable[str], shared: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn `name=value` and `stage.name=value` into validated parameters by stage.

    Args:
        assignments: A bare name goes to every stage that bears it; `1_pinned_pool.cap_bytes=...` to one.
        shared: Values for every stage that bears the name, for example the workload.

    Raises:
        ValueError: A name fits no stage or a value does not fit its type; nothing was started.
    """
    chosen: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    for stage, settings in SETTINGS.items():
        chosen[stage].update({name: value for name, value in shared.items() if name in settings.model_fields})
    for name, value in parse_assignments(assignments).items():
        _assign(chosen, name, value)
    for stage, settings in SETTINGS.items():
        settings.parse(chosen[stage])
    return chosen


def _assign(chosen: dict[str, dict[str, Any]], name: str, value: Any) -> None:
    stage, dot, bare = name.partition(".")
    if dot:
        if stage not in SETTINGS:
            near = difflib.get_close_matches(stage, SETTINGS, n=1)
            raise ValueError(
                f"unknown stage {stage!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"stages are {', '.join(SETTINGS)}")
            )
        chosen[stage][bare] = value  # the stage's settings refuse an unknown name
        return
    bearers = [stage for stage, settings in SETTINGS.items() if name in settings.model_fields]
    if not bearers:
        known = sorted({field for settings in SETTINGS.values() for field in settings.model_fields})
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(
            f"unknown parameter {name!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"parameters are {', '.join(known)}")
        )
    for bearer in bearers:
        chosen[bearer][name] = value
