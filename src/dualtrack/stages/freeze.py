"""Stage 0: keep the legacy pipeline and what it delivers, so that every later stage has something to be compared with.

Freezes the legacy loader's first epoch or, where that was done, checks that the loader delivers it again; records the legacy outputs on
this hardware; measures the noise floor (legacy against legacy) and the headroom (the same steps on a cached batch).
"""

import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from dualtrack.facts.derivations import failures_from_trials
from dualtrack.facts.digests import sha256_bytes
from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import FrozenInputError
from dualtrack.facts.frozen_inputs import (
    BATCHES_FILE,
    LIMITS_FILE,
    MANIFEST_FILE,
    FrozenManifest,
    limits_json,
    load_limits,
    load_manifest,
    verify_batches,
)
from dualtrack.facts.observations import Divergence, Equality, Observation, Value
from dualtrack.facts.project import Project
from dualtrack.facts.records import PlantedFault, StageRecord
from dualtrack.facts.settings import FreezeSettings
from dualtrack.facts.verdicts import plant_fault
from dualtrack.measuring import provenance
from dualtrack.measuring.trials import run_or_raise
from dualtrack.stages.baseline import ensure_baseline, trace_path
from dualtrack.stages.comparison import compare_batches, compare_traces
from dualtrack.stages.default_limits import default_limits
from dualtrack.stages.stage_run import Findings, StageRun, save_record
from dualtrack.stages.trial_series import TrialSeries
from dualtrack.training.frozen_run import EqualityTrace, FrozenEpoch

RECORD = "dualtrack.training.frozen_run:record_epoch"


def freeze_inputs(project: Project, settings: FreezeSettings, reason: str) -> FrozenManifest:
    """Freeze the legacy loader's first epoch into `frozen_inputs/<workload>/`.

    An earlier freeze is kept under `history/<digest>/`; limits that are there already stay as they are.

    Raises:
        FrozenInputError: A batch can't be frozen without loss.
        TrialError: The legacy loader failed.
    """
    folder = project.frozen_folder(settings.workload)
    with tempfile.TemporaryDirectory(prefix="dualtrack-freeze-") as scratch:
        arguments = {
            "workload": settings.workload, "seed": settings.seed, "num_batches": settings.num_batches or None,
            "folder": scratch if settings.mode == "stored" else None,
        }  # fmt: skip
        epoch: FrozenEpoch = run_or_raise(RECORD, arguments, settings.trial_deadline_seconds)
        stored = Path(scratch) / BATCHES_FILE
        content = stored.read_bytes() if settings.mode == "stored" else None
    manifest = FrozenManifest(
        workload=settings.workload, mode=settings.mode, seed=settings.seed, batches=epoch.batches, loader=epoch.loader,
        random_states=epoch.random_states, created_at=datetime.now(UTC), reason=reason, conditions=provenance.collect("cpu"),
        batches_sha256=sha256_bytes(content) if content is not None else None,
    )  # fmt: skip
    _keep_earlier(folder)
    if content is not None:
        write_atomically(folder / BATCHES_FILE, content)
    if not (folder / LIMITS_FILE).exists():
        write_atomically(folder / LIMITS_FILE, limits_json(default_limits()))
    write_atomically(folder / MANIFEST_FILE, (manifest.model_dump_json(indent=1) + "\n").encode())
    return load_manifest(folder)


