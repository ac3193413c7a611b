"""What every stage does before and after its own work: check that it may run, verify the frozen inputs, judge, save, close.

The order is fixed: settings are digested and conditions collected before the first measurement; the record is saved before a verdict may
raise; the completion mark is written last, and only it says that a stage came to its end.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from dualtrack.facts.digests import canonical_json, sha256_file
from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import FrozenInputError, MigrationError, StageRefused
from dualtrack.facts.frozen_inputs import Baseline, FrozenManifest, load_baseline, load_limits, load_manifest
from dualtrack.facts.observations import Limit, Observation, State, ToolError
from dualtrack.facts.project import Project, find_project
from dualtrack.facts.records import PlantedFault, Rollback, Series, StageRecord, Trial
from dualtrack.facts.settings import StageSettings
from dualtrack.facts.verdicts import judge_stage
from dualtrack.measuring import provenance
from dualtrack.training.loop import choose_device

BLOCKING_STATES = (State.FAILED, State.TOOL_ERROR)
Settings = TypeVar("Settings", bound=StageSettings)


class GateNotPassed(MigrationError):
    """A stage's gate failed, or its own tools broke; the record is saved."""


@dataclass(kw_only=True)
class StageRun:
    """One stage at work: where it reads and writes, under which conditions."""

    stage: str
    settings: Any
    project: Project
    folder: Path
    device: str
    hardware_identity: str
    started_at: datetime
    conditions: dict[str, Any]
    limits: tuple[Limit, ...]
    manifest: FrozenManifest | None
    notes: list[str] = field(default_factory=list)

    @property
    def frozen_folder(self) -> Path:
        """Folder of this workload's frozen inputs."""
        return self.project.frozen_folder(self.settings.workload)

    @property
    def figures(self) -> Path:
        """Where figures and their data go."""
        return self.folder / "figures"

    @property
    def frozen(self) -> FrozenManifest:
        """The verified manifest.

        Raises:
            FrozenInputError: This workload was not frozen yet.
        """
        if self.manifest is None:
            raise FrozenInputError(
                f"expected frozen inputs for {self.settings.workload!r}; run stage 0 or `dualtrack freeze` first"
            )
        return self.manifest

    def find_baseline(self) -> Baseline | None:
        """Return the legacy outputs for this hardware, the project's or the ones recorded earlier in this run; None where neither exists.

        Raises:
            FrozenInputError: The one found belongs to other frozen inputs.
        """
        for folder in (self.frozen_folder / "baselines", self.folder / "baseline"):
            found = load_baseline(folder, self.hardware_identity)
            if found is not None:
                if found.frozen_inputs_digest != self.frozen.digest:
                    raise FrozenInputError(
                        f"the baseline of {self.hardware_identity} belongs to other frozen inputs ({found.frozen_inputs_digest[:12]}, expected "
                        f"{self.frozen.digest[:12]}); record it again with `dualtrack freeze --reason ...`"
                    )
                return found
        return None

    def floor_trials(self) -> tuple[Trial, ...]:
        """Return the trials of stage 0 in this run's folder, legacy against legacy; empty where stage 0 did not run here."""
        path = self.folder / "records" / "0_freeze_baseline.json"
        return StageRecord.load(path).trials if path.is_file() else ()


def open_stage(stage: str, settings: StageSettings, run_folder: str = "", root: str | Path | None = None) -> StageRun:
    """Check that the stage may run here, verify the frozen inputs, and collect the conditions.

    Args:
        stage: Name from `records.STAGES`.
        settings: Validated settings.
        run_folder: Relative to the project's root; empty makes a folder of its own under `reports/`.
        root: The project's root; None finds it upward by its marker.

    Raises:
        StageRefused: Stage 1 or 2 inside a process group or with WORLD_SIZE above 1.
        FrozenInputError: The frozen inputs differ from their manifest.
    """
    if stage in ("1_pinned_pool", "2_stream_prefetcher"):
        refuse_distributed(stage)
    started_at = datetime.now(UTC)
    project = find_project(root)
    folder = project.root / run_folder if run_folder else project.new_run_folder(stage)
    device = str(choose_device(settings.device))
    frozen_folder = project.frozen_folder(settings.workload)
    is_frozen = (frozen_folder / "manifest.json").is_file()
    if not is_frozen and stage != "0_freeze_baseline":
        raise FrozenInputError(
            f"expected frozen inputs for {settings.workload!r}; run stage 0 or `dualtrack freeze` first"
        )
    return StageRun(
        stage=stage, settings=settings, project=project, folder=folder, device=device, hardware_identity=provenance.hardware_identity(device),
        started_at=started_at, conditions={"before": provenance.collect(device)}, limits=load_limits(frozen_folder).get(stage, ()) if is_frozen else (),
        manifest=load_manifest(frozen_folder) if is_frozen else None,
    )  # fmt: skip


