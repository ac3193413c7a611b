"""Turn batches into named tensors and back, without losing a type, a dtype or a bit.

Containers are stored by their kind; a class that can't be rebuilt from the file alone is refused, because a frozen input that comes back
as something else proves nothing.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from dualtrack.facts.digests import sha256_bytes, tensor_digest
from dualtrack.facts.errors import FrozenInputError


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without the prefix, for example `float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements in row-major order as raw bytes, whatever the strides or the device."""
    if tensor.numel() == 0:
        return memoryview(b"")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(plain.numpy())  # type: ignore[arg-type] # numpy arrays offer the buffer protocol


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the digest over dtype, shape and bytes of one dense tensor."""
    return tensor_digest(dtype_name(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor))


def encode_batch(batch: Any, prefix: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a batch into a JSON structure and named tensors.

    Args:
        batch: Nested dicts, lists and tuples of tensors, numbers, strings, bytes and None.
        prefix: Put before each tensor's name, for example `batch_003`.

    Raises:
        FrozenInputError: A class can't be rebuilt from a file; the message names the place and the class.
    """
    tensors: dict[str, torch.Tensor] = {}

    def encode(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise FrozenInputError(
                    f"{path}: expected a dense tensor, got layout {value.layout}; freeze its dense parts instead"
                )
            tensors[path] = (
                value.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            )
            return {"kind": "tensor", "name": path}
        if value is None or type(value) in (bool, int, str):
            return {"kind": "plain", "value": value}
        if type(value) is float:
            return {"kind": "float", "value": value.hex()}
        if type(value) is bytes:
            return {"kind": "bytes", "value": value.hex()}
        if type(value) in (list, tuple):
            return {
                "kind": type(value).__name__,
                "items": [encode(item, f"{path}.{place}") for place, item in enumerate(value)],
            }
        if type(value) in (dict, OrderedDict) and all(isinstance(key, str) for key in value):
            items = [[key, encode(item, f"{path}.{key}")] for key, item in value.items()]
            return {"kind": type(value).__name__, "items": items}
        raise FrozenInputError(
            f"{path}: can't freeze a {type(value).__module__}.{type(value).__qualname__}; expected dict, list, tuple, tensor, number, string, "
            "bytes or None; use the digests-only mode (`dualtrack freeze --recipe`) for batches of own classes"
        )

    return encode(batch, prefix), tensors


def decode_batch(structure: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild a batch from its structure and its named tensors."""
    kind = structure["kind"]
    if kind == "tensor":
        return tensors[structure["name"]].clone()
    if kind == "plain":
        return structure["value"]
    if kind == "float":
        return float.fromhex(structure["value"])
    if kind == "bytes":
        return bytes.fromhex(structure["value"])
    if kind in ("list", "tuple"):
        items = [decode_batch(item, tensors) for item in structure["items"]]
        return items if kind == "list" else tuple(items)
    pairs = [(key, decode_batch(item, tensors)) for key, item in structure["items"]]
    return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)


def digest_leaves(batch: Any) -> str:
    """Return the digests of a batch's tensors in order, as one text; two batches of one structure are equal when these are."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return " ".join(digest_tensor(leaf) for leaf in leaves)


def digest_batch(batch: Any, prefix: str) -> tuple[Any, dict[str, str]]:
    """Return structure and tensor digests of a batch, for comparison with the `FrozenBatch` of the same prefix."""
    structure, tensors = encode_batch(batch, prefix)
    return structure, {name: digest_tensor(tensor) for name, tensor in tensors.items()}


def digest_parameters(model: torch.nn.Module) -> str:
    """Return one digest over names, dtypes, shapes and bytes of all parameters and buffers."""
    parts = [f"{name} {digest_tensor(value)}" for name, value in sorted(model.state_dict().items())]
    return sha256_bytes("\n".join(parts).encode())
