"""The integer probe: exact whatever the order of sums, and blind to nothing."""

import pytest
import torch

from dualtrack.training.probe_model import IntegerProbe, integer_inputs, largest_power_of_two, probe_loss

INPUTS = integer_inputs([torch.rand(64, 1, 8, 8), torch.arange(64)])


def gradient(inputs: torch.Tensor, seed: int = 3) -> torch.Tensor:
    model = IntegerProbe(seed)
    probe_loss(model, inputs).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("world_size", [2, 4, 8, 32])
def test_the_mean_of_shares_is_the_whole_bit_for_bit_in_any_order(world_size: int) -> None:
    shares = [gradient(share) / world_size for share in INPUTS.chunk(world_size)]
    forward, backward = torch.zeros_like(shares[0]), torch.zeros_like(shares[0])
    for share in shares:
        forward += share
    for share in reversed(shares):
        backward += share
    assert torch.equal(forward, gradient(INPUTS))
    assert torch.equal(backward, gradient(INPUTS))


def test_no_value_is_near_the_limit_of_exactness() -> None:
    largest = IntegerProbe(0)
    for parameter in largest.parameters():
        parameter.data.fill_(1.0)
    hidden = largest.first(torch.full((1, 16), 2.0)).detach()
    assert float(hidden.max()) == 33
    assert (33 * 8 + 1 + 2) * 33 * 1024 < 2**24


def test_a_sample_twice_or_a_missing_one_changes_bits() -> None:
    twice = torch.cat([INPUTS[:32], INPUTS[:32]])
    assert not torch.equal(gradient(twice), gradient(INPUTS))


def test_inputs_follow_from_each_samples_own_bytes() -> None:
    images = torch.rand(8, 5)
    whole = integer_inputs([images, torch.arange(8)])
    assert torch.equal(integer_inputs([images[4:], torch.arange(4)]), whole[4:])
    assert set(whole.unique().tolist()) <= {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert len({tuple(row.tolist()) for row in whole}) == 8


def test_a_number_of_samples_that_would_be_rounded_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two up to 1024 samples, got 48"):
        probe_loss(IntegerProbe(0), INPUTS[:48])
    assert largest_power_of_two(48) == 32
