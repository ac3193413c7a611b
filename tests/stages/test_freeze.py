"""Stage 0 freezes what the legacy loader delivers, and never calls an unrepeatable pipeline a baseline."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualtrack.facts.errors import FrozenInputError, TrialError
from dualtrack.facts.frozen_inputs import BATCHES_FILE, load_manifest
from dualtrack.facts.observations import State
from dualtrack.facts.project import Project
from dualtrack.facts.records import StageRecord
from dualtrack.facts.settings import FreezeSettings
from dualtrack.stages.freeze import freeze_inputs, run_freeze_stage
from dualtrack.stages.freeze_command import freeze_project
from dualtrack.stages.stage_run import GateNotPassed, close_stage, open_stage

WORKLOADS = "tests.stages.small_workloads"


def settings_for(name: str, **more: Any) -> FreezeSettings:
    """Return quick settings for one of the small workloads."""
    return FreezeSettings(
        workload=f"{WORKLOADS}:{name}",
        num_pairs=1,
        num_warmup_steps=1,
        num_steps=4,
        trial_deadline_seconds=60.0,
        **more,
    )


def run_stage(project: Project, settings: FreezeSettings) -> StageRecord:
    """Run stage 0 into a folder of its own."""
    return run_freeze_stage(open_stage("0_freeze_baseline", settings, "", project.root))


def state_of(record: StageRecord, observation: str) -> State:
    """Return the state of one gate line."""
    (line,) = [line for line in record.verdict.lines if line.observation == observation]
    return line.state


def test_stage_0_freezes_records_a_baseline_and_passes(project: Project) -> None:
    run = open_stage("0_freeze_baseline", settings_for("plain"), "", project.root)
    record = run_freeze_stage(run)
    assert record.verdict.state is State.PASSED, record.verdict
    assert [fault.caught for fault in record.planted_faults] == [True, True]
    assert len(list((run.folder / "baseline").glob("*.json"))) == 1
    assert "passed" in close_stage(run, record)
    again = run_stage(project, settings_for("plain"))
    assert again.stable_digest == record.stable_digest


def test_the_frozen_batches_are_the_legacy_loaders_own(project: Project) -> None:
    from safetensors.torch import load_file

    from dualtrack.training.workload import load_workload, seed_everything

    settings = settings_for("plain")
    manifest = freeze_inputs(project, settings, "test")
    stored = load_file(project.frozen_folder(settings.workload) / BATCHES_FILE)
    seed_everything(settings.seed)
    for place, (images, labels) in enumerate(load_workload(settings.workload).legacy_loader("train")):
        assert stored[f"batch_{place:04d}.0"].equal(images)
        assert stored[f"batch_{place:04d}.1"].equal(labels)
    assert len(manifest.batches) == place + 1


def test_a_pipeline_that_does_not_repeat_fails_the_gate(project: Project) -> None:
    record = run_stage(project, settings_for("other_batches"))
    assert state_of(record, "batches_repeat") is State.FAILED
    assert record.verdict.state is State.FAILED


def test_a_model_that_does_not_repeat_fails_the_gate(project: Project) -> None:
    record = run_stage(project, settings_for("not_deterministic"))
    assert state_of(record, "batches_repeat") is State.PASSED
    assert state_of(record, "legacy_repeats") is State.FAILED


def test_a_loss_that_is_nan_is_named_and_never_green(project: Project) -> None:
    run = open_stage("0_freeze_baseline", settings_for("nan_loss"), "", project.root)
    record = run_freeze_stage(run)
    assert record.verdict.state is not State.PASSED
    assert {trial.outcome.cause for trial in record.trials} == {"non-finite loss"}
    with pytest.raises(GateNotPassed, match=r"non-finite loss|NonFiniteLoss"):
        close_stage(run, record)


def test_a_batch_of_an_own_class_is_refused_with_what_to_do(project: Project) -> None:
    with pytest.raises(TrialError, match=r"can't freeze a .*OwnBatch.*"):
        freeze_inputs(project, settings_for("own_batch_class"), "test")
    assert not project.frozen_inputs.exists()


def test_an_empty_loader_is_refused(project: Project) -> None:
    with pytest.raises(TrialError, match="expected batches with tensors"):
        freeze_inputs(project, settings_for("empty"), "test")


def test_a_recipe_keeps_digests_only_and_notices_a_change(project: Project) -> None:
    from dualtrack.training.frozen_run import load_frozen_batches

    settings = settings_for("plain", mode="recipe")
    manifest = freeze_inputs(project, settings, "test")
    folder = project.frozen_folder(settings.workload)
    assert not (folder / BATCHES_FILE).exists()
    assert len(load_frozen_batches(folder, manifest, settings.workload)) == len(manifest.batches)
    other = manifest.model_copy(update={"seed": manifest.seed + 1})
    with pytest.raises(FrozenInputError, match="batch 0 of the recipe differs"):
        load_frozen_batches(folder, other, settings.workload)


def test_freezing_again_needs_a_reason_keeps_the_old_and_shows_the_difference(project: Project) -> None:
    first = list(freeze_project(project, settings_for("plain"), "", None))
    assert any(line.startswith("frozen: 4 batches") for line in first)
    folder = project.frozen_folder(settings_for("plain").workload)
    before = load_manifest(folder)
    with pytest.raises(ValueError, match="expected --reason"):
        list(freeze_project(project, settings_for("plain", seed=7), "", None))
    lines = list(freeze_project(project, settings_for("plain", seed=7), "another seed", None))
    assert any("8 of 8 tensors differ" in line for line in lines)
    kept = folder / "history" / before.digest[:16]
    assert json.loads((kept / "manifest.json").read_text())["seed"] == before.seed
    assert (kept / "baselines").is_dir()
    assert load_manifest(folder).seed == 7


def test_declining_writes_nothing(project: Project) -> None:
    lines = list(freeze_project(project, settings_for("plain"), "", lambda question: False))
    assert lines[-1] == "nothing was written"
    assert not project.frozen_inputs.exists()


def test_damage_to_the_frozen_inputs_stops_a_stage_before_it_runs(project: Project, tmp_path: Path) -> None:
    settings = settings_for("plain")
    freeze_inputs(project, settings, "test")
    path = project.frozen_folder(settings.workload) / BATCHES_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(FrozenInputError, match=r"batch_\d{4}"):
        open_stage("0_freeze_baseline", settings, "", project.root)
