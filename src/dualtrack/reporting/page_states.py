"""In which state each stage of a run is, in one word and one shape, and where its files are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualtrack.facts.observations import State, Value
from dualtrack.facts.records import STAGES, RunSummary, StageRecord
from dualtrack.reporting.page_ledger import LedgerFacts

TITLES = {
    "0_freeze_baseline": "Freeze baseline",
    "1_pinned_pool": "Pinned pool",
    "2_stream_prefetcher": "Stream prefetcher",
    "3_ddp_expansion": "DDP expansion",
    "4_migration_report": "Migration report",
}
GATED_STAGES = STAGES[:4]
NOT_RUN, CRASHED, INCOMPLETE, WAIVED, UNREADABLE = "not run", "crashed", "incomplete", "waived", "record unreadable"
SHAPES = {
    State.PASSED.value: "passed",
    State.FAILED.value: "failed",
    State.INCONCLUSIVE.value: "inconclusive",
    State.NOT_MEASURED.value: "not-measured",
    State.TOOL_ERROR.value: "tool-error",
    NOT_RUN: "not-run",
    CRASHED: "crashed",
    INCOMPLETE: "crashed",
    UNREADABLE: "tool-error",
    WAIVED: "waived",
}


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """A stage as the strip shows it."""

    stage: str
    state: str
    """A word of `SHAPES`."""
    detail: str = ""
    """What a stage that did not come to its end said last, or the gate's primary figure."""
    traffic: str = ""
    is_promoted: bool = False
    is_rolled_back: bool = False
    links: tuple[tuple[str, str], ...] = ()
    """Label and address relative to the run's folder."""

    @property
    def number(self) -> str:
        """The digit before the name."""
        return self.stage[0]

    @property
    def title(self) -> str:
        """The name in words."""
        return TITLES.get(self.stage, self.stage)

    @property
    def shape(self) -> str:
        """The shape that goes with the state."""
        return SHAPES[self.state]

    @property
    def holds(self) -> bool:
        """True where the migration may go on: the gate passed, or its open lines are waived."""
        return self.state in (State.PASSED.value, WAIVED)


def stage_statuses(
    records: Mapping[str, StageRecord],
    summary: RunSummary | None,
    unreadable: Mapping[str, str],
    ledger: LedgerFacts,
    folder: Path | None = None,
) -> tuple[StageStatus, ...]:
    """Return the status of every stage, in order; absence reads `not run`, never `passed`."""
    statuses = []
    for stage in STAGES:
        record = records.get(stage)
        said = summary.stages.get(stage, NOT_RUN) if summary is not None else None
        state, detail = _state(stage, record, said, unreadable)
        if stage in ledger.waived and state not in (State.PASSED.value, NOT_RUN, CRASHED, INCOMPLETE, UNREADABLE):
            state, detail = WAIVED, f"{state}; {detail}"
        statuses.append(
            StageStatus(
                stage=stage,
                state=state,
                detail=detail,
                traffic=_traffic(record),
                is_promoted=stage in ledger.promoted,
                is_rolled_back=stage in ledger.rolled_back,
                links=_links(stage, folder) if folder is not None else (),
            )
        )
    return tuple(statuses)


def _state(stage: str, record: StageRecord | None, said: str | None, unreadable: Mapping[str, str]) -> tuple[str, str]:
    if stage in unreadable:
        return UNREADABLE, unreadable[stage]
    if said is not None and said not in SHAPES:
        return (CRASHED if said.startswith("crashed") else INCOMPLETE), said
    if record is None:
        # a word of run.json without a record behind it is no evidence
        return (
            (NOT_RUN, "")
            if said in (None, NOT_RUN)
            else (UNREADABLE, f"run.json says {said!r}, and there is no record")
        )
    if said == NOT_RUN:
        return INCOMPLETE, "a record is there, and run.json says the stage was not run"
    return record.verdict.state.value, _primary_figure(record)


def _primary_figure(record: StageRecord) -> str:
    lines = record.verdict.lines
    chosen = (
        [line for line in lines if line.observation == record.verdict.deciding]
        or [line for line in lines if line.primary]
        or list(lines)
    )
    return f"{chosen[0].what}: {chosen[0].statistic}" if chosen else ""


def _traffic(record: StageRecord | None) -> str:
    """Return how much of the traffic, the data or the ranks the new path carries, where the stage observed it."""
    if record is None:
        return ""
    share = record.observations.get("final_traffic_share")
    if isinstance(share, Value) and isinstance(share.value, int | float):
        return f"new path carries {100 * share.value:g} %"
    sizes = sorted({trial.world_size for trial in record.trials if trial.world_size > 1})
    if sizes:
        fractions = {trial.data_fraction for trial in record.trials if trial.world_size > 1}
        data = f" · {100 * min(fractions):g} % data" if min(fractions) < 1 else ""
        return f"{' → '.join(map(str, sizes))} ranks{data}"
    return "legacy carries 100 %" if record.stage == STAGES[0] else ""


def _links(stage: str, folder: Path) -> tuple[tuple[str, str], ...]:
    candidates = (
        ("notebook", f"html/{stage}.html"),
        ("ipynb", f"notebooks/{stage}.ipynb"),
        ("record", f"records/{stage}.json"),
    )
    return tuple((label, address) for label, address in candidates if (folder / address).is_file())


def slug(text: str) -> str:
    """Return `text` as an element id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
