"""Batch layouts: whatever is packed comes out equal, and nothing is staged that can't be."""

import copy
import math
import pickle
from collections import OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from example_datasets import Opaque, Pair, Point, TaggedDict, TaggedList, TaggedTuple
from hypothesis import given
from hypothesis import strategies as st
from pool_fakes import same, to_bytes

from dualtrack.loading.batch_layout import (
    ALIGN_BYTES,
    BatchPacker,
    PackedLayout,
    SlotOverflow,
    UnpackableBatch,
    aligned,
    map_leaves,
    packed_bytes,
)

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip


def pack(batch: Any, slot_bytes: int | None = None) -> tuple[PackedLayout, torch.Tensor]:
    """Pack into a fresh buffer of exactly the predicted size, full of junk, and send the layout as workers do."""
    buffer = torch.full((packed_bytes(batch) if slot_bytes is None else slot_bytes,), 0xAB, dtype=torch.uint8)
    layout = BatchPacker(buffer).pack(batch)
    return pickle.loads(pickle.dumps(layout)), buffer[: layout.num_bytes]


def round_trip(batch: Any) -> Any:
    layout, packed = pack(batch)
    return layout.unpack(packed)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any dtype, rank 0 to 4, any strides: permuted, sliced, flipped, expanded, shifted in their storage."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    num_bytes = math.prod(max(size, 1) for size in shape) * dtype.itemsize * 2 + 64
    raw = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    storage = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    storage = storage % 2 if dtype is torch.bool else storage
    values = storage[: num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
    kind = draw(st.sampled_from(["plain", "permuted", "sliced", "expanded", "shifted"]))
    if kind == "expanded" and shape:
        return values[: torch.Size(shape[1:]).numel()].reshape(shape[1:]).expand(shape)
    if kind == "sliced" and shape:
        wide = (*shape[:-1], 2 * shape[-1])
        return values[: torch.Size(wide).numel()].reshape(wide)[..., ::2]
    start = 3 if kind == "shifted" else 0
    made = values[start : start + torch.Size(shape).numel()].reshape(shape)
    return made.permute(draw(st.permutations(range(len(shape))))) if kind == "permuted" else made


plain_leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4)
)
batches = st.recursive(
    tensors() | plain_leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Pair, inner, inner)
        | st.lists(inner, max_size=3).map(TaggedList)
        | st.lists(st.tuples(st.text(max_size=3), inner), max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@given(batches)
def test_any_batch_comes_out_as_it_went_in(batch: Any) -> None:
    assert same(round_trip(batch), batch)


@given(batches)
def test_the_predicted_size_is_the_size(batch: Any) -> None:
    layout, _ = pack(batch)
    assert layout.num_bytes == packed_bytes(batch)
    assert layout.num_bytes % ALIGN_BYTES == 0


@given(tensors())
def test_strides_are_those_that_a_copy_to_a_device_gives(tensor: torch.Tensor) -> None:
    assert round_trip(tensor).stride() == torch.empty_like(tensor).stride()


@given(st.lists(tensors(), min_size=1, max_size=4), st.integers(0, 3))
def test_a_buffer_one_byte_too_small_is_refused(leaves: list[torch.Tensor], _: int) -> None:
    needed = sum(leaf.numel() * leaf.element_size() for leaf in leaves[-1:]) + sum(
        aligned(leaf.numel() * leaf.element_size()) for leaf in leaves[:-1]
    )
    if leaves[-1].numel():
        with pytest.raises(SlotOverflow):
            BatchPacker(torch.empty(needed - 1, dtype=torch.uint8)).pack([leaf.clone() for leaf in leaves])


def test_nan_payloads_and_the_sign_of_zero_survive() -> None:
    bits = torch.tensor([0x7FC00001, 0x7FC0BEEF, -(2**31), 0], dtype=torch.int32)
    assert to_bytes(round_trip(bits.view(torch.float32))) == to_bytes(bits)


def test_dtypes_and_ranks_live_together_in_one_batch() -> None:
    batch = [
        torch.ones(size, dtype=torch.float32).to(dtype) for dtype in DTYPES for size in ((), (0,), (3,), (2, 0, 4))
    ]
    assert same(round_trip(batch), batch)


def test_channels_last_stays_channels_last() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert round_trip(image).is_contiguous(memory_format=torch.channels_last)


def test_an_expanded_leaf_is_written_out_and_never_raises() -> None:
    leaf = torch.arange(3.0).reshape(3, 1).expand(3, 1000)
    assert same(round_trip(leaf), leaf.clone())


def test_only_the_view_of_a_large_storage_is_packed() -> None:
    storage = torch.arange(1_000_000, dtype=torch.int32)
    first, second = storage[5:6], storage[5:9]
    layout, packed = pack([first, second])
    assert layout.num_bytes == 2 * ALIGN_BYTES
    assert same(layout.unpack(packed), [first.clone(), second.clone()])


def test_a_tensor_that_occurs_twice_is_packed_once_and_stays_one() -> None:
    tensor = torch.arange(5)
    layout, packed = pack({"a": tensor, "b": [tensor]})
    out = layout.unpack(packed)
    assert layout.num_bytes == ALIGN_BYTES
    assert out["a"] is out["b"][0]


def test_conjugate_and_negative_views_keep_their_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(round_trip([values.conj()])[0], values.conj().resolve_conj())
    assert torch.equal(round_trip([values.conj().imag])[0], values.conj().imag.resolve_neg())


def test_containers_keep_types_and_extras() -> None:
    tagged_dict, tagged_list, tagged_tuple = (
        TaggedDict(a=torch.ones(2)),
        TaggedList([torch.ones(2)]),
        TaggedTuple(torch.ones(2), 1),
    )
    tagged_dict.source = tagged_list.source = "here"
    tagged_tuple.source = "here"
    with_default = defaultdict(list, a=torch.ones(2))
    batch = [
        tagged_dict,
        tagged_list,
        tagged_tuple,
        with_default,
        Pair(torch.ones(1), "x"),
        deque([torch.ones(1)], maxlen=3),
    ]
    out = round_trip(batch)
    assert [type(item) for item in out] == [TaggedDict, TaggedList, TaggedTuple, defaultdict, Pair, deque]
    assert out[0].source == out[1].source == out[2].source == "here"
    assert out[3].default_factory is list
    assert out[5].maxlen == 3
    assert torch.equal(out[0]["a"], torch.ones(2))
    assert out[2].y == 1


def test_a_mapping_that_is_no_dict_is_staged_too() -> None:
    batch = UserDict(a=torch.ones(3), b="text")
    layout, packed = pack(batch)
    out = layout.unpack(packed)
    assert type(out) is UserDict
    assert len(layout.specs) == 1
    assert torch.equal(out["a"], torch.ones(3))


class ReadOnlyMapping(UserDict[str, Any]):
    """A mutable mapping by its type that can't be written."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.data = content

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("this mapping is read-only")


def test_a_container_that_refuses_other_contents_is_named() -> None:
    with pytest.raises(UnpackableBatch, match=r"ReadOnlyMapping .* read-only"):
        BatchPacker(torch.empty(4096, dtype=torch.uint8)).pack(ReadOnlyMapping({"a": torch.ones(1)}))


def test_an_immutable_mapping_is_rebuilt_by_its_type() -> None:
    buffer = torch.empty(ALIGN_BYTES, dtype=torch.uint8)
    layout = BatchPacker(buffer).pack(MappingProxyType({"a": torch.ones(1)}))
    assert type(layout.unpack(buffer)) is MappingProxyType


def test_containers_without_tensors_are_the_same_objects() -> None:
    untouched = {"names": ["a", "b"], "meta": (1, None)}
    out = BatchPacker(torch.empty(ALIGN_BYTES, dtype=torch.uint8)).pack([untouched, torch.ones(1)]).tree
    assert out[0] is untouched


@pytest.mark.parametrize("leaf", [None, "text", b"bytes", 3, 2.5, True, [], {}, ()])
def test_plain_leaves_and_empty_containers_pass_without_being_listed(leaf: Any) -> None:
    layout, packed = pack([leaf])
    assert layout.unpack(packed) == [leaf]
    assert layout.passed_through == {}
    assert layout.num_bytes == 0


def test_object_arrays_pass_through_and_are_listed() -> None:
    array = np.array([{"a": 1}, None], dtype=object)
    layout, packed = pack([array])
    assert layout.passed_through == {"numpy.ndarray": 1}
    assert same(layout.unpack(packed), [array])


def test_what_cannot_be_staged_passes_through_beside_what_can_and_is_listed() -> None:
    sparse = torch.eye(3).to_sparse()
    batch = [
        torch.ones(2),
        sparse,
        torch.nn.Parameter(torch.ones(1)),
        Opaque(torch.ones(1)),
        torch.empty(2, device="meta"),
        {torch.ones(1)},
    ]
    buffer = torch.empty(ALIGN_BYTES, dtype=torch.uint8)
    layout = BatchPacker(buffer).pack(batch)
    out = layout.unpack(buffer)
    assert all(after is before for after, before in zip(out[1:], batch[1:], strict=True))
    assert layout.passed_through == {
        "tensor of layout torch.sparse_coo": 1,
        "tensor subclass Parameter": 1,
        "example_datasets.Opaque": 1,
        "tensor on meta": 1,
        "builtins.set": 1,
    }


def test_a_leaf_with_requires_grad_keeps_its_flag_and_value() -> None:
    leaf = torch.arange(3.0, requires_grad=True)
    out = round_trip([leaf])[0]
    assert out.requires_grad and out.is_leaf
    assert torch.equal(out, leaf)
    out.sum().backward()
    assert torch.equal(out.grad, torch.ones(3))


def test_a_tensor_inside_an_autograd_graph_keeps_its_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    out = BatchPacker(torch.empty(ALIGN_BYTES, dtype=torch.uint8)).pack([weight * 2])
    assert out.tree[0].grad_fn is not None
    assert out.passed_through == {"tensor inside an autograd graph": 1}


def test_changing_one_leaf_in_place_does_not_trip_autograd_over_another() -> None:
    layout, packed = pack([torch.ones(3), torch.ones(3)])
    images, labels = layout.unpack(packed)
    weight = torch.ones(3, requires_grad=True)
    product = weight * images
    labels.add_(1)
    product.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))


def test_a_small_leaf_can_own_its_bytes() -> None:
    layout, packed = pack([torch.zeros(100_000), torch.arange(4)])
    images, labels = layout.unpack(packed, own="small")
    assert images.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    assert labels.untyped_storage().nbytes() == labels.nbytes
    assert torch.equal(labels, torch.arange(4))


def test_hundreds_of_small_leaves_are_not_copied_one_by_one() -> None:
    layout, packed = pack([torch.zeros(100_000), *(torch.arange(4) for _ in range(500))])
    assert layout.unpack(packed, own="small")[1].untyped_storage().nbytes() == packed.untyped_storage().nbytes()


def test_owned_leaves_keep_strides_and_flags() -> None:
    batch = [torch.randn(3, 4).t(), torch.ones(2, requires_grad=True)]
    layout, packed = pack(batch)
    out = layout.unpack(packed, own="all")
    packed.zero_()
    assert same(out, batch)
    assert out[0].stride() == batch[0].stride()


def test_a_buffer_of_the_wrong_size_or_type_is_refused() -> None:
    layout, packed = pack([torch.arange(300)])
    for wrong in (
        packed[:-ALIGN_BYTES],
        packed.view(torch.int32),
        torch.empty(layout.num_bytes + 1, dtype=torch.uint8)[1:],
    ):
        with pytest.raises(ValueError, match="expected a contiguous uint8"):
            layout.unpack(wrong)


def test_mapping_leaves_leaves_the_original_untouched() -> None:
    batch = {"a": [torch.ones(1)], "b": Pair(torch.ones(1), 2)}
    before = copy.deepcopy(batch)
    map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf, batch)
    assert same(batch, before)
