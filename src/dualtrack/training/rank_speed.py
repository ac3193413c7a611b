"""Timed runs on ranks: the step of many beside the step of one, and what a bucket size is worth.

On CUDA a figure is bounded by synchronising at both edges of a window; on CPU it is wall time, which says something about the box's scheduler
and nothing about GPUs.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from dualtrack.facts.observations import Fact
from dualtrack.facts.records import Measured
from dualtrack.measuring import flops, memory
from dualtrack.training.batch_slices import num_samples_in
from dualtrack.training.ddp_worker import RankContext
from dualtrack.training.loop import precision_of
from dualtrack.training.planned_loader import PlanSampler
from dualtrack.training.rank_segment import JobSpec, RankJob
from dualtrack.training.rank_training import open_rank_path, parallelise, require_finite

SPEED = "dualtrack.training.rank_speed:measure_speed"
SWEEP = "dualtrack.training.rank_speed:sweep_buckets"
NUM_REBUILD_STEPS = 4
"""After these every variant has its own buckets, with a static graph too."""


class SpeedSpec(Fact):
    """A timed run."""

    job: JobSpec
    is_single: bool
    """The plain model of one process, without a DDP wrapper."""
    num_warmup_steps: int
    num_steps: int


class SweepVariant(Fact):
    """One way to send gradients."""

    name: str
    bucket_cap_mb: float | None
    sends: bool = True
    """False leaves the all-reduce out (`no_sync`): what the step costs without communication."""
    compress_bf16: bool = False


class SweepSpec(Fact):
    """Variants to measure in turn."""

    job: JobSpec
    variants: tuple[SweepVariant, ...]
    num_rounds: int
    num_steps: int


def measure_speed(context: RankContext, spec: dict[str, Any]) -> dict[str, Any]:
    """Train through the stage 2 path and time the steady window; returns the fields of a `Trial` that a rank knows."""
    asked = SpeedSpec.model_validate(spec)
    load_average = os.getloadavg()[0]
    job = RankJob(context, asked.job)
    model: torch.nn.Module = job.model if asked.is_single else job.parallel
    num_all = asked.num_warmup_steps + asked.num_steps
    context.journal.begin_section()
    window = _Window(context.device)
    waits: list[float] = []
    loss, batch = torch.zeros(()), None
    with open_rank_path(
        job.workload, PlanSampler(job.plan, context.rank, context.world_size, 0, num_all), context, asked.job.path
    ) as path:
        batches = iter(path)
        for step in range(num_all):
            if step == asked.num_warmup_steps:
                window.open()
            context.journal.enter("data", step)
            began = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - began)
            context.journal.enter("reduce")
            loss = _train_step(job, model, batch)
            if step >= asked.num_warmup_steps:
                window.mark()
        seconds = window.close()
        stats = path.stats()
    require_finite(loss, num_all - 1)
    size = num_samples_in(batch)
    counted = flops.count_step_flops(lambda: _train_step(job, job.model, batch))
    used = flops.model_flops_utilisation(
        counted, statistics.median(window.step_seconds()), context.device, precision_of(job.workload)
    )
    return {
        "batch_size": size, "num_warmup_steps": asked.num_warmup_steps, "num_steps": asked.num_steps, "step_seconds": window.step_seconds(),
        "data_wait_seconds": waits[asked.num_warmup_steps :], "samples_per_second": size * context.world_size * asked.num_steps / seconds,
        "flops_per_step": counted.model_dump(), "mfu": used.model_dump(), "peaks": _peaks(stats, context.device), "loader_stats": stats,
        "load_average": load_average,
    }  # fmt: skip


def sweep_buckets(context: RankContext, spec: dict[str, Any]) -> dict[str, Any]:
    """Measure every variant once a round, in turn and in reversed turn, on one cached batch.

    Returns:
        `seconds`: variant -> seconds a step, one a round; `compression_error`: relative L2 error of bf16 gradients where that is a variant.
    """
    asked = SweepSpec.model_validate(spec)
    job = RankJob(context, asked.job)
    sampler = PlanSampler(job.plan, context.rank, context.world_size, 0, 1)
    with open_rank_path(job.workload, sampler, context, asked.job.path) as path:
        batch = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, next(iter(path)))
    seconds: dict[str, list[float]] = {variant.name: [] for variant in asked.variants}
    for turn in range(asked.num_rounds):
        for variant in asked.variants if turn % 2 == 0 else reversed(asked.variants):
            context.journal.begin_section()
            seconds[variant.name].append(_time_variant(context, job, variant, batch, asked.num_steps))
    compressed = next((variant for variant in asked.variants if variant.compress_bf16), None)
    error = None if compressed is None else _compression_error(context, job, compressed, batch)
    return {"seconds": seconds, "compression_error": error}


def _train_step(job: RankJob, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    job.optimizer.zero_grad(set_to_none=True)
    loss = job.workload.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    job.optimizer.step()
    return loss.detach()


def _wrap(context: RankContext, job: RankJob, variant: SweepVariant) -> torch.nn.parallel.DistributedDataParallel:
    changes = {"bucket_cap_mb": variant.bucket_cap_mb, "compress_bf16": variant.compress_bf16}
    return parallelise(job.model, context, job.spec.parallel.model_copy(update=changes))


def _time_variant(context: RankContext, job: RankJob, variant: SweepVariant, batch: Any, num_steps: int) -> float:
    """Wrap anew, let DDP rebuild its buckets, then time the steps; the wrapper is gone before the next one comes."""
    job.model.zero_grad(set_to_none=True)  # gradients may be views into the buckets of the wrapper before
    gc.collect()  # a wrapper is part of a reference cycle, and holds as many bytes as the model
    parallel = _wrap(context, job, variant)
    silent: Callable[[], Any] = nullcontext if variant.sends else parallel.no_sync
    for step in range(NUM_REBUILD_STEPS):
        context.journal.enter("reduce", step)
        with silent():
            _train_step(job, parallel, batch)
    dist.barrier()
    window = _Window(context.device)
    window.open()
    for step in range(num_steps):
        context.journal.enter("reduce", NUM_REBUILD_STEPS + step)
        with silent():
            _train_step(job, parallel, batch)
    return window.close() / num_steps


def _compression_error(context: RankContext, job: RankJob, variant: SweepVariant, batch: Any) -> float:
    """Return the relative L2 distance of the compressed gradient from the uncompressed one, at the same weights."""
    found = []
    for one in (variant.model_copy(update={"compress_bf16": False}), variant):
        parallel = _wrap(context, job, one)
        job.model.zero_grad(set_to_none=True)
        job.workload.loss(parallel, batch).backward()  # type: ignore[no-untyped-call]
        found.append(
            torch.cat(
                [
                    parameter.grad.detach().double().reshape(-1)
                    for parameter in job.model.parameters()
                    if parameter.grad is not None
                ]
            )
        )
    return float((found[1] - found[0]).norm() / found[0].norm())


def _peaks(stats: dict[str, Any], device: torch.device) -> dict[str, Any]:
    pinned = stats.get("pinned_peak_bytes")
    peaks = {
        "pinned_peak_bytes": Measured(value=pinned, unit="bytes", reason=memory.NO_CUDA if pinned is None else None),
        "pool_peak_bytes": Measured(value=stats["pool_peak_bytes"], unit="bytes"),
        "device_peak_bytes": memory.device_peak_bytes(device),
        "pss_peak_bytes": Measured(value=float(memory.pss_bytes()), unit="bytes"),
    }
    return {name: value.model_dump() for name, value in peaks.items()}


class _Window:
    """A timed window, and the end of each step in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []
        self._opened = 0.0

    def open(self) -> None:
        self._synchronise()
        self._opened = time.perf_counter()
        self.mark()

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def close(self) -> float:
        self._synchronise()
        return time.perf_counter() - self._opened

    def step_seconds(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self.device.type == "cuda":
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
