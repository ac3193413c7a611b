"""Which gradients DDP sends together: the layout predicted from the parameters, and the one DDP really built.

The rule, read in torch 2.11 and 2.13 (`compute_bucket_assignment_by_size`): parameters in the order in which their gradients became ready
fill one bucket per dtype and device; a bucket closes once its cap is reached or passed, so it may exceed the cap by its last tensor, and a
tensor is never split. The first synchronised step knows no order yet and sends everything of one kind in one bucket.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dualtrack.facts.observations import Fact

MEBIBYTE = 2**20
DEFAULT_CAP_MB = 25.0
DEFAULT_FIRST_BUCKET_BYTES = 2**20
"""Only with DDP's default (no cap given) is the first bucket smaller than the others."""


class Bucket(Fact):
    """Gradients that travel in one all-reduce."""

    parameters: tuple[int, ...]
    """Indices among the parameters that require a gradient, in ready order."""
    num_bytes: int


class BucketLayout(Fact):
    """All buckets of a model, in the order of their reduction."""

    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Gradient bytes over all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)


def trainable(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters that DDP numbers: those that require a gradient, each once."""
    unique = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    return list(unique.values())


def cap_bytes(bucket_cap_mb: float | None) -> tuple[int, int]:
    """Return the caps of the first and of the later buckets in bytes; an explicit cap holds for the first one too."""
    later = int((DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * MEBIBYTE)
    return (DEFAULT_FIRST_BUCKET_BYTES if bucket_cap_mb is None else later), later


def predict_layout(
    parameters: Iterable[torch.nn.Parameter], bucket_cap_mb: float | None, ready_order: Sequence[int] | None = None
) -> BucketLayout:
    """Predict the layout that DDP uses from its second synchronised step on (its third with a static graph).

    Args:
        parameters: The model's, in the order of registration.
        bucket_cap_mb: MiB, fractions allowed; None for DDP's own default.
        ready_order: Indices in the order in which gradients become ready, from `record_ready_order`; None assumes the reverse of registration.
    """
    numbered = trainable(parameters)
    order = list(reversed(range(len(numbered)))) if ready_order is None else list(ready_order)
    if sorted(order) != list(range(len(numbered))):
        raise ValueError(
            f"expected a ready order over {len(numbered)} parameters, each once, got {len(order)} entries; is a parameter unused?"
        )
    first, later = cap_bytes(bucket_cap_mb)
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[int]] = []
    for index in order:
        parameter = numbered[index]
        kind = (parameter.dtype, parameter.device)
        members = open_buckets.setdefault(kind, [])
        members.append(index)
        if sum(size_bytes(numbered[member]) for member in members) >= limits.get(kind, first):
            closed.append(open_buckets.pop(kind))
            limits[kind] = later
    groups = [*closed, *open_buckets.values()]
    return BucketLayout(
        buckets=tuple(
            Bucket(parameters=tuple(group), num_bytes=sum(size_bytes(numbered[member]) for member in group))
            for group in groups
        )
    )


def size_bytes(parameter: torch.nn.Parameter) -> int:
    """Return the bytes of a parameter's gradient."""
    return parameter.numel() * parameter.element_size()


def record_ready_order(model: torch.nn.Module, backward: Any) -> list[int]:
    """Run `backward` once and return the order in which the model's gradients became ready.

    Args:
        model: A plain model; parameters that get no gradient are missing from the result.
        backward: Runs forward and backward on the model.
    """
    order: list[int] = []

    def note(index: int) -> Any:
        return lambda parameter: order.append(index)

    hooks = [
        parameter.register_post_accumulate_grad_hook(note(index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(trainable(model.parameters()))
    ]
    try:
        backward()
    finally:
        for hook in hooks:
            hook.remove()
    return order


def observed_layout(model: torch.nn.parallel.DistributedDataParallel) -> BucketLayout | None:
    """Return the layout that DDP rebuilt, or None while it has not rebuilt its buckets yet."""
    seen = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if not seen.get("has_rebuilt_buckets"):
        return None
    sizes = [int(size) for size in str(seen["rebuilt_bucket_sizes"]).split(",")]
    groups = [
        tuple(int(index) for index in group.split())
        for group in str(seen["rebuilt_per_bucket_param_indices"]).split(",")
    ]
    return BucketLayout(
        buckets=tuple(Bucket(parameters=group, num_bytes=size) for group, size in zip(groups, sizes, strict=True))
    )


def num_initial_buckets(model: torch.nn.parallel.DistributedDataParallel) -> int:
    """Return the number of buckets of the first synchronised step."""
    seen = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return len(str(seen["bucket_sizes"]).split(","))
