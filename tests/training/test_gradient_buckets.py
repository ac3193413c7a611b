"""The predicted bucket layout against worked examples and against the one DDP really builds."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dualtrack.training.gradient_buckets import (
    cap_bytes,
    num_initial_buckets,
    observed_layout,
    predict_layout,
    record_ready_order,
)
from dualtrack.workloads.digits import create

WORKLOAD = create()
BATCH = [torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)]


def parameters_of(*num_elements: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(count, dtype=dtype)) for count in num_elements]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


def test_a_bucket_closes_once_its_cap_is_reached_and_may_exceed_it_by_its_last_tensor() -> None:
    layout = predict_layout(parameters_of(19_500, 90_300, 73_310, 20_000), 0.1)
    assert [bucket.num_bytes for bucket in layout.buckets] == [373_240, 361_200, 78_000]
    assert layout.num_bytes == 812_440


def test_a_bucket_that_reaches_its_cap_exactly_is_closed() -> None:
    layout = predict_layout(parameters_of(10, 2**18), 1)
    assert [bucket.parameters for bucket in layout.buckets] == [(1,), (0,)]


def test_ddps_default_has_a_small_first_bucket_and_large_later_ones() -> None:
    layout = predict_layout(parameters_of(*[200_000] * 40), None)
    assert [len(bucket.parameters) for bucket in layout.buckets] == [2, 33, 5]


def test_a_tensor_is_never_split() -> None:
    layout = predict_layout(parameters_of(10_000_000), 1)
    assert [bucket.parameters for bucket in layout.buckets] == [(0,)]


def test_an_explicit_cap_of_25_is_not_the_default() -> None:
    model = parameters_of(*[200_000] * 40)
    assert cap_bytes(None) == (2**20, 25 * 2**20)
    assert predict_layout(model, None) != predict_layout(model, 25)


def test_dtypes_travel_in_buckets_of_their_own() -> None:
    model = [*parameters_of(10, 10), *parameters_of(10, 10, dtype=torch.float64)]
    layout = predict_layout(model, 1)
    assert {bucket.parameters for bucket in layout.buckets} == {(3, 2), (1, 0)}


def test_parameters_without_gradient_are_not_numbered() -> None:
    model = parameters_of(10, 20, 30)
    model[1].requires_grad_(False)
    assert predict_layout(model, 1).buckets[0].parameters == (1, 0)


def test_a_ready_order_that_misses_a_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="is a parameter unused"):
        predict_layout(parameters_of(1, 2), 1, [0])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("cap", [None, 25, 0.05, 0.01, 0.0001])
def test_the_prediction_is_what_ddp_rebuilds(cap: float | None) -> None:
    model = WORKLOAD.model()
    order = record_ready_order(model, lambda: WORKLOAD.loss(model, BATCH).backward())
    parallel = DistributedDataParallel(model, bucket_cap_mb=cap)  # type: ignore[arg-type] # fractions work
    WORKLOAD.loss(parallel, BATCH).backward()
    assert observed_layout(parallel) is None
    assert num_initial_buckets(parallel) == 1
    for _ in range(2):
        WORKLOAD.loss(parallel, BATCH).backward()
    assert observed_layout(parallel) == predict_layout(model.parameters(), cap, order)


def test_the_ready_order_is_not_simply_the_reverse_of_registration() -> None:
    model = WORKLOAD.model()
    order = record_ready_order(model, lambda: WORKLOAD.loss(model, BATCH).backward())
    assert sorted(order) == list(range(12))
    assert order != list(reversed(range(12)))
