"""One rank trains: model under DDP, planned data through the stage 2 path, every phase in the journal."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dualtrack.facts.errors import NonFiniteLoss
from dualtrack.facts.observations import Fact
from dualtrack.loading.pinned_budget import PinnedBudget
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.stream_prefetcher import CUDADataPrefetcher
from dualtrack.training.ddp_worker import RankContext
from dualtrack.training.gradient_buckets import trainable
from dualtrack.training.planned_loader import PlanSampler, planned_loader
from dualtrack.training.rank_journal import RankJournal
from dualtrack.training.workload import Workload

GradientFault = Literal["", "duplicated shard", "sum instead of mean", "scaled loss"]


class ParallelSettings(Fact):
    """How gradients are averaged; nothing is left to DDP's defaults but what torch versions disagree on."""

    bucket_cap_mb: float | None
    """MiB; None is DDP's own default, whose first bucket is 1 MiB."""
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    compress_bf16: bool = False
    """Send gradients as bfloat16: a labelled variant with an error of its own, never part of an equality run."""
    planted: GradientFault = ""
    """A fault put in on purpose, for the gates to catch."""


class RankPath(Fact):
    """The stage 2 path of one rank."""

    host_cap_bytes: int
    """Most bytes of all pools of a host; a rank gets its equal share."""
    num_workers: int = 0
    """Loader processes of a rank."""


def parallelise(model: torch.nn.Module, context: RankContext, settings: ParallelSettings) -> DistributedDataParallel:
    """Wrap a model that is on its device already."""
    # bucket_cap_mb is annotated int; fractions work in 2.11 to 2.13. Options that these versions name differently stay unset
    cap = cast("int", settings.bucket_cap_mb)
    parallel = DistributedDataParallel(
        model, device_ids=[context.device.index] if context.device.type == "cuda" else None, bucket_cap_mb=cap,
        gradient_as_bucket_view=settings.gradient_as_bucket_view, static_graph=settings.static_graph,
    )  # fmt: skip
    if settings.compress_bf16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        parallel.register_comm_hook(None, bf16_compress_hook)
    if settings.planted == "sum instead of mean":
        parallel.register_comm_hook(None, _sum_hook)
    return parallel


def _sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Forget to divide, as a hook easily does: with a hook DDP no longer divides itself."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


@contextmanager
def open_rank_path(
    workload: Workload, sampler: PlanSampler, context: RankContext, path: RankPath
) -> Iterator["OpenRankPath"]:
    """Open the stage 2 path over a rank's share of the plan: pool under the host's budget, then the prefetcher."""
    loader = planned_loader(workload.legacy_loader("train"), sampler, path.num_workers)
    budget = PinnedBudget(path.host_cap_bytes).share(context.ranks_on_host)
    pooled = PooledLoader(
        loader, device=context.device, cap_bytes=budget.total_bytes, budget=budget, name=f"rank {context.rank}"
    )
    prefetcher = CUDADataPrefetcher(pooled, context.device, deadline_seconds=context.timeout_seconds)
    try:
        yield OpenRankPath(pooled, prefetcher)
    finally:
        prefetcher.close()
        pooled.close()


class OpenRankPath:
    """An open path: iterate it once for the planned steps."""

    def __init__(self, pooled: PooledLoader, prefetcher: CUDADataPrefetcher) -> None:
        """Hold both; `open_rank_path` closes them."""
        self.pooled, self.prefetcher = pooled, prefetcher

    def __iter__(self) -> Iterator[Any]:
        """Yield device batches."""
        return iter(self.prefetcher)

    def stats(self) -> dict[str, Any]:
        """Return the pool's figures."""
        return self.pooled.stats().model_dump(mode="json", exclude={"queue_depth", "slots_in_use"})


class StepClock:
    """Notes, inside backward, when the first and the last of this rank's own gradients were ready.

    The first is where the buckets start to travel (phase `reduce`); up to the last is the rank's own time, what follows is waiting. On CUDA
    these are the host's moments, which run ahead of the device.
    """

    def __init__(self, model: torch.nn.Module, journal: RankJournal) -> None:
        """Hook every trainable parameter of a plain model."""
        self.journal, self._last_seconds, self._started = journal, 0.0, 0.0
        self._hooks: list[Any] = [
            parameter.register_hook(self._ready)  # type: ignore[no-untyped-call]
            for parameter in trainable(model.parameters())
        ]

    def _ready(self, gradient: torch.Tensor) -> None:
        if self.journal.entry.phase != "reduce":
            self.journal.enter("reduce")
        self._last_seconds = time.monotonic()

    def begin(self, step: int) -> None:
        """Note that the rank asks for the batch of `step`."""
        self._started = time.monotonic()
        self.journal.enter("data", step)

    def end(self) -> None:
        """Note that the step is done, and what it took this rank itself."""
        self.journal.finish_step(max(0.0, self._last_seconds - self._started))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def require_finite(loss: torch.Tensor, step: int) -> float:
    """Return the loss, checked before its gradients are averaged: later a NaN is everywhere, and nobody knows whose it was.

    Raises:
        NonFiniteLoss: It is NaN or infinite.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        raise NonFiniteLoss(
            f"step {step}: expected a finite loss, got {value}; look at this rank's batch or lower the learning rate"
        )
    return value
