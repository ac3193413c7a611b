"""How a batch of any structure lies in one packed buffer, and how typed tensors are cut out of it again.

A layout is a description without data: it crosses from worker to trainer in place of the batch. Cutting gives the structure that the
legacy loader gives: the same container types with their extras, dtypes, shapes, and the strides that `tensor.to(device)` would give. What
can't be staged (sparse, nested, quantised, on another device, a tensor subclass, part of an autograd graph, inside an unknown object)
passes through unchanged and is listed.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Literal, NamedTuple

import torch

ALIGN_BYTES = 512  # what the CUDA caching allocator gives legacy's own tensors, so kernels choose as they did before
SMALL_SHARE = 64
MOST_SMALL_TENSORS = (
    8  # each copy costs a launch of some microseconds; hundreds would cost more than the packed copy saves
)
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)


class TensorSpec(NamedTuple):
    """Where one tensor lies in the packed buffer, and what it is."""

    offset_bytes: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


class TensorPlace:
    """Stands in a layout's tree where a staged tensor was."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        """Remember which spec of the layout it stands for."""
        self.index = index

    def __reduce__(self) -> tuple[type["TensorPlace"], tuple[int]]:
        return TensorPlace, (self.index,)


class PackedLayout(NamedTuple):
    """A batch without its bytes."""

    tree: Any
    specs: tuple[TensorSpec, ...]
    num_bytes: int
    """Used bytes of the packed buffer, a multiple of `ALIGN_BYTES`."""
    passed_through: dict[str, int]
    """What was not staged: description -> how many."""

    def unpack(self, packed: torch.Tensor, own: Literal["none", "small", "all"] = "none") -> Any:
        """Cut the batch out of its packed bytes.

        The tensors share the buffer's storage and nothing else: each has its own version counter, so changing one leaf in place does not
        trip autograd over another. A kept leaf keeps the whole buffer alive, unless it owns its bytes.

        Args:
            packed: uint8 `[num_bytes]`, contiguous, on any device; its storage offset is a multiple of `ALIGN_BYTES`.
            own: Which tensors get a storage of their own, copied on the current stream. `small` are those under 1/64 of the buffer if there
                are at most 8 of them: a loop that collects its labels must not keep every image alive.

        Raises:
            ValueError: `packed` is not such a buffer.
        """
        offset = int(packed.storage_offset())
        if (
            packed.dtype != torch.uint8
            or packed.shape != (self.num_bytes,)
            or not packed.is_contiguous()
            or offset % ALIGN_BYTES
        ):
            raise ValueError(
                f"expected a contiguous uint8 [{self.num_bytes}] buffer at a multiple of {ALIGN_BYTES} bytes, "
                f"got {packed.dtype} {list(packed.shape)} at {offset}"
            )
        storage = packed.untyped_storage()
        tensors = [self._cut(spec, storage, offset, packed.device) for spec in self.specs]
        for index in self._owned(own):
            tensors[index] = tensors[index].detach().clone().requires_grad_(self.specs[index].requires_grad)
        return map_leaves(lambda leaf: tensors[leaf.index] if type(leaf) is TensorPlace else leaf, self.tree)

    def _owned(self, own: Literal["none", "small", "all"]) -> Iterable[int]:
        if own == "all":
            return range(len(self.specs))
        if own == "none":
            return ()
        small = [index for index, spec in enumerate(self.specs) if spec.num_bytes * SMALL_SHARE < self.num_bytes]
        return small if len(small) <= MOST_SMALL_TENSORS else ()

    @staticmethod
    def _cut(spec: TensorSpec, storage: torch.UntypedStorage, base_bytes: int, device: torch.device) -> torch.Tensor:
        start = (base_bytes + spec.offset_bytes) // spec.dtype.itemsize
        tensor = torch.empty(0, dtype=spec.dtype, device=device).set_(storage, start, spec.shape, spec.stride)
        return tensor.requires_grad_() if spec.requires_grad else tensor


def map_leaves(visit: Callable[[Any], Any], node: Any) -> Any:
    """Return `node` with every leaf replaced by `visit(leaf)`.

    Containers are mappings, sequences, tuples (named or not) and dataclass instances; a container is copied only if one of its leaves
    changed, and then keeps its type and extra attributes. Everything else is a leaf.
    """
    kind = type(node)
    if kind is dict:
        return _if_changed(node, node.values(), visit, lambda children: dict(zip(node, children, strict=True)))
    if kind is list:
        return _if_changed(node, node, visit, list)
    if kind in PLAIN_TYPES or isinstance(node, torch.Tensor | str | bytes | bytearray | torch.Size):
        return visit(node)
    if isinstance(node, tuple):
        return _if_changed(node, node, visit, lambda children: _rebuild_tuple(node, children))
    if isinstance(node, Mapping):
        return _if_changed(node, list(node.values()), visit, lambda children: _rebuild_mapping(node, children))
    if isinstance(node, MutableSequence):
        return _if_changed(node, node, visit, lambda children: _rebuild_sequence(node, children))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        values = [getattr(node, name) for name in names]
        return _if_changed(node, values, visit, lambda children: _rebuild_dataclass(node, names, children))
    return visit(node)


