"""A stretch of planned training on one rank: steps a to b, what they gave, and a commit in between."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dualtrack.facts.digests import sha256_json
from dualtrack.facts.observations import Fact
from dualtrack.training.batch_slices import as_double, num_samples_in
from dualtrack.training.checkpoint import Position, generator_state, load_checkpoint, load_generators, save_checkpoint
from dualtrack.training.data_plan import DataPlan
from dualtrack.training.ddp_worker import RankContext
from dualtrack.training.frozen_batches import digest_parameters, digest_tensor
from dualtrack.training.gradient_buckets import BucketLayout, num_initial_buckets, observed_layout
from dualtrack.training.planned_loader import PlannedDataset, PlanSampler, indexed_dataset, plan_for
from dualtrack.training.rank_readiness import make_repeatable
from dualtrack.training.rank_training import (
    ParallelSettings,
    RankPath,
    StepClock,
    open_rank_path,
    parallelise,
    require_finite,
)
from dualtrack.training.workload import load_workload, seed_everything

MOST_REBUILD_STEPS = 5
"""DDP rebuilds its buckets after the first synchronised step, with a static graph one step later."""


class JobSpec(Fact):
    """What every rank trains."""

    workload: str
    seed: int
    data_fraction: float
    global_batch: int
    """0 takes the legacy loader's."""
    parallel: ParallelSettings
    path: RankPath
    equality: bool = True
    """Dropout and autocast off, deterministic algorithms on."""


class SegmentSpec(Fact):
    """Which steps to train, and what to keep of them."""

    start_step: int = 0
    num_steps: int
    shuffle_seed: int | None = None
    digest_every: int = 10
    """Parameters are digested after steps 1 and 2, after every so many, and after the last."""
    digest_after: tuple[int, ...] = ()
    """Further global steps after which they are."""
    num_sample_digests: int = 0
    """Steps from the start whose samples are digested one by one, and whose delivered batches are compared with what they were made of."""
    commit_after: int | None = None
    """Global step after which a checkpoint is committed."""
    commit_root: str = ""


class SegmentTrace(Fact):
    """What a stretch of training gave on one rank."""

    losses: tuple[float, ...]
    """This rank's mean losses; the mean over ranks is the loss of the global batch."""
    learning_rates: tuple[float, ...]
    num_samples: tuple[int, ...]
    """Samples of this rank a step, as delivered."""
    sample_digests: tuple[tuple[str, ...], ...]
    """By step, one a sample, as the dataset gave it."""
    batch_digests: tuple[tuple[str, str], ...]
    """By step: of those samples collated here and now, and of the batch that the stage 2 path delivered."""
    parameter_digests: dict[int, str]
    """Global step -> digest after it."""
    loader_stats: dict[str, Any]


