"""The old system's gradients on the frozen batches, parameter by parameter: what every rank's average is compared with.

Computed in one process by the untouched workload, at the weights that legacy training reaches step by step, in float32 and in float64. Made
for a fresh process: plain arguments in, plain data out, tensors in files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dualtrack.facts.frozen_inputs import load_manifest
from dualtrack.facts.observations import Fact
from dualtrack.training.batch_slices import as_double, num_samples_in
from dualtrack.training.frozen_batches import digest_parameters
from dualtrack.training.frozen_run import load_frozen_batches
from dualtrack.training.gradient_buckets import BucketLayout, predict_layout, record_ready_order, trainable
from dualtrack.training.loop import TrainingJob, deterministic_algorithms
from dualtrack.training.rank_readiness import equality_numerics, make_repeatable, refuse_unequal
from dualtrack.training.workload import load_workload

TENSORS_FILE = "legacy.safetensors"
BATCHES_FILE = "batches.pt"


class LegacySpec(Fact):
    """What is asked of the old system."""

    workload: str
    frozen_folder: str
    folder: str
    """Where tensors go."""
    device: str
    seed: int
    num_batches: int
    largest_world_size: int
    """The batches must be shareable by so many ranks."""
    bucket_caps_mb: tuple[float | None, ...]
    """Caps whose layouts are predicted from this model's ready order."""
    anchor_device: str
    """Where the frozen baseline was computed."""


class LegacyGradients(Fact):
    """What the old system computed."""

    folder: str
    num_batches: int
    batch_size: int
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    initial_parameters_digest: str
    anchor: dict[str, float]
    """Loss and gradient norm of the first batch with the user's own settings, to be compared with the baseline; empty with dropout, whose masks
    depend on what was drawn before."""
    parameter_names: tuple[str, ...]
    """Trainable parameters, as DDP numbers them."""
    predicted_layouts: tuple[BucketLayout, ...]
    """For each cap asked for, in order."""
    gradient_bytes: int
    float64_error: str | None
    """Why the workload does not run in float64, if it does not."""
    notes: tuple[str, ...]


def record_legacy_gradients(spec: LegacySpec) -> LegacyGradients:
    """Train on the first frozen batches, keep weights and gradients of each step, and refuse what can't be equal on many ranks.

    Raises:
        StageRefused: BatchNorm, unused parameters, random draws in the loss, a loss that is no mean, or batches that can't be shared.
        FrozenInputError: The frozen batches differ from their manifest.
    """
    torch.set_num_threads(1)  # as the ranks: the number of threads decides the order of sums inside a kernel
    device = torch.device(spec.device)
    workload = load_workload(spec.workload)
    frozen = Path(spec.frozen_folder)
    batches = _full_batches(load_frozen_batches(frozen, load_manifest(frozen), spec.workload), spec.num_batches)
    with deterministic_algorithms():
        anchor = _anchor(spec, batches[0])
    with equality_numerics():
        job = TrainingJob(workload, device, spec.seed)
        initial = digest_parameters(job.model)
        notes = make_repeatable(workload, job.model)
        first = workload.to_device(batches[0], device)
        refuse_unequal(workload, job.model, first, spec.largest_world_size)
        order = record_ready_order(job.model, lambda: job.backward(first))
        tensors, losses, norms = _train(job, batches)
        error = _add_float64(spec, workload, batches, tensors)
    folder = Path(spec.folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS_FILE)
    torch.save(batches, folder / BATCHES_FILE)
    named = {id(parameter): name for name, parameter in job.model.named_parameters()}
    layouts = tuple(predict_layout(job.model.parameters(), cap, order) for cap in spec.bucket_caps_mb)
    return LegacyGradients(
        folder=str(folder), num_batches=len(batches), batch_size=num_samples_in(batches[0]), losses=tuple(losses), gradient_norms=tuple(norms),
        initial_parameters_digest=initial, anchor={} if any("dropout" in note for note in notes) else anchor, parameter_names=tuple(named[id(parameter)] for parameter in trainable(job.model.parameters())),
        predicted_layouts=layouts, gradient_bytes=layouts[0].num_bytes, float64_error=error, notes=tuple(notes),
    )  # fmt: skip


def _anchor(spec: LegacySpec, batch: Any) -> dict[str, float]:
    """Return loss and gradient norm of the first frozen batch as the baseline computes them."""
    device = torch.device(spec.anchor_device)
    job = TrainingJob(load_workload(spec.workload), device, spec.seed)
    loss = float(job.backward(job.workload.to_device(batch, device)))
    return {"loss": loss, "gradient norm": job.gradient_norm()}


def load_batches(folder: Path, num_batches: int) -> list[Any]:
    """Return the frozen batches that the old system was run on, as it kept them beside its gradients."""
    # own classes inside a batch need pickle; the file was written by this stage a moment ago
    batches: list[Any] = torch.load(folder / BATCHES_FILE, weights_only=False)
    return batches[:num_batches]


def _full_batches(batches: Sequence[Any], num_batches: int) -> list[Any]:
    """Return the first so many batches of the size of the first; a smaller last one can't be shared alike."""
    size = num_samples_in(batches[0])
    return [batch for batch in batches if num_samples_in(batch) == size][:num_batches]


def _train(job: TrainingJob, batches: Sequence[Any]) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    tensors: dict[str, torch.Tensor] = {}
    losses, norms = [], []
    for step, batch in enumerate(batches):
        for name, parameter in job.model.named_parameters():
            tensors[f"weights/{step}/{name}"] = parameter.detach().cpu().clone()
        losses.append(float(job.backward(job.workload.to_device(batch, job.device))))
        norms.append(job.gradient_norm())
        tensors |= _gradients(job.model, f"float32/{step}")
        job.optimizer.step()
    return tensors, losses, norms


def _add_float64(
    spec: LegacySpec, workload: Any, batches: Sequence[Any], tensors: dict[str, torch.Tensor]
) -> str | None:
    """Add the float64 gradients at the same weights; return the reason where the workload can't compute in float64."""
    job = TrainingJob(workload, torch.device(spec.device), spec.seed)
    make_repeatable(workload, job.model)
    model = job.model.double()
    try:
        for step, batch in enumerate(batches):
            load_weights(model, tensors, step)
            model.zero_grad(set_to_none=True)
            workload.loss(model, as_double(workload.to_device(batch, job.device))).backward()
            tensors |= _gradients(model, f"float64/{step}")
    except RuntimeError as error:
        return f"the workload's loss does not run in float64: {error}"[:300]
    return None


def load_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor], step: int) -> None:
    """Set the model's parameters to the weights before `step` of legacy training, in the model's own dtype."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"weights/{step}/{name}"])


def _gradients(model: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}/{name}": parameter.grad.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
