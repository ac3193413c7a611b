"""What can't be equal on many ranks is refused with the reason; what can be made equal is, and says so."""

from typing import Any

import pytest
import torch
from torch import nn

from dualtrack.facts.errors import StageRefused
from dualtrack.training.rank_readiness import make_repeatable, refuse_unequal
from dualtrack.training.workload import load_workload
from dualtrack.workloads.digits import Digits

BATCH = [torch.randn(8, 1, 8, 8), torch.arange(8) % 10]


class _Job(Digits):
    """The digits with a model and a loss of the test's own."""

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self.module, self.own_loss = model, loss

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return self.own_loss(model, batch) if self.own_loss else nn.functional.cross_entropy(model(images), labels)


def linear(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), *more)


def test_the_bundled_digits_are_ready() -> None:
    workload = load_workload("digits")
    refuse_unequal(workload, workload.model(), BATCH, 8)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(10), nn.SyncBatchNorm(10)])
def test_batch_norm_is_refused_and_the_layer_is_named(layer: nn.Module) -> None:
    model = linear(layer)
    with pytest.raises(StageRefused, match=r"without BatchNorm, found 2: .*GroupNorm"):
        refuse_unequal(_Job(model), model, BATCH, 2)


def test_dropout_is_turned_off_for_equality_and_said_so() -> None:
    model = nn.Sequential(linear(nn.Dropout(0.5)), nn.Dropout1d(0.0))
    notes = make_repeatable(_Job(model), model)
    assert notes == ["dropout is off in equality runs: 0.2"]
    refuse_unequal(_Job(model), model, BATCH, 2)


def test_dropout_inside_an_attention_is_turned_off_too() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.3)
    assert make_repeatable(_Job(attention), attention) == ["dropout is off in equality runs: the model itself"]
    assert attention.dropout == 0.0


def test_autocast_is_turned_off_for_equality_and_said_so() -> None:
    job = _Job(linear())
    job.autocast_dtype = torch.bfloat16  # type: ignore[attr-defined]
    assert make_repeatable(job, job.module) == ["autocast to torch.bfloat16 is off in equality runs"]
    assert job.autocast_dtype is None  # type: ignore[attr-defined]


def test_a_loss_that_draws_random_numbers_is_refused() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.dropout(model(batch[0])), batch[1])

    model = linear()
    with pytest.raises(StageRefused, match="draws no random numbers"):
        refuse_unequal(_Job(model, noisy), model, BATCH, 2)


def test_a_parameter_without_gradient_is_refused_by_name() -> None:
    model = linear()
    model.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    with pytest.raises(StageRefused, match=r"none came to spare: .*requires_grad_"):
        refuse_unequal(_Job(model), model, BATCH, 2)


def test_a_loss_that_is_no_mean_over_samples_is_refused() -> None:
    def summed(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def over_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
        weights = 1.0 + (batch[1] > 3).float()
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * weights).sum() / weights.sum()

    uneven = [BATCH[0], torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])]
    model = linear()
    for loss in (summed, over_tokens):
        with pytest.raises(StageRefused, match="no mean over samples of equal weight"):
            refuse_unequal(_Job(model, loss), model, uneven, 2)


def test_batches_that_the_largest_rung_cannot_share_are_refused() -> None:
    model = linear()
    with pytest.raises(StageRefused, match="3 ranks can share evenly, got 8"):
        refuse_unequal(_Job(model), model, BATCH, 3)