def _if_changed(
    node: Any, children: Iterable[Any], visit: Callable[[Any], Any], rebuild: Callable[[list[Any]], Any]
) -> Any:
    before = list(children)
    after = [map_leaves(visit, child) for child in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return node
    try:
        return rebuild(after)
    except Exception as error:
        raise UnpackableBatch(f"a {type(node).__qualname__} cannot be copied with other contents: {error}") from error


def _rebuild_tuple(node: tuple[Any, ...], children: list[Any]) -> tuple[Any, ...]:
    """Make the tuple without its class's `__new__`, whose signature a named tuple changes."""
    made = tuple.__new__(type(node), children)
    if hasattr(node, "__dict__"):
        made.__dict__.update(node.__dict__)
    return made


def _rebuild_mapping(node: Mapping[Any, Any], children: list[Any]) -> Mapping[Any, Any]:
    if not isinstance(node, MutableMapping):
        return type(node)(dict(zip(node, children, strict=True)))  # type: ignore[call-arg]
    made = copy.copy(node)
    for key, child in zip(node, children, strict=True):
        made[key] = child
    return made


def _rebuild_sequence(node: MutableSequence[Any], children: list[Any]) -> MutableSequence[Any]:
    made = copy.copy(node)
    for position, child in enumerate(children):
        made[position] = child
    return made


def _rebuild_dataclass(node: Any, names: list[str], children: list[Any]) -> Any:
    made = copy.copy(node)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(made, name, child)  # a frozen dataclass forbids the plain assignment
    return made


def why_not_staged(leaf: Any) -> str | None:
    """Say why a leaf passes through, or None for a tensor that can be staged."""
    if not isinstance(leaf, torch.Tensor):
        return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    if type(leaf) is not torch.Tensor:
        return f"tensor subclass {type(leaf).__qualname__}"
    if leaf.layout != torch.strided or leaf.is_nested:
        return f"tensor of layout {leaf.layout}"
    if leaf.device.type != "cpu":
        return f"tensor on {leaf.device.type}"
    if leaf.is_quantized:
        return f"quantised tensor of {leaf.dtype}"
    if leaf.grad_fn is not None:
        return "tensor inside an autograd graph"
    return None


def aligned(num_bytes: int) -> int:
    """Round up to the next multiple of `ALIGN_BYTES`."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a fresh tensor of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def packed_bytes(batch: Any) -> int:
    """Return the bytes that `batch` takes in a slot; a tensor that occurs twice counts once."""
    sizes: dict[int, int] = {}

    def measure(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and why_not_staged(leaf) is None:
            sizes[id(leaf)] = aligned(leaf.numel() * leaf.element_size())
        return leaf

    map_leaves(measure, batch)
    return sum(sizes.values())


class UnpackableBatch(Exception):
    """A container of the batch refuses to be copied."""


class SlotOverflow(Exception):
    """The batch needs more bytes than the slot has."""


class BatchPacker:
    """Packs one batch into one buffer; collating may place tensors in the buffer before the batch is complete."""

    def __init__(self, buffer: torch.Tensor) -> None:
        """Start at the beginning of `buffer`, uint8 `[slot_bytes]`."""
        self._buffer = buffer
        self._storage = buffer.untyped_storage()
        self._specs: list[TensorSpec] = []
        self._num_bytes = 0
        self._places: dict[int, TensorPlace] = {}
        self._kept: list[torch.Tensor] = []  # an id is unique only while its object lives
        self._passed_through: dict[str, int] = {}

    def place(
        self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool = False
    ) -> torch.Tensor:
        """Return an empty tensor in the buffer; where the packed batch holds it, its bytes stay where they are.

        Raises:
            SlotOverflow: The buffer's rest is too small.
        """
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        if self._num_bytes + num_bytes > self._buffer.numel():
            raise SlotOverflow
        spec = TensorSpec(self._num_bytes, num_bytes, dtype, shape, stride, requires_grad)
        tensor = PackedLayout._cut(
            spec._replace(requires_grad=False), self._storage, int(self._buffer.storage_offset()), self._buffer.device
        )
        self._places[id(tensor)] = TensorPlace(len(self._specs))
        self._specs.append(spec)
        self._kept.append(tensor)
        self._num_bytes += aligned(num_bytes)
        return tensor

    def pack(self, batch: Any) -> PackedLayout:
        """Copy every tensor that is not in the buffer yet, and describe the whole.

        Raises:
            SlotOverflow: The buffer is too small for the batch.
        """
        tree = map_leaves(self._stage, batch)
        return PackedLayout(tree, tuple(self._specs), self._num_bytes, self._passed_through)

    def _stage(self, leaf: Any) -> Any:
        if type(leaf) in PLAIN_TYPES:
            return leaf
        known = self._places.get(id(leaf))
        if known is not None:
            return known
        reason = why_not_staged(leaf)
        if reason is not None:
            self._passed_through[reason] = self._passed_through.get(reason, 0) + 1
            return leaf
        stride = contiguous_stride(leaf.shape)
        if leaf.stride() != stride:  # torch itself says how a copy is laid out
            stride = torch.empty_like(leaf, device="meta").stride()
        target = self.place(leaf.dtype, tuple(leaf.shape), stride, leaf.requires_grad)
        target.copy_(leaf.detach())
        self._places[id(leaf)] = self._places[id(target)]
        self._kept.append(leaf)
        return self._places[id(leaf)]
