"""The digits workload: real images, augmentation in the worker, a legacy pipeline that repeats with its seed."""

import random

import numpy as np
import torch

from dualtrack.training.workload import load_workload, seed_everything
from dualtrack.workloads import digits
from dualtrack.workloads.digits import DigitsDataset
from dualtrack.workloads.recipes import recipe_digest


def test_all_1797_images_are_there_and_the_evaluation_split_has_its_digest() -> None:
    assert (len(DigitsDataset("train")), len(DigitsDataset("eval"))) == (1437, 360)
    assert (
        recipe_digest(DigitsDataset("eval"), 360) == "e697d901390262094f47c4e29d3173eb5796788f131d27115a2aa3d7670bbf65"
    )


def test_values_lie_between_zero_and_one_and_every_class_occurs() -> None:
    dataset = DigitsDataset("train")
    assert (float(dataset.images.min()), float(dataset.images.max())) == (0.0, 1.0)
    assert set(dataset.labels) == set(range(10))


def test_augmentation_draws_from_random_numpy_and_torch() -> None:
    dataset = DigitsDataset("train")
    states = (random.getstate(), np.random.get_state()[2], torch.get_rng_state())
    first = dataset[0][0]
    assert random.getstate() != states[0]
    assert np.random.get_state()[2] != states[1]
    assert not torch.equal(torch.get_rng_state(), states[2])
    assert not torch.equal(dataset[0][0], first)


def test_the_legacy_loader_repeats_with_the_seed_and_differs_between_epochs() -> None:
    def epoch() -> list[torch.Tensor]:
        return [images for images, _ in digits.create().legacy_loader("train")]

    seed_everything(5)
    first, second = epoch(), epoch()
    seed_everything(5)
    again = epoch()
    assert [len(images) for images in first] == [64] * 22 + [29]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_bare_name_loads_it() -> None:
    assert load_workload("digits").name == "digits"
    assert sum(parameter.numel() for parameter in digits.create().model().parameters()) == 25_826
