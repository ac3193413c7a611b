"""Roll a path back for real, in the run's own ledger: activate the new path, roll back, read the active path back, and train on it.

The check trains the frozen epoch on whatever path the ledger names after the rollback and compares every step with the baseline bit for bit.
"""

import time
from datetime import UTC, datetime
from pathlib import Path

from dualtrack.facts.ledger import LEGACY, REHEARSAL, Ledger, Promotion, RollbackEntry
from dualtrack.facts.records import Rollback
from dualtrack.measuring.trials import run_or_raise
from dualtrack.stages.baseline import ensure_baseline
from dualtrack.stages.comparison import compare_traces
from dualtrack.stages.pool_sizes import PoolSizes
from dualtrack.stages.stage_run import StageRun
from dualtrack.training.frozen_run import EqualitySpec, EqualityTrace, train_on_frozen_epoch

TRAIN_ON_ACTIVE = "dualtrack.stages.rollback:train_on_active_path"


def execute_rollback(run: StageRun, from_path: str, sizes: PoolSizes, to_path: str = LEGACY) -> Rollback:
    """Rehearse the rollback from `from_path` to `to_path` in the run's ledger and check it.

    Raises:
        TrialError: Training on the path after the rollback failed.
    """
    started = time.monotonic()
    ledger = Ledger(run.folder / "ledger.jsonl")
    now, stage = datetime.now(UTC), run.stage
    ledger.append(
        Promotion(
            at=now,
            stage=stage,
            active_path=from_path,
            who=REHEARSAL,
            why="to be rolled back at once",
            run=run.folder.name,
        )
    )
    activated = ledger.active_path()
    entry = RollbackEntry(
        at=datetime.now(UTC),
        stage=stage,
        from_path=activated,
        to_path=to_path,
        who=REHEARSAL,
        why="every run rehearses its rollback",
    )
    ledger.append(entry)
    trace = trace_active_path(run, ledger.path, sizes)
    seen = compare_traces(ensure_baseline(run), trace)
    rollback = Rollback(
        from_path=activated, to_path=to_path, active_path_read_back=trace.path, num_steps_compared=seen.num_compared,
        num_steps_equal=seen.num_equal, seconds=round(time.monotonic() - started, 3),
        detail=f"ledger promoted {activated}, rolled back to {to_path}; a fresh process read {trace.path} and trained the frozen epoch",
    )  # fmt: skip
    ledger.append(entry.model_copy(update={"at": datetime.now(UTC), "verified": rollback.verified}))
    return rollback


def trace_active_path(run: StageRun, ledger: Path, sizes: PoolSizes) -> EqualityTrace:
    """Train on the frozen epoch, in a fresh process, by the path that the ledger names there."""
    spec = EqualitySpec(
        workload=run.settings.workload, path="read from the ledger", device=run.device, seed=run.frozen.seed,
        num_steps=len(run.frozen.batches), cap_bytes=sizes.cap_bytes, slot_bytes=sizes.slot_bytes,
    )  # fmt: skip
    arguments = {"ledger": str(ledger), "spec": spec}
    trace: EqualityTrace = run_or_raise(TRAIN_ON_ACTIVE, arguments, run.settings.trial_deadline_seconds)
    return trace


def train_on_active_path(ledger: str, spec: EqualitySpec) -> EqualityTrace:
    """Read the active path from the ledger and train on it; runs in a fresh process."""
    return train_on_frozen_epoch(spec.model_copy(update={"path": Ledger(Path(ledger)).active_path()}))
