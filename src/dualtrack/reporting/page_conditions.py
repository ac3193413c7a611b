"""The recorded conditions of a run, each fact once: its value, or how it differs between stages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dualtrack.facts.records import StageRecord

LONG_GROUPS = ("sources",)  # hundreds of digests; they stand in the record
NOT_RECORDED = "not recorded"
MAX_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class ConditionRow:
    """One fact about code, packages, machine or load."""

    group: str
    fact: str
    value: str
    differs: bool
    """True where the stages do not agree; the value then names each."""


def condition_rows(records: Mapping[str, StageRecord]) -> tuple[ConditionRow, ...]:
    """Return every recorded condition in a fixed order, what was not collected included."""
    facts: dict[tuple[str, str], dict[str, str]] = {}
    for stage, record in records.items():
        for group, fact, value in _flatten(record.conditions.get("before")):
            facts.setdefault((group, fact), {})[stage] = value
    rows = []
    for (group, fact), by_stage in sorted(facts.items()):
        values = [by_stage.get(stage, NOT_RECORDED) for stage in records]
        differs = len(set(values)) > 1
        text = (
            "; ".join(f"stage {stage[0]}: {value}" for stage, value in zip(records, values, strict=True))
            if differs
            else values[0]
        )
        rows.append(ConditionRow(group=group, fact=fact, value=text, differs=differs))
    return tuple(rows)


def _flatten(before: Any) -> Iterator[tuple[str, str, str]]:
    if not isinstance(before, Mapping):
        return
    for group, content in before.items():
        if group in LONG_GROUPS:
            continue
        for fact, value in content.items() if isinstance(content, Mapping) else [("", content)]:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            yield (
                str(group),
                str(fact),
                text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} … ({len(text):,} characters)",
            )
