"""A small causal language model over bytes: learned positions, pre-norm blocks, LayerNorm, no dropout."""

import torch
from torch import nn

from dualtrack.workloads.transformer_block import TransformerBlock

NUM_SYMBOLS = 256  # one per byte; 0 never occurs in text and stands for padding


class LanguageModel(nn.Module):
    """Predict each next byte from those before it."""

    def __init__(self, max_length: int, shape: tuple[int, int, int]) -> None:
        """Build for up to `max_length` bytes; `shape` is (width, number of blocks, heads a block)."""
        super().__init__()
        width, num_blocks, num_heads = shape
        self.symbols = nn.Embedding(NUM_SYMBOLS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(max_length, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, NUM_SYMBOLS)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Map bytes `[B, T]` int64 and their mask `[B, T]` bool to logits `[B, T, 256]`.

        A query sees real bytes only, up to its own place. Padding is at the end, so that every query, padding too, sees at least the first byte.
        """
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        allowed = (causal & mask[:, None, :])[:, None]
        stream = self.symbols(tokens) + self.positions[:length]
        for block in self.blocks:
            stream = block(stream, allowed)
        logits: torch.Tensor = self.output(self.norm(stream))
        return logits
