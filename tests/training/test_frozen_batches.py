"""Batches come back from storage as they went in, or are refused."""

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualtrack.facts.errors import FrozenInputError
from dualtrack.training.frozen_batches import decode_batch, digest_batch, digest_parameters, digest_tensor, encode_batch

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a dense tensor of any dtype, also 0-dim, empty, transposed and strided."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = int(torch.tensor(shape).prod()) if shape else 1
    raw = torch.tensor(draw(st.lists(st.integers(0, 100), min_size=size, max_size=size)), dtype=torch.float32).reshape(
        shape
    )
    value = raw.to(draw(st.sampled_from(DTYPES)))
    if value.ndim >= 2 and draw(st.booleans()):
        value = value.transpose(0, 1)
    return value[::2] if value.ndim and draw(st.booleans()) else value


LEAVES = (
    tensors()
    | st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
BATCHES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=6,
)


def same(left: Any, right: Any) -> bool:
    """Compare types, dtypes, shapes and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and digest_tensor(left) == digest_tensor(right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return left == right or (left != left and right != right)


@given(BATCHES)
def test_every_batch_comes_back_with_its_types_and_bits(batch: Any) -> None:
    structure, stored = encode_batch(batch, "batch_0000")
    assert same(decode_batch(structure, stored), batch)


def test_what_can_not_be_rebuilt_is_refused_with_its_place() -> None:
    point = namedtuple("point", "x y")
    with pytest.raises(FrozenInputError, match=r"batch_0003\.inner\.1: can't freeze a .*point"):
        encode_batch({"inner": [1, point(1, 2)]}, "batch_0003")
    with pytest.raises(FrozenInputError, match="dense"):
        encode_batch([torch.eye(3).to_sparse()], "batch_0000")


def test_a_view_is_stored_without_its_storage_and_a_later_write_does_not_reach_it() -> None:
    storage = torch.arange(1_000_000.0)
    _, stored = encode_batch([storage[:2]], "b")
    storage.zero_()
    assert stored["b.0"].untyped_storage().nbytes() == 8
    assert stored["b.0"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
    ],
)
def test_digests_tell_shape_dtype_and_the_sign_of_zero_apart(left: torch.Tensor, right: torch.Tensor) -> None:
    assert digest_tensor(left) != digest_tensor(right)


def test_equal_nan_payloads_have_equal_digests() -> None:
    assert digest_batch([torch.tensor([float("nan")])], "b") == digest_batch([torch.tensor([float("nan")])], "b")


def test_one_changed_bit_changes_the_parameters_digest() -> None:
    model = torch.nn.Linear(3, 2)
    before = digest_parameters(model)
    with torch.no_grad():
        model.weight[1, 2] = torch.nextafter(model.weight[1, 2], torch.tensor(9.0))
    assert digest_parameters(model) != before
