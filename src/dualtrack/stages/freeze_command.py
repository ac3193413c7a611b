"""`dualtrack freeze`: estimate, ask, freeze, record the baseline of this hardware, and show what changed against an earlier freeze."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from dualtrack.facts.errors import FrozenInputError
from dualtrack.facts.frozen_inputs import FrozenManifest, load_limits, load_manifest
from dualtrack.facts.project import Project
from dualtrack.facts.settings import FreezeSettings
from dualtrack.measuring import provenance
from dualtrack.measuring.trials import run_or_raise
from dualtrack.stages.baseline import record_baseline
from dualtrack.stages.comparison import compare_batches
from dualtrack.stages.freeze import RECORD, freeze_inputs
from dualtrack.stages.stage_run import StageRun
from dualtrack.training.frozen_run import FrozenEpoch
from dualtrack.training.loop import choose_device


def freeze_project(
    project: Project, settings: FreezeSettings, reason: str, confirm: Callable[[str], bool] | None
) -> Iterator[str]:
    """Freeze a workload into the project and yield what there is to say, line by line.

    Args:
        project: Where `frozen_inputs/` is.
        settings: Workload, seed, number of batches and mode.
        reason: Why; required where something is frozen already.
        confirm: Asks before anything is written; None does not ask.

    Raises:
        ValueError: Something is frozen already and no reason was given.
        FrozenInputError: A batch can't be frozen without loss.
    """
    folder = project.frozen_folder(settings.workload)
    earlier = _earlier(project, settings)
    if earlier is not None and not reason:
        raise ValueError(
            f"{settings.workload!r} is frozen already (digest {earlier.digest[:16]}); expected --reason with why it must change, got none"
        )
    yield _estimate(settings)
    if confirm is not None and not confirm("freeze now?"):
        yield "nothing was written"
        return
    manifest = freeze_inputs(project, settings, reason or "first freeze")
    yield f"frozen: {len(manifest.batches)} batches, digest {manifest.digest[:16]}, mode {manifest.mode}"
    if earlier is not None:
        yield _difference(earlier, manifest)
    device = str(choose_device(settings.device))
    run = StageRun(
        stage="0_freeze_baseline", settings=settings, project=project, folder=folder, device=device, started_at=datetime.now(UTC),
        hardware_identity=provenance.hardware_identity(device), conditions={"before": provenance.collect(device)},
        limits=load_limits(folder)["0_freeze_baseline"], manifest=manifest,
    )  # fmt: skip
    baseline = record_baseline(run, folder / "baselines")
    yield f"baseline of {run.hardware_identity}: {len(baseline.losses)} steps, loss {baseline.losses[0]:.4f} -> {baseline.losses[-1]:.4f}"


def _earlier(project: Project, settings: FreezeSettings) -> FrozenManifest | None:
    folder = project.frozen_folder(settings.workload)
    return load_manifest(folder) if (folder / "manifest.json").is_file() else None


def _estimate(settings: FreezeSettings) -> str:
    """Load one batch in a fresh process and say what the whole freeze will take."""
    started = time.monotonic()
    arguments = {"workload": settings.workload, "seed": settings.seed, "num_batches": 1, "folder": None}
    epoch: FrozenEpoch = run_or_raise(RECORD, arguments, settings.trial_deadline_seconds)
    seconds = time.monotonic() - started
    num_batches = settings.num_batches or epoch.loader.get("num_batches")
    if not epoch.batches:
        raise FrozenInputError(f"expected a batch from {settings.workload}'s legacy loader, got none")
    size = epoch.batches[0].num_bytes
    if num_batches is None:
        return (
            f"one batch has {size:,} bytes and came after {seconds:.1f} s; the loader does not say how many there are"
        )
    disk = f"{size * num_batches:,} bytes on disk" if settings.mode == "stored" else "digests only on disk"
    return f"about {num_batches} batches of {size:,} bytes: {disk}; the first batch came after {seconds:.1f} s"


def _difference(earlier: FrozenManifest, manifest: FrozenManifest) -> str:
    seen = compare_batches("", earlier, manifest.batches)
    if earlier.digest == manifest.digest:
        return "nothing changed against the earlier freeze"
    first = f"; first at {seen.first_divergence.where}" if seen.first_divergence else ""
    return f"against the earlier freeze {seen.num_mismatched} of {seen.num_compared} tensors differ{first}; kept under history/{earlier.digest[:16]}/"
