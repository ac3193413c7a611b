"""The legacy outputs on this hardware: found, or recorded for this run; and the same training on any other path."""

from datetime import UTC, datetime
from pathlib import Path

from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.frozen_inputs import Baseline
from dualtrack.measuring.trials import run_or_raise
from dualtrack.stages.stage_run import StageRun
from dualtrack.training.data_paths import DEFAULT_CAP_BYTES
from dualtrack.training.frozen_run import EqualitySpec, EqualityTrace

TRAIN = "dualtrack.training.frozen_run:train_on_frozen_epoch"


def trace_path(
    run: StageRun, path: str, *, cap_bytes: int = DEFAULT_CAP_BYTES, slot_bytes: int | None = None
) -> EqualityTrace:
    """Train on the frozen epoch by `path` in a fresh process.

    Raises:
        TrialError: The process failed.
    """
    spec = EqualitySpec(
        workload=run.settings.workload, path=path, device=run.device, seed=run.frozen.seed, num_steps=len(run.frozen.batches),
        cap_bytes=cap_bytes, slot_bytes=slot_bytes,
    )  # fmt: skip
    trace: EqualityTrace = run_or_raise(TRAIN, {"spec": spec}, run.settings.trial_deadline_seconds)
    return trace


def ensure_baseline(run: StageRun) -> Baseline:
    """Return the baseline for this hardware; where none exists, record one in the run's folder and say so in its notes.

    Raises:
        FrozenInputError: The baseline found belongs to other frozen inputs.
        TrialError: The legacy path failed.
    """
    found = run.find_baseline()
    if found is not None:
        return found
    run.notes.append(
        f"No baseline existed for {run.hardware_identity}; the frozen inputs were verified and this run recorded one for itself."
    )
    return record_baseline(run, run.folder / "baseline")


def record_baseline(run: StageRun, folder: Path) -> Baseline:
    """Train the legacy path on the frozen epoch and store its outputs for this hardware in `folder`."""
    trace = trace_path(run, "legacy")
    baseline = Baseline(
        hardware_identity=run.hardware_identity, frozen_inputs_digest=run.frozen.digest, device=run.device, seed=run.frozen.seed,
        losses=trace.losses, gradient_norms=trace.gradient_norms, initial_parameters_digest=trace.initial_parameters_digest,
        final_parameters_digest=trace.final_parameters_digest, created_at=datetime.now(UTC), conditions=run.conditions["before"],
    )  # fmt: skip
    write_atomically(
        folder / f"{run.hardware_identity}.json", (baseline.model_dump_json(indent=1) + "\n").encode(), overwrite=True
    )
    return baseline
