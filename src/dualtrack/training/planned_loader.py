"""A rank's share of a data plan as a plain DataLoader over the legacy dataset and its collate function.

Every sample is drawn with `random`, `numpy.random` and `torch` seeded from (seed, epoch, sample id), so its augmentation does not depend on
world size, worker or order; the global generators are put back afterwards.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dualtrack.facts.errors import StageRefused
from dualtrack.training.data_plan import DataPlan

Key = tuple[int, int]
"""Epoch and sample id."""


def plan_for(legacy: Any, data_fraction: float, seed: int, global_batch: int = 0) -> DataPlan:
    """Return the plan over a legacy loader's dataset.

    Args:
        legacy: The workload's legacy training loader.
        data_fraction: Share of the dataset.
        seed: Seeds subset and epochs.
        global_batch: Samples a step over all ranks; 0 takes the legacy loader's batch size.

    Raises:
        StageRefused: The loader is no DataLoader, or its dataset has no indices; a plan needs both.
        ValueError: The fraction holds no full batch.
    """
    dataset = indexed_dataset(legacy)
    size = global_batch or legacy.batch_size
    if not size:
        raise StageRefused(
            "expected a batch size on the legacy loader, got a batch sampler of its own; pass global_batch"
        )
    return DataPlan(num_samples=len(dataset), global_batch=int(size), data_fraction=data_fraction, seed=seed)


def indexed_dataset(legacy: Any) -> Any:
    """Return the legacy loader's dataset, which must have indices and a length.

    Raises:
        StageRefused: It has none, so "rank r gets these samples" can't be said; the message says what to do.
    """
    if not isinstance(legacy, DataLoader):
        raise StageRefused(
            f"expected a torch DataLoader from legacy_loader('train'), got a {type(legacy).__name__}; a data plan needs dataset and collate_fn"
        )
    dataset = legacy.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise StageRefused(
            f"expected a dataset with indices and a length, got {type(dataset).__name__}: without indices a plan can't say which rank gets which sample, "
            "and nobody could check that none is lost or repeated; give the workload a map-style dataset for stage 3"
        )
    return dataset


class PlannedDataset(Dataset[Any]):
    """The legacy dataset, read by (epoch, sample id); what it draws is decided by these two alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        """Wrap `dataset`; nothing is read."""
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: Key) -> Any:
        """Return one sample, with every generator seeded for it."""
        epoch, sample = key
        with seeded_draws(self.seed, epoch, sample):
            return self.dataset[sample]


class PlanSampler:
    """Yields a rank's (epoch, sample id) lists for the steps from `start_step` to `stop_step`, over as many epochs as that takes."""

    def __init__(
        self,
        plan: DataPlan,
        rank: int,
        world_size: int,
        start_step: int,
        stop_step: int,
        shuffle_seed: int | None = None,
    ) -> None:
        """Prepare; `shuffle_seed` permutes the samples inside each global batch, which changes rounding and nothing else."""
        plan.batch_per_rank(world_size)
        self.plan, self.rank, self.world_size, self.shuffle_seed = plan, rank, world_size, shuffle_seed
        self.steps = range(start_step, stop_step)

    def __iter__(self) -> Iterator[list[Key]]:
        """Yield one list a step."""
        for step in self.steps:
            epoch, _ = self.plan.position(step)
            ids = self.plan.rank_ids(step, self.rank, self.world_size)
            if self.shuffle_seed is not None:
                ids = np.random.Generator(np.random.PCG64([self.shuffle_seed, step])).permutation(ids)
            yield [(epoch, int(sample)) for sample in ids]

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.steps)


def planned_loader(legacy: Any, sampler: PlanSampler, num_workers: int = 0) -> DataLoader[Any]:
    """Return the loader of one rank: legacy dataset, legacy collate function, planned order.

    Args:
        legacy: The workload's legacy training loader; it is read, not changed.
        sampler: The rank's steps.
        num_workers: Loader processes of this rank; many ranks on a host want 0.
    """
    dataset = PlannedDataset(indexed_dataset(legacy), sampler.plan.seed)
    return DataLoader(
        dataset, batch_sampler=sampler, collate_fn=legacy.collate_fn, num_workers=num_workers, worker_init_fn=legacy.worker_init_fn,
        generator=torch.Generator(),  # iterating draws a base seed; from here rather than from the global generator
    )  # fmt: skip


@contextlib.contextmanager
def seeded_draws(seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Seed the three generators for one sample, and put their states back."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence([seed, epoch, sample]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    # not torch.manual_seed: in a process without CUDA that queues a call for every GPU, once a sample, for ever
    torch.default_generator.manual_seed(int(words[2]))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
