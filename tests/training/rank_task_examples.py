"""Tasks for launches in tests; ranks import this module by name."""

import math
import os
import threading
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dualtrack.facts.errors import NonFiniteLoss
from dualtrack.training.ddp_worker import RankContext
from dualtrack.training.loop import deterministic_algorithms
from dualtrack.training.rank_segment import JobSpec, RankJob, SegmentSpec


def toy_training(context: RankContext, num_steps: int = 3) -> dict[str, Any]:
    """Train a few steps of a small model under DDP, with every phase in the journal."""
    return _train(context, num_steps)


def checked_training(context: RankContext, nan_rank: int) -> dict[str, Any]:
    """Do the same with a loss that is NaN on one rank, checked before the reduction."""
    return _train(context, 3, nan_rank)


def weighed_training(context: RankContext) -> dict[str, Any]:
    """Do the same and say what this rank weighs."""
    result = _train(context, 3)
    return {**result, "pss_bytes": psutil.Process().memory_full_info().pss}


def lingering(context: RankContext) -> dict[str, Any]:
    """Finish, and leave a thread behind that keeps the process from exiting."""
    if context.rank == 0:
        threading.Thread(target=time.sleep, args=(300,)).start()
    return {"rank": context.rank}


def _train(context: RankContext, num_steps: int, nan_rank: int | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(context.device)
    parallel = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context.journal.begin_section()
    loss = torch.zeros(())
    for step in range(num_steps):
        started = time.monotonic()
        context.journal.enter("data", step)
        inputs = torch.randn(4, 8, device=context.device) * (
            math.nan if nan_rank == context.rank and step == 1 else 1.0
        )
        context.journal.enter("forward")
        own_seconds = time.monotonic() - started
        loss = parallel(inputs).square().mean()
        if not math.isfinite(float(loss)):
            raise NonFiniteLoss(f"step {step}: expected a finite loss, got {float(loss)}")
        context.journal.enter("reduce")
        loss.backward()
        context.journal.enter("optimizer")
        optimizer.step()
        context.journal.finish_step(own_seconds)
    return {
        "rank": context.rank, "pid": os.getpid(), "loss": float(loss.detach()), "world_size": dist.get_world_size(),
        "device": str(context.device),
    }  # fmt: skip


def train_and_commit(context: RankContext, job: dict[str, Any], segment: dict[str, Any]) -> dict[str, Any]:
    """Train a planned segment and commit where it says."""
    with deterministic_algorithms():
        return (
            RankJob(context, JobSpec.model_validate(job))
            .train(SegmentSpec.model_validate(segment))
            .model_dump(mode="json")
        )


def uneven_training(context: RankContext) -> str:
    """Force one batch more on rank 0, under torch's own guard for uneven inputs."""
    parallel = DistributedDataParallel(torch.nn.Linear(8, 8))
    with parallel.join(throw_on_early_termination=True):
        for step in range(3 + (context.rank == 0)):
            context.journal.enter("forward", step)
            parallel(torch.randn(4, 8)).sum().backward()
    return "no error"


def other_length(context: RankContext) -> str:
    """Reduce a tensor of another length on rank 1."""
    context.journal.begin_section()
    context.journal.enter("reduce", 0)
    dist.all_reduce(torch.ones(64 if context.rank == 1 else 1024))
    context.journal.enter("reduce", 1)
    dist.all_reduce(torch.ones(8))
    return "no error"
