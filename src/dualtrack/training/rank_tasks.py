"""The tasks that stage 3 gives to its ranks; each runs on every rank and returns plain data."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dualtrack.facts.digests import sha256_json
from dualtrack.facts.observations import Fact
from dualtrack.measuring.memory import pss_bytes
from dualtrack.training.checkpoint import latest_commit
from dualtrack.training.ddp_worker import RankContext
from dualtrack.training.frozen_batches import digest_parameters
from dualtrack.training.rank_checks import legacy_errors, probe_gradients
from dualtrack.training.rank_readiness import equality_numerics, make_repeatable
from dualtrack.training.rank_segment import JobSpec, RankJob, SegmentSpec
from dualtrack.training.workload import load_workload, seed_everything

VERIFY = "dualtrack.training.rank_tasks:verify_rung"
PROBE = "dualtrack.training.rank_tasks:probe_only"
RESUME = "dualtrack.training.rank_tasks:resume_rung"


class ResumeSpec(Fact):
    """A commit to continue from, and how far."""

    job: JobSpec
    root: str
    num_steps: int
    float64: bool
    commit_root: str = ""
    """Where to commit the last step; empty commits nothing."""


class VerifySpec(Fact):
    """What a rung does to be verified."""

    job: JobSpec
    legacy_folder: str
    num_gradient_batches: int
    curve32: SegmentSpec
    curve64: SegmentSpec | None
    """None where the workload does not run in float64."""
    num_repeated_steps: int
    """Steps of the float32 curve that are run a second time from the start."""
    band_seeds: tuple[int, ...] = ()
    """Only with one rank: reruns of the float32 curve with the samples of each batch in another order."""
    continued: ResumeSpec | None = None
    """A commit of the rung below to continue from with this rung's number of ranks."""


def verify_rung(context: RankContext, spec: dict[str, Any]) -> dict[str, Any]:
    """Run every part of checks V1 to V13 that needs this rank."""
    asked = VerifySpec.model_validate(spec)
    folder = Path(asked.legacy_folder)
    with equality_numerics():
        job = RankJob(context, asked.job)
        found: dict[str, Any] = {
            "facts": configuration(context, job),
            "initial_digest": job.initial_digest,
            "notes": job.notes,
        }
        found["ids"] = _ids(job, asked.curve32.num_steps)
        found["probe"] = _probe(context, asked.job, folder, asked.num_gradient_batches)
        found |= _gradients(context, asked.job, folder, has_float64=asked.curve64 is not None)
        context.journal.begin_section()
        found["num_initial_buckets"] = job.num_initial_buckets
        found["curve32"] = job.train(asked.curve32).model_dump(mode="json")
        layout = job.layout()
        found["layout"] = None if layout is None else layout.model_dump(mode="json")
        found["repeated"] = _train_anew(
            context,
            asked.job,
            asked.curve32.model_copy(update={"num_steps": asked.num_repeated_steps, "commit_after": None}),
        )
        if asked.curve64 is not None:
            found["curve64"] = _train_anew(context, asked.job, asked.curve64, float64=True)
        if asked.continued is not None:
            found["continued"] = _resume(context, asked.continued)
        found["band"] = [
            _train_anew(
                context, asked.job, asked.curve32.model_copy(update={"shuffle_seed": seed, "commit_after": None})
            )["losses"]
            for seed in asked.band_seeds
        ]
    found["pss_bytes"] = pss_bytes()
    found["device_peak_bytes"] = (
        torch.cuda.max_memory_allocated(context.device) if context.device.type == "cuda" else None
    )
    return found


def probe_only(context: RankContext, spec: dict[str, Any]) -> dict[str, Any]:
    """Run the integer probe alone, for planted faults."""
    asked = VerifySpec.model_validate(spec)
    return {"probe": _probe(context, asked.job, Path(asked.legacy_folder), asked.num_gradient_batches)}


def resume_rung(context: RankContext, specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Continue from the last commit of each root, one after another, and say where and with what."""
    with equality_numerics():
        return [_resume(context, ResumeSpec.model_validate(spec)) for spec in specs]


def _resume(context: RankContext, asked: ResumeSpec) -> dict[str, Any]:
    context.journal.begin_section()
    job = RankJob(context, asked.job, asked.float64)
    folder = latest_commit(Path(asked.root))
    if folder is None:
        raise FileNotFoundError(
            f"expected a commit under {Path(asked.root).name}/, found none; run the rung that commits it first"
        )
    position = job.resume(folder)
    loaded_digest = digest_parameters(job.model)
    stop = position.global_step + asked.num_steps
    segment = SegmentSpec(
        start_step=position.global_step,
        num_steps=asked.num_steps,
        commit_after=stop if asked.commit_root else None,
        commit_root=asked.commit_root,
    )
    trace = job.train(segment)
    return {
        "world_size": dist.get_world_size(), "from_world_size": position.world_size, "start_step": position.global_step,
        "committed_digest": position.parameters_digest, "loaded_digest": loaded_digest,
        "ids": _ids(job, asked.num_steps, position.global_step), "curve": trace.model_dump(mode="json"),
    }  # fmt: skip


def configuration(context: RankContext, job: RankJob) -> dict[str, Any]:
    """Return what all ranks must agree on, because DDP itself compares neither caps nor data order (V1)."""
    parameters = [[name, list(value.shape), str(value.dtype)] for name, value in job.model.named_parameters()]
    return {
        "torch": torch.__version__, "python": sys.version.split()[0], "backend": context.backend, "world_size": context.world_size,
        "timeout_seconds": context.timeout_seconds, "parameters": sha256_json(parameters), "plan": job.plan.digest(),
        "settings": sha256_json(job.spec.model_dump(mode="json")), "bucket_cap_mb": job.spec.parallel.bucket_cap_mb,
        "seed": job.spec.seed, "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip


def _ids(job: RankJob, num_steps: int, start_step: int = 0) -> list[list[int]]:
    context = job.context
    return [
        job.plan.rank_ids(step, context.rank, context.world_size).tolist()
        for step in range(start_step, start_step + num_steps)
    ]


def _probe(context: RankContext, job: JobSpec, folder: Path, num_batches: int) -> list[str]:
    context.journal.begin_section()
    return probe_gradients(context, job.parallel, folder, num_batches, job.seed)


def _gradients(context: RankContext, job: JobSpec, folder: Path, has_float64: bool) -> dict[str, Any]:
    """Compare with the legacy gradients in float64 where the workload has it, and in float32; errors are rank 0's, digests everybody's."""
    found: dict[str, Any] = {}
    for precision in ("float64", "float32") if has_float64 else ("float32",):
        context.journal.begin_section()
        workload = load_workload(job.workload)
        seed_everything(job.seed)
        model = workload.model()
        make_repeatable(workload, model)
        model = (model.double() if precision == "float64" else model).to(context.device)
        seen = legacy_errors(context, workload, model, job.parallel, folder, precision)
        found[precision] = {"digests": seen["digests"], "errors": seen["errors"] if context.rank == 0 else []}
    return found


def _train_anew(context: RankContext, job: JobSpec, segment: SegmentSpec, float64: bool = False) -> dict[str, Any]:
    """Train a segment from the start, with a wrapper of its own: a used one has its buckets rebuilt already, and other bits."""
    context.journal.begin_section()
    return RankJob(context, job, float64).train(segment).model_dump(mode="json")
