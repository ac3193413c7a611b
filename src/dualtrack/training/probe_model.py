"""A model whose gradients are exact in float32, so that any number of ranks must equal one process bit for bit.

Small integer weights and inputs, a sum of squares over 2B with B a power of two: every intermediate is a multiple of 1 / B below 2**24 / B.
A duplicated shard, a sum instead of a mean, a loss scaled by 1.0001 on one rank: each changes bits, and there is no tolerance to argue about.
"""

from typing import Any

import torch
from torch import nn

NUM_INPUTS, NUM_HIDDEN, NUM_OUTPUTS = 16, 8, 4
NUM_EXACT_SAMPLES = 1024
"""Hidden values reach 33 and residuals 267, so a sum over 1,024 samples stays below 2**24, where float32 still holds every integer."""


class IntegerProbe(nn.Module):
    """Two linear layers without activation, weights in {-1, 0, 1}."""

    def __init__(self, seed: int) -> None:
        """Draw the weights from a generator of its own."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(NUM_INPUTS, NUM_HIDDEN)
        self.second = nn.Linear(NUM_HIDDEN, NUM_OUTPUTS)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator).float())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map integers `[B, 16]` to integers `[B, 4]`, both float32."""
        return self.second(self.first(inputs))  # type: ignore[no-any-return]


def integer_inputs(batch: Any) -> torch.Tensor:
    """Return integers in -2..2 `[B, 16]` float32 that follow from each sample's own bytes.

    Args:
        batch: A batch in legacy structure; its first tensor with more than one value a sample is read, row by row.
    """
    leaves = [
        leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim > 0
    ]
    leaf = next((leaf for leaf in leaves if leaf.ndim > 1), leaves[0])
    rows = (
        leaf.detach()
        .cpu()
        .contiguous()
        .reshape(leaf.shape[0], -1)
        .view(torch.uint8)
        .reshape(leaf.shape[0], -1)
        .to(torch.int64)
    )
    folded = torch.zeros(rows.shape[0], NUM_INPUTS, dtype=torch.int64)
    # weights by position, so that samples of equal bytes in another order differ; the sums stay far inside int64
    places = torch.arange(1, rows.shape[1] + 1)
    folded.index_add_(1, places % NUM_INPUTS, rows * places)
    return (folded % 5 - 2).float()


def largest_power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def probe_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the sum of squared residuals over twice the number of samples, a scalar.

    Raises:
        ValueError: The number of samples is no power of two or too large, so that the gradient would be rounded.
    """
    num_samples = inputs.shape[0]
    if num_samples != largest_power_of_two(num_samples) or num_samples > NUM_EXACT_SAMPLES:
        raise ValueError(
            f"expected a power of two up to {NUM_EXACT_SAMPLES} samples, got {num_samples}; the probe would not be exact"
        )
    residuals = model(inputs) - inputs[:, :NUM_OUTPUTS]
    loss: torch.Tensor = (residuals * residuals).sum() / (2 * num_samples)
    return loss
