"""The one thing a user writes: a training job as the workbook sees it, five short methods around an untouched legacy loader."""

import importlib
import random
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import torch

Split = Literal["train", "eval"]


@runtime_checkable
class Workload(Protocol):
    """A training job. Whatever stages 1 to 3 change, these five methods stay as they are.

    The workbook seeds `random`, `numpy.random` and `torch` before it calls `legacy_loader` or `model`, as a training script does at its top;
    the methods themselves should not seed anything.
    """

    name: str

    def legacy_loader(self, split: Split) -> Iterable[Any]:
        """Build the old loader, usually a `torch.utils.data.DataLoader`, exactly as the old trainer does."""

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Copy one host batch to `device` as the old trainer does (synchronous, pageable), into the same containers and dtypes.

        What the old trainer changes after the copy (scaling, casting, unpacking) belongs into `loss`: stage 2 compares the copies bit for bit.
        """

    def model(self) -> torch.nn.Module:
        """Build the model with fresh parameters, on the CPU."""

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer over the model's parameters."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Run forward on a device batch and return the mean loss over its samples, a scalar tensor `[]`."""


def seed_everything(seed: int) -> None:
    """Seed `random`, `numpy.random` and `torch` (CPU and every CUDA device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def load_workload(reference: str) -> Workload:
    """Build the workload named by `reference`.

    Args:
        reference: `package.module:factory`, or the bare name of a bundled workload (`digits` stands for `dualtrack.workloads.digits:create`).

    Raises:
        ValueError: The module or the factory can't be found, or what it returns lacks one of the five methods; the message names it.
    """
    module_name, _, factory_name = reference.partition(":")
    if not factory_name:
        module_name, factory_name = f"dualtrack.workloads.{reference}", "create"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ValueError(
                f"workload {reference!r}: expected a bundled name or 'package.module:factory', and module {module_name!r} was not found; "
                "install your package or run from its root"
            ) from error
        raise
    factory = cast("Callable[[], Workload] | None", getattr(module, factory_name, None))
    if factory is None:
        raise ValueError(f"workload {reference!r}: module {module_name!r} has no {factory_name!r}")
    workload = factory()
    missing = [
        name
        for name in ("name", "legacy_loader", "to_device", "model", "optimizer", "loss")
        if not hasattr(workload, name)
    ]
    if missing:
        raise ValueError(
            f"workload {reference!r}: {factory_name}() returned a {type(workload).__name__} without {', '.join(missing)}"
        )
    return workload
