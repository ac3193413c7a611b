"""What one rank computes on its share of the frozen legacy batches, to be compared with the single process: checks V4 to V7."""

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from dualtrack.facts.observations import Fact
from dualtrack.training.batch_slices import as_double, num_samples_in, slice_batch
from dualtrack.training.ddp_worker import RankContext
from dualtrack.training.frozen_batches import digest_tensor
from dualtrack.training.legacy_gradients import TENSORS_FILE, load_batches, load_weights
from dualtrack.training.probe_model import (
    NUM_EXACT_SAMPLES,
    IntegerProbe,
    integer_inputs,
    largest_power_of_two,
    probe_loss,
)
from dualtrack.training.rank_training import GradientFault, ParallelSettings, StepClock, parallelise, require_finite
from dualtrack.training.workload import Workload

PROBE_CAP_MB = 0.0002  # 210 bytes: the probe's four parameters then travel in more than one bucket
NUM_ORDER_ELEMENTS = 65_536
NEGLIGIBLE_SHARE = 1e-3
"""A tensor whose gradient is below this share of the whole gradient's norm is compared on that scale: where contributions cancel (the key
bias of an attention, whose gradient is zero in exact arithmetic) nothing but rounding is left, and it has no digits to compare."""

Precision = Literal["float32", "float64"]


class GradientError(Fact):
    """How far one parameter's averaged gradient is from the legacy one."""

    parameter: str
    step: int
    relative: float
    """L2 norm of the difference over the L2 norm of the legacy gradient (or `NEGLIGIBLE_SHARE` of the whole gradient's, if that is more)."""
    largest: float
    """Largest difference over the largest legacy element, on the same scale."""


def share_of(batch: Any, context: RankContext, planted: GradientFault = "") -> Any:
    """Return this rank's share of a frozen batch; with the planted fault, rank 1 takes rank 0's."""
    rank = 0 if planted == "duplicated shard" and context.rank == 1 else context.rank
    return slice_batch(batch, rank, context.world_size)


def probe_gradients(
    context: RankContext, settings: ParallelSettings, folder: Path, num_batches: int, seed: int
) -> list[str]:
    """Return the digest of the averaged gradient of the integer probe for each batch (V4); every rank must get the same."""
    model = IntegerProbe(seed).to(context.device)
    parallel = parallelise(
        model, context, settings.model_copy(update={"bucket_cap_mb": PROBE_CAP_MB, "compress_bf16": False})
    )
    clock, digests = StepClock(model, context.journal), []
    for step, inputs in enumerate(probe_inputs(folder, num_batches)):
        clock.begin(step)
        share = share_of([inputs], context, settings.planted)[0].to(context.device)
        model.zero_grad(set_to_none=True)
        context.journal.enter("forward")
        loss = probe_loss(parallel, share)
        if settings.planted == "scaled loss" and context.rank == context.world_size - 1:
            loss = loss * 1.0001
        loss.backward()  # type: ignore[no-untyped-call]
        clock.end()
        digests.append(digest_gradients(model))
    clock.close()
    return digests


def probe_baseline(folder: Path, num_batches: int, seed: int) -> list[str]:
    """Return the same digests from one plain process: no group, no DDP."""
    model, digests = IntegerProbe(seed), []
    for inputs in probe_inputs(folder, num_batches):
        model.zero_grad(set_to_none=True)
        probe_loss(model, inputs).backward()  # type: ignore[no-untyped-call]
        digests.append(digest_gradients(model))
    return digests


def probe_inputs(folder: Path, num_batches: int) -> list[torch.Tensor]:
    """Return the probe's inputs `[B, 16]` from the bytes of the frozen batches, B floored to a power of two."""
    inputs = [integer_inputs(batch) for batch in load_batches(folder, num_batches)]
    return [values[: min(largest_power_of_two(len(values)), NUM_EXACT_SAMPLES)] for values in inputs]


def digest_gradients(model: torch.nn.Module) -> str:
    """Return one digest over all gradients in order of registration."""
    return "".join(digest_tensor(parameter.grad)[:16] for parameter in model.parameters() if parameter.grad is not None)


