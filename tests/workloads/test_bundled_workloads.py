"""What every bundled workload owes to stage 3 and to the reader: ranks add up, gradients exist, training learns."""

from typing import Any

import pytest
import torch
from torch import nn

from dualtrack.training.batch_slices import as_double, slice_batch
from dualtrack.training.frozen_batches import digest_batch
from dualtrack.training.workload import Workload, load_workload, seed_everything

SMALL = ("digits", "images", "dualtrack.workloads.images:create_small_vit_fp32", "tokens")


def first_batch(workload: Workload) -> Any:
    seed_everything(5)
    return next(iter(workload.legacy_loader("train")))


def loss_and_gradient(workload: Workload, model: nn.Module, batch: Any) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = workload.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize("world_size", [2, 4, 32])
@pytest.mark.parametrize("reference", SMALL)
def test_the_mean_over_equal_rank_slices_is_the_loss_and_gradient_of_the_whole(reference: str, world_size: int) -> None:
    workload = load_workload(reference)
    batch = as_double(first_batch(workload))
    model = workload.model().double()
    whole_loss, whole_gradient = loss_and_gradient(workload, model, batch)
    parts = [loss_and_gradient(workload, model, slice_batch(batch, rank, world_size)) for rank in range(world_size)]
    assert sum(loss for loss, _ in parts) / world_size == pytest.approx(whole_loss, rel=1e-12)
    gradient = torch.stack([part for _, part in parts]).mean(dim=0)
    assert float((gradient - whole_gradient).norm() / whole_gradient.norm()) < 1e-12


@pytest.mark.parametrize("reference", SMALL)
def test_to_device_keeps_containers_dtypes_and_bits(reference: str) -> None:
    workload = load_workload(reference)
    batch = first_batch(workload)
    assert digest_batch(workload.to_device(batch, torch.device("cpu")), "batch") == digest_batch(batch, "batch")


@pytest.mark.parametrize("reference", SMALL)
def test_every_parameter_gets_a_finite_gradient_that_is_not_all_zero(reference: str) -> None:
    workload = load_workload(reference)
    batch = first_batch(workload)
    model = workload.model()
    workload.loss(model, workload.to_device(batch, torch.device("cpu"))).backward()  # type: ignore[no-untyped-call]
    lacking = [
        name
        for name, value in model.named_parameters()
        if value.grad is None or not value.grad.isfinite().all() or not value.grad.any()
    ]
    assert not lacking


@pytest.mark.parametrize("reference", SMALL)
def test_an_epoch_of_training_lowers_the_loss(reference: str) -> None:
    workload = load_workload(reference)
    seed_everything(5)
    model = workload.model()
    optimizer = workload.optimizer(model)
    losses = []
    for batch in workload.legacy_loader("train"):
        optimizer.zero_grad()
        loss = workload.loss(model, workload.to_device(batch, torch.device("cpu")))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) / 3 < 0.9 * losses[0]


@pytest.mark.parametrize("reference", SMALL)
def test_no_model_holds_batchnorm_or_dropout(reference: str) -> None:
    forbidden = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    assert not [module for module in load_workload(reference).model().modules() if isinstance(module, forbidden)]


@pytest.mark.parametrize("reference", SMALL)
def test_evaluation_batches_repeat_without_a_seed(reference: str) -> None:
    workload = load_workload(reference)

    def first_tensor() -> torch.Tensor:
        batch = next(iter(workload.legacy_loader("eval")))
        found = batch["tokens"] if isinstance(batch, dict) else batch[0]
        assert isinstance(found, torch.Tensor)
        return found

    assert torch.equal(first_tensor(), first_tensor())
