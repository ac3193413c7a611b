"""The transformer block that the vision and the language models share: pre-norm, LayerNorm, no dropout."""

import torch
from torch import nn


class TransformerBlock(nn.Module):
    """Self-attention and a fourfold GELU layer, each on a normalised input and added to the residual stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        """Build a block for `[B, T, width]`; `width` must be a multiple of `num_heads`."""
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, stream: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """Return the new residual stream.

        Args:
            stream: `[B, T, width]`.
            allowed: bool, broadcastable to `[B, heads, T, T]`: which key a query may attend to, at least one each; None allows all.
        """
        stream = stream + self.attention_output(self._attend(self.attention_norm(stream), allowed))
        updated: torch.Tensor = stream + self.feed_forward(self.feed_forward_norm(stream))
        return updated

    def _attend(self, normalised: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        batch, length, width = normalised.shape
        packed = self.query_key_value(normalised).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return mixed.transpose(1, 2).reshape(batch, length, width)
