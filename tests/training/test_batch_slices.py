"""Shares of a global batch in whatever structure it has."""

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from dualtrack.facts.errors import StageRefused
from dualtrack.training.batch_slices import as_double, num_samples_in, slice_batch

Pair = namedtuple("Pair", ["left", "right"])


def batch() -> dict[str, Any]:
    return {
        "images": torch.arange(24.0).reshape(8, 3), "titles": [f"title {place}" for place in range(8)], "pair": Pair(torch.arange(8), [1, 2]),
        "scale": torch.tensor(3.0), "name": "epoch 1", "share": 0.25, "none": None, "order": OrderedDict(a=torch.ones(8)),
    }  # fmt: skip


def test_shares_together_are_the_batch() -> None:
    shares = [slice_batch(batch(), rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat([share["images"] for share in shares]), batch()["images"])
    assert [title for share in shares for title in share["titles"]] == batch()["titles"]
    assert torch.equal(torch.cat([share["pair"].left for share in shares]), torch.arange(8))


def test_structure_and_single_values_stay_as_they_are() -> None:
    share = slice_batch(batch(), 1, 4)
    assert isinstance(share["pair"], Pair)
    assert isinstance(share["order"], OrderedDict)
    assert (share["pair"].right, share["name"], share["share"], share["none"], float(share["scale"])) == (
        [1, 2],
        "epoch 1",
        0.25,
        None,
        3.0,
    )


def test_two_tensors_of_a_batch_of_two_are_not_taken_for_two_samples() -> None:
    images, labels = slice_batch([torch.zeros(2, 5), torch.tensor([7, 8])], 1, 2)
    assert (images.shape, labels.tolist()) == ((1, 5), [8])


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(StageRefused, match="3 ranks can share evenly, got 8 samples"):
        slice_batch(batch(), 0, 3)


def test_a_tensor_whose_first_dimension_is_not_the_sample_is_named() -> None:
    with pytest.raises(StageRefused, match=r"batch\.1: expected 8 samples"):
        slice_batch([torch.zeros(8, 2), torch.zeros(3)], 0, 2)


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(StageRefused, match="at least one tensor"):
        num_samples_in({"text": ["a", "b"]})


def test_only_floating_point_becomes_float64() -> None:
    doubled = as_double([torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bfloat16), "x"])
    assert [value.dtype for value in doubled[:3]] == [torch.float64, torch.int64, torch.float64]
