"""Cut a global batch into the shares of its ranks, whatever its structure, and turn it into float64 for exact comparisons."""

from collections.abc import Mapping
from typing import Any

import torch

from dualtrack.facts.errors import StageRefused


def num_samples_in(batch: Any) -> int:
    """Return the number of samples of a batch: the leading size of its first tensor that has one.

    Raises:
        StageRefused: There is no such tensor, so nobody can say what a sample is.
    """
    leaves = torch.utils._pytree.tree_leaves(batch)
    sizes = [int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0]
    if not sizes:
        raise StageRefused("expected a batch with at least one tensor whose first dimension is the sample; found none")
    return sizes[0]


def slice_batch(batch: Any, rank: int, world_size: int) -> Any:
    """Return the share of one rank: the rank-th of `world_size` equal parts, in the same structure.

    Tensors are cut along their first dimension (views, no copy), lists of one plain value a sample along their length; single numbers and
    strings belong to every rank.

    Raises:
        StageRefused: The shares would be uneven, or a tensor's first dimension is not the sample; the message says which.
    """
    size = num_samples_in(batch)
    if size % world_size:
        raise StageRefused(f"expected a batch that {world_size} ranks can share evenly, got {size} samples")
    share = slice(rank * size // world_size, (rank + 1) * size // world_size)

    def cut(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.ndim == 0:
                return value
            if value.shape[0] != size:
                raise StageRefused(
                    f"{path}: expected {size} samples along the first dimension, got shape {tuple(value.shape)}; ranks can't share it"
                )
            return value[share]
        if isinstance(value, Mapping):
            return type(value)({key: cut(item, f"{path}.{key}") for key, item in value.items()})  # type: ignore[call-arg]
        if isinstance(value, list | tuple):
            plain = not any(isinstance(item, torch.Tensor | Mapping | list | tuple) for item in value)
            if plain and len(value) == size:
                return value[share]
            items = [cut(item, f"{path}.{place}") for place, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    return cut(batch, "batch")


def as_double(batch: Any) -> Any:
    """Return the batch with every floating-point tensor as float64; other values as they are."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch
    )
