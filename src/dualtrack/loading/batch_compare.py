"""Compare two batches bit for bit: structure and types first, then dtype and shape, then the bytes. Nothing compared is never equal.

A batch is listed as entries (containers, tensors, values) with their paths; live batches and the two sides of a stored bundle go through
the same comparison. NaN payloads and the sign of zero count.
"""

import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from dualtrack.facts.observations import Fact

MAX_TEXT_CHARACTERS = 200

DifferenceKind = Literal["nothing compared", "structure", "dtype", "shape", "strides", "device", "value", "bits"]


class Entry(NamedTuple):
    """One node of a batch: a container, a tensor or a value."""

    path: str
    kind: Literal["container", "tensor", "value"]
    what: str
    """Type, and for a container its size or keys."""
    content: Any = None
    """The tensor, or the value."""
    device: str = ""
    """Where a tensor was when it was listed; a stored one is on the CPU now."""


class LeafDifference(Fact):
    """The first place where two batches differ."""

    leaf: str
    """Path of the entry, for example `[0]` or `['mask']`; empty for the batch itself."""
    kind: DifferenceKind
    index: tuple[int, ...] | None = None
    """Element of the first differing bits."""
    legacy: str
    candidate: str
    num_different_elements: int | None = None
    num_elements: int | None = None

    @property
    def where(self) -> str:
        """Leaf and index in words."""
        return f"leaf {self.leaf or 'of the batch itself'}" + (
            f", index {list(self.index)}" if self.index is not None else f", {self.kind}"
        )


class BatchComparison(Fact):
    """What a comparison of two batches found."""

    equal: bool
    num_leaves: int
    """Tensors and values that were compared."""
    num_bytes: int
    """Bytes of the compared tensors of one side."""
    num_different_leaves: int = 0
    first: LeafDifference | None = None


def compare_batches(
    legacy: Any, candidate: Any, *, synchronize: bool = True, before_reading: Callable[[], None] | None = None
) -> BatchComparison:
    """Compare two batches; `legacy` is the reference.

    Args:
        legacy: Any structure of tensors and values, on any device.
        candidate: The batch that has to equal it.
        synchronize: Wait for all work queued on the tensors' devices first, so that a copy in flight on any stream has landed. A caller that
            has ordered the current stream after both batches passes False.
        before_reading: Called after the comparison was queued and before its result is read; it may wait with a deadline.
    """
    sides = list(list_entries(legacy)), list(list_entries(candidate))
    if synchronize:
        for device in {entry.content.device for side in sides for entry in side if entry.kind == "tensor"}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return compare_entries(*sides, before_reading=before_reading)


def list_entries(node: Any, path: str = "") -> Iterator[Entry]:
    """List a batch depth first: each container before its members."""
    what = f"{type(node).__module__}.{type(node).__qualname__}"
    if isinstance(node, torch.Tensor):
        yield from _list_tensor(node, path, what)
    elif isinstance(node, str | bytes | bytearray | torch.Size):
        yield Entry(path, "value", what, node)
    elif isinstance(node, Mapping):
        yield Entry(path, "container", f"{what} with keys {_shorten(repr(list(node)))}")
        for key, child in node.items():
            yield from list_entries(child, f"{path}[{key!r}]")
    elif isinstance(node, Sequence):
        yield Entry(path, "container", f"{what} of {len(node)}")
        for place, child in enumerate(node):
            yield from list_entries(child, f"{path}[{place}]")
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        yield Entry(path, "container", f"{what} with fields {names}")
        for name in names:
            yield from list_entries(getattr(node, name), f"{path}.{name}")
    else:
        yield Entry(path, "value", what, node)


def _list_tensor(tensor: torch.Tensor, path: str, what: str) -> Iterator[Entry]:
    """List a dense tensor as itself, and a sparse or nested one as its parts."""
    if tensor.is_nested:
        yield Entry(path, "container", f"{what}, nested, of {tensor.size(0)}")
        for place, part in enumerate(tensor.unbind()):
            yield from _list_tensor(part, f"{path}.parts[{place}]", what)
    elif tensor.layout is torch.strided:
        yield Entry(
            path,
            "tensor",
            f"{what}, requires_grad" if tensor.requires_grad else what,
            tensor.detach(),
            str(tensor.device),
        )
    else:
        yield Entry(path, "container", f"{what}, {tensor.layout}, {list(tensor.shape)}")
        for name, part in _sparse_parts(tensor.detach()).items():
            yield Entry(f"{path}.{name}", "tensor", what, part, str(part.device))


def _sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow_indices": tensor.crow_indices(), "col_indices": tensor.col_indices(), "values": tensor.values()}
    return {"ccol_indices": tensor.ccol_indices(), "row_indices": tensor.row_indices(), "values": tensor.values()}


def compare_entries(
    legacy: Sequence[Entry], candidate: Sequence[Entry], before_reading: Callable[[], None] | None = None
) -> BatchComparison:
    """Compare two listings; a difference of structure or type ends the comparison, since no bytes correspond after it."""
    pairs = list(zip(legacy, candidate, strict=False))
    for expected, found in pairs:
        difference = _compare_form(expected, found)
        if difference is not None:
            return BatchComparison(equal=False, num_leaves=0, num_bytes=0, num_different_leaves=1, first=difference)
    if len(legacy) != len(candidate):
        return _not_equal("structure", f"{len(legacy)} entries", f"{len(candidate)} entries")
    leaves = [(expected, found) for expected, found in pairs if expected.kind != "container"]
    if not leaves:
        return _not_equal("nothing compared", "no tensor and no value", "no tensor and no value")
    differing = [places for places in _differing_leaves(leaves, before_reading) if places is not None]
    num_bytes = sum(item.content.numel() * item.content.element_size() for item, _ in leaves if item.kind == "tensor")
    first = _describe(*differing[0]) if differing else None
    return BatchComparison(
        equal=not differing,
        num_leaves=len(leaves),
        num_bytes=num_bytes,
        num_different_leaves=len(differing),
        first=first,
    )


