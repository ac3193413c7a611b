"""The trust box: what lets a reviewer check a run without the machine that made it, and what speaks against it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dualtrack.facts.observations import State
from dualtrack.facts.records import RunSummary, StageRecord
from dualtrack.reporting.quantities import with_binary_prefix, with_time_unit

NOT_COLLECTED = "not collected"


@dataclass(frozen=True, kw_only=True)
class TrustItem:
    """One line of the trust box."""

    term: str
    value: str
    kind: str = "text"
    """`text`, `digest` or `command`."""
    is_bad: bool = False


def trust_items(
    records: Mapping[str, StageRecord], summary: RunSummary | None, run_name: str, evidence_root: str | None
) -> tuple[TrustItem, ...]:
    """Return what lets a reviewer check the run without the machine that made it."""
    items = [
        _root_item(evidence_root),
        TrustItem(term="Check it", value=f"dualtrack verify reports/{run_name}", kind="command"),
        _one_value("Frozen inputs", {record.frozen_inputs_digest[:16] for record in records.values()}, "digest"),
        *_conditions(records),
    ]
    is_complete = summary is not None and summary.complete
    how_far = (
        "complete"
        if is_complete
        else "partial: " + ("run.json is missing" if summary is None else _unfinished(summary))
    )
    return (*items, TrustItem(term="Run", value=f"{how_far}; {_when(records, summary)}", is_bad=not is_complete))


def _root_item(evidence_root: str | None) -> TrustItem:
    is_digest = evidence_root is not None and re.fullmatch(r"[0-9a-f]{64}", evidence_root) is not None
    return TrustItem(
        term="Evidence root",
        value=evidence_root or NOT_COLLECTED,
        kind="digest" if is_digest else "text",
        is_bad=not is_digest,
    )


def _one_value(term: str, values: set[str], kind: str = "text") -> TrustItem:
    """Return an item for something that has to be the same in all stages; two values are shown as a fault."""
    if not values:
        return TrustItem(term=term, value=NOT_COLLECTED)
    joined = " ≠ ".join(sorted(values))
    return TrustItem(
        term=term,
        value=joined if len(values) == 1 else f"differs between stages: {joined}",
        kind=kind,
        is_bad=len(values) > 1,
    )


def _conditions(records: Mapping[str, StageRecord]) -> Iterator[TrustItem]:
    befores: list[Mapping[str, Any]] = [record.conditions.get("before") or {} for record in records.values()]
    yield _code_item([_group(before, "code") for before in befores])
    yield _one_value("Environment", {_environment_text(before) for before in befores})
    yield TrustItem(
        term="Hardware", value="; ".join(sorted({_hardware_text(before) for before in befores})) or NOT_COLLECTED
    )


def _group(before: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a group of conditions; one that could not be collected is a word instead of a mapping."""
    group = before.get(name)
    return group if isinstance(group, Mapping) else {}


def _code_item(codes: list[Mapping[str, Any]]) -> TrustItem:
    """Return commit and state of the code; a changed tree, or one that changed during the run, is a fault."""
    texts = {_code_text(code) for code in codes}
    is_bad = len(texts) > 1 or any(code.get("state") == "dirty" for code in codes)
    if len(texts) <= 1:
        return TrustItem(term="Code", value=next(iter(texts), NOT_COLLECTED), is_bad=is_bad)
    commits = sorted({str(code.get("commit", NOT_COLLECTED))[:12] for code in codes})
    states = sorted({str(code.get("state", NOT_COLLECTED)) for code in codes})
    return TrustItem(
        term="Code",
        value=f"changed during the run: commit {', '.join(commits)}; {', '.join(states)}; see Conditions",
        is_bad=is_bad,
    )


def _code_text(code: Mapping[str, Any]) -> str:
    if "commit" not in code:
        return NOT_COLLECTED
    text = f"commit {str(code['commit'])[:12]}, {code.get('state', 'clean or dirty not collected')}"
    if code.get("state") == "dirty":
        text += f": {code.get('num_changed')} changed, {code.get('num_untracked')} untracked, difference {str(code.get('difference_digest'))[:12]}"
    return text


def _environment_text(before: Mapping[str, Any]) -> str:
    packages, platform = _group(before, "packages"), _group(before, "platform")
    versions = {
        "Python": _group(before, "python").get("version"),
        "torch": packages.get("torch"),
        "numpy": packages.get("numpy"),
        str(platform.get("system", "kernel")): platform.get("kernel"),
        "CUDA": _group(before, "torch").get("cuda"),
        "driver": _group(before, "gpu").get("driver"),
    }
    return (
        ", ".join(f"{name} {value}" for name, value in versions.items() if value not in (None, NOT_COLLECTED))
        or NOT_COLLECTED
    )


def _hardware_text(before: Mapping[str, Any]) -> str:
    gpu, cpu, memory = _group(before, "gpu"), _group(before, "cpu"), _group(before, "memory")
    parts = []
    if gpu.get("name", NOT_COLLECTED) != NOT_COLLECTED:
        parts.append(f"{gpu.get('num_devices', 1)} x {gpu['name']}")
    if cpu.get("model", NOT_COLLECTED) != NOT_COLLECTED:
        parts.append(f"{cpu['model']}, {cpu.get('num_allowed', cpu.get('num_logical'))} CPUs")
    if isinstance(memory.get("total_bytes"), int):
        parts.append(f"{with_binary_prefix(memory['total_bytes'])} memory")
    return ", ".join(parts) or NOT_COLLECTED


def _when(records: Mapping[str, StageRecord], summary: RunSummary | None) -> str:
    starts = [record.started_at for record in records.values()] + ([summary.started_at] if summary else [])
    ends = [record.ended_at for record in records.values()] + ([summary.ended_at] if summary else [])
    if not starts:
        return f"time {NOT_COLLECTED}"
    return f"{min(starts):%Y-%m-%d %H:%M} UTC, {with_time_unit((max(ends) - min(starts)).total_seconds())}"


def _unfinished(summary: RunSummary) -> str:
    settled = {state.value for state in State}
    left = [f"stage {stage[0]} {state}" for stage, state in summary.stages.items() if state not in settled]
    return "; ".join(left) or "the runner stopped early"
