"""`dualtrack rollback`: put the path before the active one back in the project's ledger, and check it on the frozen epoch."""

from datetime import UTC, datetime

from dualtrack.facts.errors import LedgerError
from dualtrack.facts.frozen_inputs import load_limits, load_manifest
from dualtrack.facts.ledger import LEGACY, PATH_AFTER, Ledger, RollbackEntry
from dualtrack.facts.project import Project
from dualtrack.facts.settings import FreezeSettings
from dualtrack.measuring import provenance
from dualtrack.stages.baseline import ensure_baseline
from dualtrack.stages.comparison import compare_traces
from dualtrack.stages.pool_sizes import PoolSizes
from dualtrack.stages.rollback import trace_active_path
from dualtrack.stages.stage_run import StageRun
from dualtrack.training.loop import choose_device


def roll_back(project: Project, *, who: str, why: str) -> str:
    """Roll the last promoted stage back and return what was checked.

    The entry is written first, so that new trainers start on the old path at once; the check follows and is recorded with its outcome.

    Raises:
        LedgerError: Nothing is promoted, or the check failed: the old path is active, and it does not equal the baseline.
    """
    ledger = Ledger(project.ledger)
    promoted = ledger.promoted_stages()
    if not promoted:
        raise LedgerError("expected a promoted stage to roll back, found none: the legacy path is active already")
    stage, from_path = promoted[-1], ledger.active_path()
    to_path = PATH_AFTER[promoted[-2]] if len(promoted) > 1 else LEGACY
    entry = RollbackEntry(at=datetime.now(UTC), stage=stage, from_path=from_path, to_path=to_path, who=who, why=why)
    ledger.append(entry)
    run = _checking_run(project)
    trace = trace_active_path(run, project.ledger, PoolSizes.choose(run.frozen))
    seen = compare_traces(ensure_baseline(run), trace)
    verified = trace.path == to_path and 0 < seen.num_compared == seen.num_equal
    ledger.append(entry.model_copy(update={"at": datetime.now(UTC), "verified": verified}))
    if not verified:
        raise LedgerError(
            f"rolled back from {from_path} to {to_path}, but the check failed: active path read back {trace.path!r}, "
            f"{seen.num_equal} of {seen.num_compared} steps equal the baseline; the baseline or the environment changed"
        )
    return f"rolled back {stage}: {from_path} -> {to_path}; read back {trace.path!r}, {seen.num_equal} of {seen.num_compared} steps equal the baseline"


def _checking_run(project: Project) -> StageRun:
    settings = FreezeSettings(workload=project.workload)
    folder = project.frozen_folder(project.workload)
    device = str(choose_device("auto"))
    return StageRun(
        stage="0_freeze_baseline", settings=settings, project=project, folder=project.new_run_folder("rollback"), device=device,
        hardware_identity=provenance.hardware_identity(device), started_at=datetime.now(UTC), conditions={"before": provenance.collect(device)},
        limits=load_limits(folder)["0_freeze_baseline"], manifest=load_manifest(folder),
    )  # fmt: skip
