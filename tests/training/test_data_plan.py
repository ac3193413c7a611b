"""The data plan is arithmetic: coverage, resume and world sizes are checked without a process."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtrack.training.data_plan import DataPlan

DIGITS = {"num_samples": 1437, "global_batch": 64, "data_fraction": 0.1, "seed": 7}


def digits_plan(**changes: float) -> DataPlan:
    return DataPlan(**{**DIGITS, **changes})  # type: ignore[arg-type]


def test_a_tenth_of_the_digits_is_floored_to_two_full_steps_and_the_rest_is_listed() -> None:
    plan = digits_plan()
    assert (plan.num_wanted, plan.steps_per_epoch) == (143, 2)
    assert len(plan.selected_ids) == 128
    assert len(plan.dropped_ids) == 15
    assert not set(plan.selected_ids.tolist()) & set(plan.dropped_ids.tolist())


@given(
    num_samples=st.integers(64, 3000),
    exponent=st.integers(0, 6),
    fraction=st.floats(0.05, 1.0),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
)
def test_ranks_share_every_step_without_overlap_and_every_epoch_is_the_subset(
    num_samples: int, exponent: int, fraction: float, seed: int, epoch: int
) -> None:
    if int(num_samples * fraction) < 64:
        return
    plan = DataPlan(num_samples=num_samples, global_batch=64, data_fraction=fraction, seed=seed)
    world_size, seen = 2**exponent, []
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        shards = [plan.rank_ids(step, rank, world_size) for rank in range(world_size)]
        assert {len(shard) for shard in shards} == {64 // world_size}
        assert np.concatenate(shards).tolist() == plan.step_ids(step).tolist()
        seen += np.concatenate(shards).tolist()
    assert sorted(seen) == sorted(plan.selected_ids.tolist())


def test_a_thousand_ranks_share_an_epoch_without_any_process() -> None:
    plan = DataPlan(num_samples=100_000, global_batch=8000, data_fraction=0.1, seed=3)
    shards = [plan.rank_ids(0, rank, 1000) for rank in range(1000)]
    assert len({sample for shard in shards for sample in shard.tolist()}) == 8000


def test_the_same_step_holds_the_same_samples_at_every_world_size() -> None:
    plan = digits_plan()
    for world_size in (1, 4, 8, 32):
        joined = np.concatenate([plan.rank_ids(5, rank, world_size) for rank in range(world_size)])
        assert joined.tolist() == plan.step_ids(5).tolist()


def test_epochs_differ_and_the_same_seed_repeats_them() -> None:
    assert digits_plan().epoch_ids(0).tolist() != digits_plan().epoch_ids(1).tolist()
    assert digits_plan().epoch_ids(1).tolist() == digits_plan().epoch_ids(1).tolist()
    assert digits_plan(seed=8).digest() != digits_plan().digest()


@pytest.mark.parametrize(("world_size", "said"), [(3, "uneven"), (128, "more|at most 64 ranks"), (0, "at least 1")])
def test_uneven_shards_and_more_ranks_than_samples_are_refused(world_size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        digits_plan().rank_ids(0, 0, world_size)


def test_a_subset_below_one_global_batch_is_refused_with_the_figures() -> None:
    with pytest.raises(ValueError, match=r"global batch of 64 samples, got 14 \(1% of 1437\)"):
        digits_plan(data_fraction=0.01)


@pytest.mark.parametrize("fraction", [0.0, 1.5, -1.0])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="data_fraction"):
        digits_plan(data_fraction=fraction)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.\.3"):
        digits_plan().rank_ids(0, 4, 4)