def _not_equal(kind: DifferenceKind, legacy: str, candidate: str) -> BatchComparison:
    first = LeafDifference(leaf="", kind=kind, legacy=legacy, candidate=candidate)
    return BatchComparison(equal=False, num_leaves=0, num_bytes=0, num_different_leaves=1, first=first)


def _compare_form(expected: Entry, found: Entry) -> LeafDifference | None:
    """Compare everything but the content: place, type, and for tensors dtype, shape, strides and device."""
    if (expected.path, expected.kind, expected.what) != (found.path, found.kind, found.what):
        return _differ(expected, "structure", f"{expected.path} {expected.what}", f"{found.path} {found.what}")
    if expected.kind != "tensor":
        return None
    one, other = expected.content, found.content
    checks: tuple[tuple[DifferenceKind, Any, Any], ...] = (
        ("dtype", one.dtype, other.dtype),
        ("shape", list(one.shape), list(other.shape)),
        ("strides", _telling_strides(one), _telling_strides(other)),
        ("device", expected.device, found.device),
    )
    return next((_differ(expected, kind, str(a), str(b)) for kind, a, b in checks if a != b), None)


def _differ(entry: Entry, kind: DifferenceKind, legacy: str, candidate: str) -> LeafDifference:
    return LeafDifference(leaf=entry.path, kind=kind, legacy=legacy.strip(), candidate=candidate.strip())


def _telling_strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides that say something: those of axes longer than 1 (kernels choose by them, so results may depend on them)."""
    if tensor.numel() == 0:
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _differing_leaves(
    leaves: list[tuple[Entry, Entry]], before_reading: Callable[[], None] | None
) -> Iterator[tuple[Entry, Entry] | None]:
    """Give each differing pair. All device comparisons are queued first and read with one transfer, not one each."""
    flags = {
        place: torch.ne(*_as_words(one.content, other.content)).any()
        for place, (one, other) in enumerate(leaves)
        if one.kind == "tensor" and one.content.is_cuda and one.content.numel()
    }
    if before_reading is not None:
        before_reading()
    differing = {}
    if flags:
        differing = dict(zip(flags, torch.stack(list(flags.values())).tolist(), strict=True))
    for place, (one, other) in enumerate(leaves):
        if place in differing:
            yield (one, other) if differing[place] else None
        elif one.kind == "tensor":
            yield None if torch.equal(*_as_words(one.content, other.content)) else (one, other)
        else:
            yield None if same_value(one.content, other.content) else (one, other)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in row-major order as uint8 `[num_bytes]`, on the same device; whatever the dtype, strides or lazy conjugation."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _as_words(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of both as int64 where they divide, so that a comparison makes an eighth of the flags."""
    pair = as_bytes(one), as_bytes(other)
    if all(raw.numel() % 8 == 0 and raw.data_ptr() % 8 == 0 for raw in pair):
        return pair[0].view(torch.int64), pair[1].view(torch.int64)
    return pair


def same_value(one: Any, other: Any) -> bool:
    """Compare two values of the same type: floats by their bits, arrays by their bytes, other objects by `==` or by their pickled form."""
    if one is other:
        return True
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (
            math.isnan(one) and math.isnan(other)
        )
    if isinstance(one, np.ndarray | np.generic):
        array, second = np.asarray(one), np.asarray(other)
        if array.dtype != second.dtype or array.shape != second.shape:
            return False
        return bool((array == second).all()) if array.dtype.hasobject else array.tobytes() == second.tobytes()
    try:
        if bool(one == other):
            return True
        return pickle.dumps(one) == pickle.dumps(other)
    except Exception:  # noqa: BLE001 (an object that can't be compared is not equal; the difference shows both)
        return False


def _describe(expected: Entry, found: Entry) -> LeafDifference:
    if expected.kind == "value":
        kind: DifferenceKind = "value"
        return _differ(expected, kind, _shorten(repr(expected.content)), _shorten(repr(found.content)))
    one, other = expected.content, found.content
    unequal = (as_bytes(one) != as_bytes(other)).reshape(-1, one.element_size()).any(dim=1)
    element = int(unequal.to(torch.uint8).argmax())
    index = tuple(int(place) for place in np.unravel_index(element, tuple(one.shape))) if one.dim() else ()
    return LeafDifference(
        leaf=expected.path, kind="bits", index=index, legacy=_element_text(one, index), candidate=_element_text(other, index),
        num_different_elements=int(unequal.sum()), num_elements=one.numel(),
    )  # fmt: skip


def _element_text(tensor: torch.Tensor, index: tuple[int, ...]) -> str:
    """Return one element as a number and as its bytes, since two NaNs or two zeros may differ in bits alone."""
    element = tensor[index] if index else tensor
    raw = bytes(as_bytes(element.reshape(1)).cpu().tolist()).hex()
    try:
        return f"{element.item()!r} (bytes {raw})"
    except (RuntimeError, NotImplementedError):  # some 8-bit and 4-bit floats have no Python number
        return f"bytes {raw}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[: MAX_TEXT_CHARACTERS - 3]}..."