def refuse_distributed(stage: str) -> None:
    """Refuse a single-process stage where ranks are at work.

    Raises:
        StageRefused: A process group is initialised, or WORLD_SIZE is above 1.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise StageRefused(
            f"stage {stage} allows no distributed communication, and a process group is initialised; run it in a process of its own"
        )
    if world_size != "1":
        raise StageRefused(
            f"stage {stage} allows no distributed communication, and WORLD_SIZE is {world_size}; unset it, start one process"
        )


@dataclass(kw_only=True)
class Findings:
    """What a stage found, before it is judged."""

    observations: dict[str, Observation] = field(default_factory=dict)
    stable_keys: Sequence[str] = ()
    planted_faults: Sequence[PlantedFault] = ()
    rollback: Rollback | None = None
    trials: Sequence[Trial] = ()
    figures: Mapping[str, Series] = field(default_factory=dict)

    def observe(self, key: str, what: str, measure: Callable[[], Observation]) -> None:
        """Put a measurement under `key`; a promise that breaks while measuring becomes a `ToolError`, never a gap."""
        try:
            self.observations[key] = measure()
        except MigrationError as error:
            self.observations[key] = ToolError(what=what, error=f"{type(error).__name__}: {error}"[:2000])


def save_record(run: StageRun, findings: Findings) -> StageRecord:
    """Judge what was found and save the record under `records/`; the verdict raises later, in `close_stage`."""
    after = provenance.collect(run.device)
    record = StageRecord(
        stage=run.stage, workload=run.settings.workload, device=run.device, started_at=run.started_at, ended_at=datetime.now(UTC),
        settings=run.settings.model_dump(mode="json"), settings_digest=run.settings.digest(), frozen_inputs_digest=run.frozen.digest,
        hardware_identity=run.hardware_identity, conditions={**run.conditions, "after": {"load": after.get("load")}},
        observations=findings.observations, limits=run.limits, planted_faults=tuple(findings.planted_faults), rollback=findings.rollback,
        trials=tuple(findings.trials), figures=dict(findings.figures), notes=tuple(run.notes), stable_keys=tuple(findings.stable_keys),
        verdict=judge_stage(findings.observations, run.limits, findings.planted_faults, run.device),
    )  # fmt: skip
    record = record.model_copy(update={"stable_digest": record.compute_stable_digest()})
    record.save(run.folder / "records" / f"{run.stage}.json")
    return record


def close_stage(run: StageRun, record: StageRecord) -> str:
    """Write the completion mark, then return the verdict's sentence or raise.

    Raises:
        GateNotPassed: The gate failed or its tools broke; everything is saved by then.
    """
    saved = run.folder / "records" / f"{run.stage}.json"
    mark = {
        "stage": run.stage,
        "record_sha256": sha256_file(saved),
        "state": record.verdict.state,
        "ended_at": datetime.now(UTC).isoformat(),
    }
    write_atomically(run.folder / "records" / f"{run.stage}.completed.json", canonical_json(mark))
    sentence = f"{run.stage}: {record.verdict.state} ({record.verdict.scope})"
    if record.verdict.state in BLOCKING_STATES:
        reasons = [
            f"{line.what}: {line.statistic}, limit {line.limit}"
            for line in record.verdict.lines
            if line.state in BLOCKING_STATES
        ]
        raise GateNotPassed(f"{sentence}. {'; '.join(reasons)}. {record.verdict.next_action}")
    return f"{sentence}. {record.verdict.next_action}"