def legacy_errors(
    context: RankContext,
    workload: Workload,
    model: torch.nn.Module,
    settings: ParallelSettings,
    folder: Path,
    precision: Precision,
) -> dict[str, Any]:
    """Average the gradients of this rank's shares at the legacy weights and compare them with the legacy gradients (V5, V6).

    Args:
        context: The rank.
        workload: The training job, after `make_repeatable`.
        model: A plain model of `precision` on its device; its weights are overwritten.
        settings: How gradients are averaged.
        folder: What `record_legacy_gradients` left.
        precision: Which of its gradients to compare with.

    Returns:
        `errors` (one `GradientError` a parameter and step, as plain data), `digests` of the averaged gradients by step, and `order_digest`.
    """
    tensors, batches = load_file(folder / TENSORS_FILE), load_batches(folder, 10**6)
    parallel = parallelise(model, context, settings)
    clock = StepClock(model, context.journal)
    errors: list[GradientError] = []
    digests: list[str] = []
    for step, batch in enumerate(batches):
        clock.begin(step)
        share = workload.to_device(share_of(batch, context, settings.planted), context.device)
        load_weights(model, tensors, step)
        if step == 0 and precision == "float32":
            _save_local_gradient(context, workload, model, share)
        model.zero_grad(set_to_none=True)
        context.journal.enter("forward")
        loss = workload.loss(parallel, as_double(share) if precision == "float64" else share)
        require_finite(loss, step)
        loss.backward()  # type: ignore[no-untyped-call]
        clock.end()
        digests.append(digest_gradients(model))
        errors += compare_gradients(model, tensors, step, precision)
        if step == 0 and precision == "float32" and context.rank == 0:
            save_file(
                {"gradient": _flat([parameter.grad for parameter in model.parameters()])},
                context.folder / "reduced.safetensors",
            )
    clock.close()
    return {
        "errors": [error.model_dump() for error in errors],
        "digests": digests,
        "num_samples": num_samples_in(batches[0]),
    }


def compare_gradients(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], step: int, precision: Precision
) -> list[GradientError]:
    """Return the error of every parameter's gradient, norm-wise; element-wise there would be nothing to divide by."""
    legacy = {
        name: tensors[f"{precision}/{step}/{name}"].double()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    whole_norm = float(torch.stack([value.norm() for value in legacy.values()]).norm())
    whole_largest = max(float(value.abs().max()) for value in legacy.values())
    errors = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            raise ValueError(f"expected a gradient for {name}, got none")
        expected = legacy[name]
        difference = parameter.grad.detach().cpu().double() - expected
        scale = max(float(expected.norm()), NEGLIGIBLE_SHARE * whole_norm)
        largest_scale = max(float(expected.abs().max()), NEGLIGIBLE_SHARE * whole_largest)
        errors.append(
            GradientError(
                parameter=name,
                step=step,
                relative=float(difference.norm()) / scale,
                largest=float(difference.abs().max()) / largest_scale,
            )
        )
    return errors


def _save_local_gradient(context: RankContext, workload: Workload, model: torch.nn.Module, share: Any) -> None:
    """Keep what this rank will contribute, divided already, so that the order of the sum can be found out (V7)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    local = torch.autograd.grad(workload.loss(model, share), parameters)
    save_file(
        {"gradient": _flat([gradient / context.world_size for gradient in local])},
        context.folder / f"local-{context.rank:05d}.safetensors",
    )


def _flat(gradients: list[torch.Tensor | None] | list[torch.Tensor]) -> torch.Tensor:
    """Return the first elements of all gradients as one CPU vector."""
    parts = [gradient.detach().cpu().reshape(-1) for gradient in gradients if gradient is not None]
    return torch.cat(parts)[:NUM_ORDER_ELEMENTS].contiguous()


def share_explained_by_cyclic_sums(folder: Path, world_size: int) -> tuple[int, int]:
    """Return how many elements of the averaged gradient equal one of the cyclic sums of the ranks' contributions, and how many there are.

    Gloo's ring adds in decreasing order of ranks, beginning anywhere: 100 % of the elements were explained so, 88 to 94 % in increasing order
    (measured on torch 2.13). With two ranks there is only one sum, on NCCL too.
    """
    reduced = load_file(folder / "reduced.safetensors")["gradient"]
    local = [load_file(folder / f"local-{rank:05d}.safetensors")["gradient"] for rank in range(world_size)]
    explained = torch.zeros(reduced.shape, dtype=torch.bool)
    for start in range(world_size):
        total = local[start].clone()
        for offset in range(1, world_size):
            total += local[(start - offset) % world_size]
        explained |= total == reduced
    return int(explained.sum()), reduced.numel()
