"""One training step, and the two ways to run many: for equality, and for time.

Equality runs use deterministic algorithms and record every loss and gradient norm; timing runs use the user's settings and record when each
step ended. Both run in fresh processes and return plain data.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dualtrack.facts.errors import NonFiniteLoss
from dualtrack.training.workload import Workload, seed_everything


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:n`.

    Raises:
        ValueError: CUDA was asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"expected a CUDA device for device={name!r}, found none; use 'auto' or 'cpu'")
    return device


def precision_of(workload: Workload) -> str:
    """Return the precision of the matrix products: the workload's `autocast_dtype` if it has one, else float32 or tf32 by torch's setting."""
    autocast_dtype = getattr(workload, "autocast_dtype", None)
    if autocast_dtype is not None:
        return str(autocast_dtype).removeprefix("torch.")
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32"


class TrainingJob:
    """Model and optimizer on their device; steps on batches that are there already."""

    def __init__(self, workload: Workload, device: torch.device, seed: int) -> None:
        """Seed the generators, build model and optimizer, then seed again, so that loading does not depend on the model's initialisation."""
        seed_everything(seed)
        self.workload, self.device = workload, device
        self.model = workload.model().to(device)
        self.optimizer = workload.optimizer(self.model)
        seed_everything(seed)

    def step(self, batch: Any) -> torch.Tensor:
        """Run forward, backward and optimizer step; return the detached loss, a scalar on the device."""
        loss = self.backward(batch)
        self.optimizer.step()
        return loss

    def backward(self, batch: Any) -> torch.Tensor:
        """Run forward and backward; return the detached loss, a scalar on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.workload.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return loss.detach()

    def gradient_norm(self) -> float:
        """Return the L2 norm over all gradients, accumulated in float64 per tensor."""
        squares = [
            float(value.grad.detach().double().square().sum())
            for value in self.model.parameters()
            if value.grad is not None
        ]
        return math.sqrt(math.fsum(squares))


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Turn deterministic algorithms on; where torch has none for an operator, it raises rather than differ silently."""
    # cuBLAS reads this when its first handle is made, so it must be set before CUDA starts in this process
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def run_equality_steps(
    job: TrainingJob, batches: Iterator[Any], num_steps: int, on_batch: Callable[[int, Any], None] | None = None
) -> tuple[list[float], list[float]]:
    """Train up to `num_steps` steps and return the losses and the gradient norms, one each a step.

    Args:
        job: A fresh job.
        batches: Device batches.
        num_steps: Most steps to run.
        on_batch: Called with step and batch before the step, for digests.

    Raises:
        NonFiniteLoss: A loss is NaN or infinite; the message names the step.
    """
    losses: list[float] = []
    norms: list[float] = []
    for step, batch in enumerate(batches):
        if step == num_steps:
            break
        if on_batch is not None:
            on_batch(step, batch)
        loss = float(job.backward(batch))
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"step {step}: expected a finite loss, got {loss}; lower the learning rate or look at the batch"
            )
        losses.append(loss)
        norms.append(job.gradient_norm())
        job.optimizer.step()
    return losses, norms