class RankJob:
    """Model, DDP wrapper and optimizer of one rank, with its plan."""

    def __init__(self, context: RankContext, spec: JobSpec, float64: bool = False) -> None:
        """Build from equal seeds on all ranks; then seed each rank for itself, so that dropout masks differ between ranks."""
        self.context, self.spec, self.float64 = context, spec, float64
        self.workload = load_workload(spec.workload)
        legacy: Any = self.workload.legacy_loader("train")
        self.plan: DataPlan = plan_for(legacy, spec.data_fraction, spec.seed, spec.global_batch)
        self.dataset, self.collate = PlannedDataset(indexed_dataset(legacy), spec.seed), legacy.collate_fn
        seed_everything(spec.seed)
        self.model = self.workload.model()
        self.initial_digest = digest_parameters(self.model)
        self.notes = make_repeatable(self.workload, self.model) if spec.equality else []
        self.model = (self.model.double() if float64 else self.model).to(context.device)
        self.optimizer = self.workload.optimizer(self.model)
        self.parallel = parallelise(self.model, context, spec.parallel)
        self.num_initial_buckets = num_initial_buckets(self.parallel)
        seed_everything(spec.seed + 1 + context.rank)

    def layout(self) -> BucketLayout | None:
        """Return the layout that DDP rebuilt, or None before it did."""
        return observed_layout(self.parallel)

    def train(self, segment: SegmentSpec) -> SegmentTrace:
        """Train the segment through the stage 2 path."""
        context, stop = self.context, segment.start_step + segment.num_steps
        sampler = PlanSampler(
            self.plan, context.rank, context.world_size, segment.start_step, stop, segment.shuffle_seed
        )
        keep = _Kept()
        clock = StepClock(self.model, context.journal)
        with open_rank_path(self.workload, sampler, context, self.spec.path) as path:
            batches = iter(path)
            for step in range(segment.start_step, stop):
                clock.begin(step)
                batch = next(batches)
                if step - segment.start_step < segment.num_sample_digests:
                    keep.add_samples(self._planned_samples(step, segment.shuffle_seed), self.collate, batch)
                keep.num_samples.append(num_samples_in(batch))
                keep.losses.append(self._step(batch, step))
                keep.learning_rates.append(float(self.optimizer.param_groups[0]["lr"]))
                clock.end()
                done = step + 1
                is_early_or_last = done - segment.start_step <= 2 or done == stop
                if is_early_or_last or done % segment.digest_every == 0 or done in segment.digest_after:
                    keep.parameter_digests[done] = digest_parameters(self.model)
                if done == segment.commit_after:
                    self.commit(Path(segment.commit_root), done)
            stats = path.stats()
        clock.close()
        return keep.trace(stats)

    def commit(self, root: Path, global_step: int) -> None:
        """Commit a checkpoint: rank 0 writes, the others wait until it is there."""
        context = self.context
        context.journal.enter("checkpoint")
        mine = generator_state(context.device)
        generators: list[Any] | None = [None] * context.world_size if context.rank == 0 else None
        dist.gather_object(mine, generators)
        if generators is not None:
            position = Position(
                global_step=global_step, world_size=context.world_size, plan_digest=self.plan.digest(), seed=self.spec.seed,
                parameters_digest=digest_parameters(self.model),
            )  # fmt: skip
            save_checkpoint(root, position, self.model, self.optimizer, generators)
        dist.barrier()

    def resume(self, folder: Path) -> Position:
        """Continue from a committed step, bit for bit at the same world size.

        Throw-away steps come first: a fresh DDP sums everything in one bucket until it has rebuilt its buckets, and from 4 ranks on another
        bucket layout is another order of sums. Only then are model, optimizer and generators loaded.

        Raises:
            ValueError: The checkpoint belongs to another plan.
        """
        self._rebuild()
        position = load_checkpoint(folder, self.model, self.optimizer).position
        if position.plan_digest != self.plan.digest():
            raise ValueError(
                f"{folder.name} belongs to another data plan ({position.plan_digest[:12]}, here {self.plan.digest()[:12]})"
            )
        same = position.world_size == self.context.world_size and load_generators(
            folder, self.context.rank, self.context.device
        )
        if not same:  # another number of ranks: masks drawn from here on can't be those of the undisturbed run
            seed_everything(self.spec.seed + 1 + self.context.rank + position.global_step * 100_003)
        return position

    def _planned_samples(self, step: int, shuffle_seed: int | None) -> list[Any]:
        """Return this rank's samples of one step straight from the dataset, past loader, pool and prefetcher."""
        sampler = PlanSampler(self.plan, self.context.rank, self.context.world_size, step, step + 1, shuffle_seed)
        return [self.dataset[key] for key in next(iter(sampler))]

    def _rebuild(self) -> None:
        sampler = PlanSampler(self.plan, self.context.rank, self.context.world_size, 0, MOST_REBUILD_STEPS)
        with open_rank_path(self.workload, sampler, self.context, self.spec.path) as path:
            for step, batch in enumerate(path):
                self.context.journal.enter("forward", step)
                self._step(batch, step)
                if self.layout() is not None:
                    return

    def _step(self, batch: Any, step: int) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        self.context.journal.enter("forward")
        loss = self.workload.loss(self.parallel, as_double(batch) if self.float64 else batch)
        value = require_finite(loss, step)
        loss.backward()  # type: ignore[no-untyped-call]
        self.context.journal.enter("optimizer")
        self.optimizer.step()
        return value


class _Kept:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.learning_rates: list[float] = []
        self.num_samples: list[int] = []
        self.sample_digests: list[tuple[str, ...]] = []
        self.batch_digests: list[tuple[str, str]] = []
        self.parameter_digests: dict[int, str] = {}

    def add_samples(self, samples: list[Any], collate: Callable[[list[Any]], Any], delivered: Any) -> None:
        self.sample_digests.append(tuple(digest_values(sample)[:16] for sample in samples))
        self.batch_digests.append((digest_values(collate(samples)), digest_values(delivered)))

    def trace(self, stats: dict[str, Any]) -> SegmentTrace:
        return SegmentTrace(
            losses=tuple(self.losses), learning_rates=tuple(self.learning_rates), num_samples=tuple(self.num_samples),
            sample_digests=tuple(self.sample_digests), batch_digests=tuple(self.batch_digests), parameter_digests=self.parameter_digests, loader_stats=stats,
        )  # fmt: skip


def digest_values(tree: Any) -> str:
    """Return one digest over all leaves: tensors and arrays by their bytes, other values by their text."""
    parts = []
    for leaf in torch.utils._pytree.tree_leaves(tree):
        tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc" else leaf
        parts.append(digest_tensor(tensor) if isinstance(tensor, torch.Tensor) else repr(leaf))
    return sha256_json(parts)
