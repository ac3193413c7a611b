"""The collate that fills slots gives what the loader's own collate gives, errors included, in a worker and in the trainer."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from example_datasets import Point, TaggedDict
from hypothesis import given
from hypothesis import strategies as st
from pool_fakes import same
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as worker_module

from dualtrack.facts.errors import CapacityError, PoolError
from dualtrack.loading.pinned_pool import PinnedPool, PoolSettings
from dualtrack.loading.slot_collate import CollatedBatch, SlotCollate
from dualtrack.loading.slot_states import SlotState, stop_when_abandoned

DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64)


@st.composite
def sample_makers(draw: st.DrawFn, depth: int = 2) -> Any:
    """A function `index -> sample` of one structure; some structures change from sample to sample, so that collating fails."""
    kind = draw(
        st.sampled_from(
            ["tensor", "ragged", "mixed", "array", "scalar", "int", "float", "bool", "text", "dict", "list", "point"]
        )
    )
    if kind in ("dict", "list", "point") and depth == 0:
        kind = "int"
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    if kind in ("dict", "list", "point"):
        first, second = draw(sample_makers(depth - 1)), draw(sample_makers(depth - 1))
        return {
            "dict": lambda index: TaggedDict(a=first(index), b=second(index)),
            "list": lambda index: [first(index), second(index)],
            "point": lambda index: Point(first(index), second(index)),
        }[kind]
    return {
        "tensor": lambda index: torch.full(shape, index % 2).to(dtype),
        "ragged": lambda index: torch.zeros(1 + index % 2),
        "mixed": lambda index: torch.full((2,), index, dtype=torch.int32 if index % 2 else torch.float64),
        "array": lambda index: np.full(shape, index, dtype=np.float16),
        "scalar": lambda index: np.int16(index),
        "int": lambda index: index,
        "float": lambda index: index / 7,
        "bool": lambda index: index % 2 == 0,
        "text": lambda index: f"text {index}",
    }[kind]


def outcome(collate: Any, samples: list[Any]) -> Any:
    """Return the batch, or the kind and text of the error."""
    try:
        return collate(samples)
    except Exception as error:  # noqa: BLE001 (the error is compared)
        return type(error), str(error)


def unpacked(pool: PinnedPool, collated: CollatedBatch) -> Any:
    if collated.layout is None:
        return collated.batch
    if collated.slot is None:
        return collated.layout.unpack(torch.empty(0, dtype=torch.uint8))
    return collated.layout.unpack(pool.adopt(collated.slot).tensor(collated.num_bytes), own="all")


@pytest.mark.parametrize("in_worker", [False, True])
@given(make=sample_makers(), num_samples=st.integers(1, 4), slot_bytes=st.sampled_from([512, 1024, 65_536]))
def test_any_samples_collate_as_by_the_default_collate(
    in_worker: bool, make: Any, num_samples: int, slot_bytes: int
) -> None:
    info = worker_module.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None) if in_worker else None
    with (
        mock.patch.object(worker_module, "_worker_info", info),
        PinnedPool(max(4096, 2 * slot_bytes), slot_bytes, num_slots=2) as pool,
    ):
        collate = SlotCollate(pool, default_collate, "pageable")
        samples = [make(index) for index in range(num_samples)]
        expected = outcome(default_collate, samples)
        found = outcome(lambda samples: unpacked(pool, collate(samples)), samples)
        assert same(found, expected)
        assert pool.states.count(SlotState.FILLING) == 0


def test_an_error_in_the_users_collate_takes_no_slot() -> None:
    def broken(samples: list[Any]) -> Any:
        raise KeyError("no such column")

    with PinnedPool(8192, 4096) as pool:
        for _ in range(5):
            with pytest.raises(KeyError, match="no such column"):
                SlotCollate(pool, broken, "pageable")([1])
        assert pool.num_slots_in_use == 0


def test_over_size_as_an_error_names_the_size_that_fits() -> None:
    with (
        PinnedPool(8192, 4096) as pool,
        pytest.raises(CapacityError, match="takes 40,448 bytes, a slot has 4,096; pass slot_bytes=40448"),
    ):
        SlotCollate(pool, default_collate, "error")([torch.zeros(10_000)])


def test_a_worker_stops_waiting_when_its_iteration_is_abandoned() -> None:
    with PinnedPool(4096, 4096, settings=PoolSettings(wait_seconds=1)) as pool:
        on_wait = stop_when_abandoned(pool.states, pool.states.generation)
        on_wait(0.0)
        pool.states.abandon_waits()
        with pytest.raises(PoolError, match="was abandoned"):
            on_wait(0.0)
