"""Bit-exact comparison of batches: structure before numbers, nothing compared is never equal."""

import collections
import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualtrack.loading.batch_compare import compare_batches

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


class Words(list):
    pass


def difference(legacy, candidate):
    comparison = compare_batches(legacy, candidate)
    assert not comparison.equal
    assert comparison.first is not None
    return comparison.first


@pytest.mark.parametrize(
    "batch",
    [
        [torch.arange(6).reshape(2, 3), torch.tensor(1.5)],
        {"a": torch.ones(2, dtype=torch.bfloat16), "b": (1, 2.5, "text", b"bytes", None)},
        Point(torch.zeros(0, 3), np.float32(2)),
        Sample(torch.tensor([float("nan")]), "cat"),
        collections.OrderedDict(z=torch.ones(2, 2).t(), a=np.arange(3)),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3).to_sparse(),
        torch.tensor([1, 2], dtype=torch.uint8).view(torch.float8_e4m3fn),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_equals_its_copy(batch):
    comparison = compare_batches(batch, copy.deepcopy(batch))
    assert comparison.equal and comparison.first is None
    assert comparison.num_leaves > 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_compressed_sparse_tensors_are_compared_part_by_part():
    legacy, candidate = torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csr()
    assert compare_batches([legacy], [candidate]).num_leaves == 3
    candidate.values()[1] = 5
    assert difference([legacy], [candidate]).leaf == "[0].values"


@pytest.mark.parametrize("empty", [[], {}, (), [[], {}]], ids=repr)
def test_two_empty_batches_are_not_equal_because_nothing_was_compared(empty):
    assert difference(empty, empty).kind == "nothing compared"


def test_a_flipped_bit_is_found_with_its_index_and_both_values():
    legacy = [torch.zeros(2, 3, 4), torch.arange(5)]
    candidate = [legacy[0].clone(), legacy[1].clone()]
    candidate[0].view(torch.int32)[1, 2, 3] = 1
    candidate[0].view(torch.int32)[1, 0, 0] = 1
    found = difference(legacy, candidate)
    assert (found.leaf, found.kind, found.index) == ("[0]", "bits", (1, 0, 0))
    assert (found.num_different_elements, found.num_elements) == (2, 24)
    assert found.legacy == "0.0 (bytes 00000000)"
    assert found.candidate == "1.401298464324817e-45 (bytes 01000000)"
    assert found.where == "leaf [0], index [1, 0, 0]"


@given(
    st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    ),
    st.lists(st.integers(1, 4), max_size=3),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_of_any_dtype_is_found(dtype, shape, data):
    legacy = torch.ones(shape, dtype=dtype)
    candidate = legacy.clone()
    raw = candidate.view(-1).view(torch.uint8) if candidate.dim() else candidate.reshape(1).view(torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw[place] ^= 2 if dtype is not torch.bool else 1
    found = difference({"x": legacy}, {"x": candidate})
    assert found.kind == "bits"
    if shape:
        assert int(np.ravel_multi_index(found.index, tuple(shape))) == place // legacy.element_size()


def test_nan_payloads_and_the_sign_of_zero_count():
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert compare_batches([quiet], [quiet.clone()]).equal
    assert difference([quiet], [payload]).kind == "bits"
    assert difference([torch.zeros(1)], [-torch.zeros(1)]).kind == "bits"
    assert difference([0.0], [-0.0]).kind == "value"


@pytest.mark.parametrize(
    ("legacy", "candidate", "kind"),
    [
        ([torch.ones(2)], (torch.ones(2),), "structure"),
        ({"a": 1}, collections.OrderedDict(a=1), "structure"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "structure"),
        ([1], Words([1]), "structure"),
        ([1, 2], [1], "structure"),
        ([torch.ones(1)], [1.0], "structure"),
        ([1], [True], "structure"),
        ([None], [0], "structure"),
        ([torch.ones(2)], [torch.ones(2, requires_grad=True)], "structure"),
        ([torch.ones(2)], [torch.ones(2).double()], "dtype"),
        ([torch.ones(3, 2)], [torch.ones(1, 3, 2)], "shape"),
        ([torch.ones(3, 2)], [torch.ones(2, 3).t()], "strides"),
        ([torch.ones(2)], [torch.ones(2, device="meta")], "device"),
        ([torch.zeros(0, 2)], [torch.zeros(0, 3)], "shape"),
        (["cat"], ["dog"], "value"),
        ([np.arange(3)], [np.arange(1, 4)], "value"),
        ([np.arange(3)], [np.arange(3.0)], "value"),
        ([Sample(torch.ones(1), "a")], [Sample(torch.ones(1), "b")], "value"),
        ([torch.eye(3).to_sparse()], [(2 * torch.eye(3)).to_sparse()], "bits"),
    ],
    ids=str,
)
def test_the_kind_of_a_difference_is_named_before_any_number(legacy, candidate, kind):
    assert difference(legacy, candidate).kind == kind
    assert difference(candidate, legacy).kind == kind


def test_an_object_without_equality_is_compared_by_its_pickled_form():
    class Opaque:
        pass

    globals()["Opaque"] = Opaque
    Opaque.__qualname__ = "Opaque"
    one, other = Opaque(), Opaque()
    one.x = other.x = 3
    assert compare_batches([one], [other]).equal
    other.x = 4
    assert difference([one], [other]).kind == "value"


def test_an_object_whose_comparison_raises_is_not_equal():
    class Broken:
        def __eq__(self, other):
            raise RuntimeError("no")

        __hash__ = None

    assert difference([Broken()], [Broken()]).kind == "value"


def test_all_differing_leaves_are_counted_and_the_first_is_shown():
    comparison = compare_batches([torch.zeros(2), torch.zeros(3), 1], [torch.zeros(2), torch.ones(3), 2])
    assert (comparison.num_leaves, comparison.num_different_leaves) == (3, 2)
    assert comparison.first.leaf == "[1]"
    assert comparison.num_bytes == 20


def test_odd_storage_offsets_do_not_disturb_the_comparison():
    base = torch.arange(33, dtype=torch.uint8)
    assert compare_batches([base[1:17]], [base[1:17].clone()]).equal
    assert difference([base[1:17]], [base[2:18].clone()]).kind == "bits"


def test_the_wait_runs_before_the_result_is_read():
    order = []
    compare_batches([torch.ones(1)], [torch.ones(1)], before_reading=lambda: order.append("waited"))
    assert order == ["waited"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_comparer_waits_for_a_slow_copy_on_another_stream():
    source = torch.full((64 * 2**20,), 7, dtype=torch.uint8).pin_memory()
    for _ in range(20):
        target = torch.zeros_like(source, device="cuda")
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            target.copy_(source, non_blocking=True)
        assert compare_batches([source.to("cuda")], [target]).equal


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_batches_are_compared_on_the_device_with_the_same_findings():
    legacy = [torch.zeros(1000, 3, device="cuda"), torch.arange(5, device="cuda"), "name"]
    candidate = [legacy[0].clone(), legacy[1].clone(), "name"]
    assert compare_batches(legacy, candidate).equal
    candidate[0][999, 2] = 1
    found = difference(legacy, candidate)
    assert (found.index, found.num_different_elements) == ((999, 2), 1)
    assert difference([torch.ones(2)], [torch.ones(2, device="cuda")]).kind == "device"
