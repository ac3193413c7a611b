"""Whether a workload can equal itself on many ranks: what can't is refused with the reason, what can be made equal is, and is said so."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dualtrack.facts.errors import StageRefused
from dualtrack.training.batch_slices import num_samples_in, slice_batch
from dualtrack.training.gradient_buckets import trainable
from dualtrack.training.loop import deterministic_algorithms
from dualtrack.training.workload import Workload

MEAN_TOLERANCE = 1e-5
"""Relative difference that float32 summation order can explain; a loss that is no mean over samples is off by per cents."""


@contextlib.contextmanager
def equality_numerics() -> Iterator[None]:
    """Use deterministic algorithms and full float32 products: whether a kernel takes TF32 may depend on the size of its batch."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with deterministic_algorithms():
            yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def make_repeatable(workload: Workload, model: nn.Module) -> list[str]:
    """Turn off, for an equality run, what makes ranks differ without being wrong; return what was turned off, in words.

    Every rank draws dropout masks of its own, and autocast rounds each rank's share of a sum to the short type; both belong to training, and
    neither to the question whether the ranks compute the mean of the same gradients.
    """
    notes = []
    if getattr(workload, "autocast_dtype", None) is not None:
        notes.append(f"autocast to {workload.autocast_dtype} is off in equality runs")  # type: ignore[attr-defined]
        workload.autocast_dtype = None  # type: ignore[attr-defined]
    active = [name for name, module in model.named_modules() if _dropout_of(module) > 0]
    for name in active:
        _set_dropout(model.get_submodule(name), 0.0)
    if active:
        notes.append(f"dropout is off in equality runs: {', '.join(name or 'the model itself' for name in active)}")
    return notes


def refuse_unequal(workload: Workload, model: nn.Module, batch: Any, world_size: int) -> None:
    """Refuse a model or a loss that can't be equal on many ranks.

    Args:
        workload: The training job.
        model: A plain model after `make_repeatable`, on the batch's device; its gradients are cleared.
        batch: One frozen device batch.
        world_size: The largest number of ranks that will share it.

    Raises:
        StageRefused: BatchNorm, a parameter without gradient, random draws in the loss, or a loss that is no mean over samples.
    """
    refuse_batch_norm(model)
    before = torch.get_rng_state()
    whole = workload.loss(model, batch)
    if not torch.equal(before, torch.get_rng_state()):
        raise StageRefused(
            "expected a loss that draws no random numbers, this one does: ranks would draw other numbers than one process; make the draw a module "
            "with a probability `p` (as nn.Dropout), so that equality runs can turn it off"
        )
    _refuse_unused(model, whole)
    _refuse_other_than_mean(
        lambda part: float(workload.loss(model, part).detach()), float(whole.detach()), batch, world_size
    )


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse batch normalisation, also the synchronised kind.

    Raises:
        StageRefused: The model has a BatchNorm; gradients of 4 ranks were 70 % off the single process, by design and not by error.
    """
    found = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if found:
        raise StageRefused(
            f"expected a model without BatchNorm, found {', '.join(found)}: each rank normalises by its own share, so many ranks are not equivalent to "
            "one by design, and nothing could be proved; use GroupNorm or LayerNorm"
        )


def _refuse_unused(model: nn.Module, loss: torch.Tensor) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    unused = [names[id(parameter)] for parameter in trainable(model.parameters()) if parameter.grad is None]
    model.zero_grad(set_to_none=True)
    if unused:
        raise StageRefused(
            f"expected a gradient for every parameter, none came to {', '.join(unused)}: DDP would wait for it for ever; freeze it with "
            "requires_grad_(False), or leave it out of the model"
        )


def _refuse_other_than_mean(loss_of: Callable[[Any], float], whole: float, batch: Any, world_size: int) -> None:
    size = num_samples_in(batch)
    shares = [slice_batch(batch, rank, world_size) for rank in range(world_size)] if size % world_size == 0 else []
    if not shares:
        raise StageRefused(
            f"expected frozen batches that {world_size} ranks can share evenly, got {size} samples; freeze batches of another size"
        )
    mean = sum(loss_of(share) for share in shares) / world_size
    if abs(mean - whole) > MEAN_TOLERANCE * max(abs(whole), 1e-30):
        raise StageRefused(
            f"expected the mean over the shares of {world_size} ranks to be the loss of the whole batch ({whole:.8g}), got {mean:.8g}: the loss is no mean "
            "over samples of equal weight (a mean over tokens, for example), and DDP averages over ranks; weigh every sample alike"
        )


def _dropout_of(module: nn.Module) -> float:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return float(module.p)
    return float(getattr(module, "dropout", 0.0)) if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0


def _set_dropout(module: nn.Module, probability: float) -> None:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = probability
    else:
        module.dropout = probability  # type: ignore[assignment]
