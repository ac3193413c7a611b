"""The vision models: sizes as promised, and nothing in them that many ranks or equality runs can't bear."""

import pytest
import torch
from torch import nn

from dualtrack.workloads.vision_models import MODELS, build_model

NUM_PARAMETERS = {"resnet50": 25_557_032, "vit_s": 22_049_896, "vit_l": 304_324_584}
FORBIDDEN = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.MaxPool2d, nn.AdaptiveAvgPool2d)


@pytest.mark.parametrize(("name", "expected"), NUM_PARAMETERS.items())
def test_the_full_models_have_their_number_of_parameters(name: str, expected: int) -> None:
    with torch.device("meta"):
        model = build_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("name", MODELS)
def test_no_model_holds_batchnorm_dropout_or_a_pool_without_deterministic_backward(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name)
        assert not [module for module in model.modules() if isinstance(module, FORBIDDEN)]
        assert not list(model.buffers()), "a buffer would be synchronised, or drift, between ranks"


@pytest.mark.full
@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_every_parameter_of_a_full_model_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name)
    nn.functional.cross_entropy(model(torch.randn(2, 3, 224, 224)), torch.tensor([3, 7])).backward()
    lacking = [
        key
        for key, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all() or not parameter.grad.any()
    ]
    assert not lacking


@pytest.mark.full
@pytest.mark.parametrize("name", ["resnet50", "vit_s"])
def test_float32_gradients_stay_near_the_float64_ones_so_that_rounding_flips_no_kink(name: str) -> None:
    torch.manual_seed(0)
    model, images, labels = build_model(name), torch.rand(2, 3, 224, 224), torch.tensor([3, 7])
    nn.functional.cross_entropy(model(images), labels).backward()
    single = {key: parameter.grad.double() for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    nn.functional.cross_entropy(model.double()(images.double()), labels).backward()
    errors = {
        key: float((single[key] - value.grad).norm() / value.grad.norm())
        for key, value in model.named_parameters()
        if value.grad is not None
    }
    assert len(errors) == len(list(model.parameters()))
    assert max(errors.values()) < 2.5e-4, "3.8e-3 with ReLU, 1.5e-5 with SiLU"


def test_an_unknown_model_and_a_size_that_patches_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="resnet50, vit_s"):
        build_model("resnet51")
    with pytest.raises(ValueError, match="multiple of 16, got 100"):
        build_model("vit_s", image_pixels=100)