def run_freeze_stage(run: StageRun) -> StageRecord:
    """Freeze or verify, record or repeat the baseline, measure noise floor and headroom; save the record."""
    settings: FreezeSettings = run.settings
    if run.manifest is None:
        run.manifest = freeze_inputs(run.project, settings, "first freeze, by stage 0")
        run.limits = load_limits(run.frozen_folder)[run.stage]
        run.notes.append("Nothing was frozen yet: this run froze the legacy loader's first epoch.")
    findings = Findings(stable_keys=("batches_repeat", "legacy_repeats", "copy_keeps_batches", "num_frozen_batches"))
    findings.observe("batches_repeat", "legacy batches against the freeze", lambda: _batches_repeat(run))
    _repeat_training(run, findings)
    findings.observations["num_frozen_batches"] = Value(what="frozen batches", value=len(run.frozen.batches))
    series = TrialSeries(run)
    series.sample_memory(["legacy"])
    series.compare("legacy", settings.num_pairs, "noise floor")
    series.repeat("cached", max(3, settings.num_pairs // 2), "headroom")
    findings.trials = series.trials
    findings.observations["trial_failures"] = failures_from_trials(series.trials, "legacy and cached-batch runs")
    findings.planted_faults = [_plant_changed_byte(run), _plant_other_seed(run)]
    return save_record(run, findings)


def _repeat_training(run: StageRun, findings: Findings) -> None:
    """Train the legacy path on the frozen epoch again; its copies must be the frozen batches, and its steps the baseline's."""
    traces: list[EqualityTrace] = []

    def repeats() -> Observation:
        baseline = ensure_baseline(run)
        traces.append(trace_path(run, "legacy"))
        return compare_traces(baseline, traces[0])

    findings.observe("legacy_repeats", "legacy training against its baseline", repeats)
    if traces:
        what = "tensors that to_device() returned against the frozen batches (same containers, dtypes and bits)"
        findings.observe("copy_keeps_batches", what, lambda: compare_batches(what, run.frozen, traces[0].batches))


def _batches_repeat(run: StageRun) -> Equality:
    arguments = {
        "workload": run.settings.workload,
        "seed": run.frozen.seed,
        "num_batches": len(run.frozen.batches),
        "folder": None,
    }
    epoch: FrozenEpoch = run_or_raise(RECORD, arguments, run.settings.trial_deadline_seconds)
    return compare_batches("tensors of the legacy loader's first epoch against the freeze", run.frozen, epoch.batches)


def _plant_changed_byte(run: StageRun) -> PlantedFault:
    """Change one byte of the frozen batches (of a digest, where only digests are kept): the load has to name it."""
    caught_by = ""
    if run.frozen.mode == "stored":
        content = bytearray((run.frozen_folder / BATCHES_FILE).read_bytes())
        content[-1] ^= 1
        with tempfile.TemporaryDirectory(prefix="dualtrack-fault-") as scratch:
            (Path(scratch) / BATCHES_FILE).write_bytes(content)
            try:
                verify_batches(Path(scratch) / BATCHES_FILE, run.frozen)
            except FrozenInputError as error:
                caught_by = str(error).partition("/")[2]
        seen = Equality(
            what="stored tensors with one byte changed", num_compared=1, num_equal=0 if caught_by else 1, num_mismatched=1 if caught_by else 0,
            first_divergence=Divergence(where="last byte of the stored batches", legacy="as frozen", candidate=caught_by) if caught_by else None,
        )  # fmt: skip
    else:
        first = run.frozen.batches[0]
        changed = first.model_copy(update={"tensors": {name: digest[::-1] for name, digest in first.tensors.items()}})
        seen = compare_batches("digests of the first batch changed", run.frozen, (changed, *run.frozen.batches[1:]))
    return plant_fault("one byte of the frozen batches changed", "batches_repeat", seen, run.limits, run.device)


def _plant_other_seed(run: StageRun) -> PlantedFault:
    """Load with another seed: other augmentation and order have to differ from the freeze."""
    arguments = {
        "workload": run.settings.workload,
        "seed": run.frozen.seed + 1,
        "num_batches": len(run.frozen.batches),
        "folder": None,
    }
    epoch: FrozenEpoch = run_or_raise(RECORD, arguments, run.settings.trial_deadline_seconds)
    seen = compare_batches("legacy loader seeded with seed + 1", run.frozen, epoch.batches)
    return plant_fault("legacy loader started from another seed", "batches_repeat", seen, run.limits, run.device)


def _keep_earlier(folder: Path) -> None:
    """Move an earlier freeze to `history/<digest>/`, baselines included; nothing is deleted."""
    if not (folder / MANIFEST_FILE).exists():
        return
    earlier = FrozenManifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    kept = folder / "history" / earlier.digest[:16]
    kept.mkdir(parents=True, exist_ok=True)
    for name in (BATCHES_FILE, MANIFEST_FILE, "baselines"):
        if (folder / name).exists() and not (kept / name).exists():
            shutil.move(folder / name, kept / name)
        elif (folder / name).is_file():
            (folder / name).unlink()
