"""A rank's loader: the legacy dataset in planned order, with augmentation that does not depend on the world size."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from dualtrack.facts.errors import StageRefused
from dualtrack.training.planned_loader import PlanSampler, plan_for, planned_loader, seeded_draws
from dualtrack.workloads.digits import create

LEGACY = create().legacy_loader("train")
PLAN = plan_for(LEGACY, 0.1, 5)


def delivered(rank: int, world_size: int, num_steps: int = 3, **options: Any) -> list[list[torch.Tensor]]:
    workers = options.pop("num_workers", 0)
    return list(planned_loader(LEGACY, PlanSampler(PLAN, rank, world_size, 0, num_steps, **options), workers))


@pytest.mark.parametrize("world_size", [4, 32])
def test_ranks_together_deliver_what_one_process_delivers_bit_for_bit(world_size: int) -> None:
    alone = delivered(0, 1)
    shards = [delivered(rank, world_size) for rank in range(world_size)]
    for step, (images, labels) in enumerate(alone):
        assert torch.equal(torch.cat([shard[step][0] for shard in shards]), images)
        assert torch.equal(torch.cat([shard[step][1] for shard in shards]), labels)


def test_workers_deliver_what_the_main_process_delivers() -> None:
    for mine, theirs in zip(delivered(1, 4), delivered(1, 4, num_workers=2), strict=True):
        assert torch.equal(mine[0], theirs[0])


def test_augmentation_differs_between_epochs() -> None:
    sample = int(PLAN.selected_ids[0])
    first, second = (next(iter(planned_loader(LEGACY, _Fixed(PLAN, [(epoch, sample)])))) for epoch in (0, 1))
    assert not torch.equal(first[0], second[0])


def test_a_shuffled_global_batch_holds_the_same_samples_in_another_order() -> None:
    plain, shuffled = delivered(0, 1, 1)[0][0], delivered(0, 1, 1, shuffle_seed=1)[0][0]
    assert not torch.equal(plain, shuffled)
    assert sorted(image.sum().item() for image in plain) == sorted(image.sum().item() for image in shuffled)


def test_global_generators_are_as_they_were_before_a_loader_is_read() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    delivered(0, 4)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_sample_draws_the_same_whatever_was_drawn_before() -> None:
    drawn = []
    for _ in range(2):
        with seeded_draws(1, 2, 3):
            drawn.append((random.random(), float(np.random.uniform()), float(torch.rand(()))))
        random.random()
        torch.rand(3)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("other", [(9, 2, 3), (1, 9, 3), (1, 2, 9)])
def test_seed_epoch_and_sample_each_change_what_is_drawn(other: tuple[int, int, int]) -> None:
    drawn = []
    for key in ((1, 2, 3), other):
        with seeded_draws(*key):
            drawn.append((random.random(), float(np.random.uniform()), float(torch.rand(()))))
    assert all(one != another for one, another in zip(*drawn, strict=True))


def test_a_dataset_without_indices_is_refused_with_the_reason() -> None:
    with pytest.raises(StageRefused, match="without indices a plan can't say"):
        plan_for(DataLoader(_Stream(), batch_size=4), 1.0, 0)


def test_a_loader_that_is_no_dataloader_is_refused() -> None:
    with pytest.raises(StageRefused, match="expected a torch DataLoader"):
        plan_for([1, 2, 3], 1.0, 0)


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class _Fixed(PlanSampler):
    def __init__(self, plan: Any, keys: list[tuple[int, int]]) -> None:
        super().__init__(plan, 0, 1, 0, 1)
        self.keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        yield self.keys
