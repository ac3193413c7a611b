"""Text of unequal lengths: nested dict batches with padding, mask, strings and numbers, and a byte-level causal language model.

The text is *Alice's Adventures in Wonderland*, in the public domain. The pipeline, with a collate function as people write it, is the
*legacy* side of every comparison and is never improved.
"""

import functools
import gzip
import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dualtrack.training.workload import Split
from dualtrack.workloads.language_model import LanguageModel
from dualtrack.workloads.recipes import mix, read_bundled

SIZES = {"small": "dualtrack.workloads.tokens:create", "full": "dualtrack.workloads.tokens:create_full"}
"""What `--size` stands for."""

TEXT_SHA256 = "71d209ad535a784b6302417329ca0626dcf8da8db6ab79e131efa3e5fb9581b9"
NUM_TRAIN_CHAPTERS = 10  # of twelve; passages overlap, so the split must not cut through a chapter
SEED = 20260101


@dataclass(frozen=True, kw_only=True)
class TokensSettings:
    """What distinguishes one job of this module from another."""

    name: str
    shape: tuple[int, int, int]  # width, number of blocks, heads a block
    batch_size: int
    min_length: int
    max_length: int
    stride: int  # bytes from the start of one passage to the next
    num_workers: int
    autocast_dtype: torch.dtype | None


@functools.lru_cache(maxsize=1)
def _chapters() -> tuple[tuple[str, bytes], ...]:
    """Return the title and the text of each chapter, white space folded to single blanks."""
    book = gzip.decompress(read_bundled("alice.txt.gz", TEXT_SHA256)).decode("ascii")
    pieces = re.split(r"\n +CHAPTER [IVX]+\n\n +(.+)\n", book)
    return tuple(
        (title, " ".join(text.split()).encode()) for title, text in zip(pieces[1::2], pieces[2::2], strict=True)
    )


class TokensDataset(Dataset[dict[str, Any]]):
    """Passages of the book: each starts `stride` bytes after the one before and runs on for a length of its own."""

    def __init__(self, split: Split, *, min_length: int, max_length: int, stride: int, augment: bool = False) -> None:
        """Read the bundled text.

        Args:
            split: `train` takes the first ten chapters, `eval` the last two.
            min_length: Bytes of the shortest passage, at least 2.
            max_length: Bytes of the longest passage.
            stride: Bytes from the start of one passage to the next.
            augment: Draw the length from `random` in the worker; otherwise it follows from the index.

        Raises:
            FrozenInputError: The text is missing, damaged, or a git-LFS pointer.
            ValueError: The lengths contradict each other.
        """
        if not 2 <= min_length <= max_length or stride < 1:
            raise ValueError(
                f"expected 2 <= min_length <= max_length and stride >= 1, got {min_length}, {max_length} and {stride}"
            )
        self.min_length, self.max_length, self.augment = min_length, max_length, augment
        self.chapters = _chapters()[:NUM_TRAIN_CHAPTERS] if split == "train" else _chapters()[NUM_TRAIN_CHAPTERS:]
        self.places = [
            (number, start)
            for number, (_, text) in enumerate(self.chapters)
            for start in range(0, len(text) - max_length + 1, stride)
        ]

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the bytes of one passage, int64 `[length]`, with the title of its chapter and where it starts there."""
        number, start = self.places[index]
        spread = self.max_length - self.min_length
        length = self.min_length + (random.randint(0, spread) if self.augment else mix(SEED, index) % (spread + 1))
        title, text = self.chapters[number]
        return {"tokens": torch.tensor(list(text[start : start + length])), "title": title, "start": start}


def collate_passages(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad passages with zeros to the longest and gather what belongs to them.

    Returns:
        `tokens` int64 `[B, T]`, `mask` bool `[B, T]`, and `meta` with `titles` (strings), `lengths` (ints), `starts` int32 `[B]` and
        `padding_share`, a float.
    """
    lengths = [len(sample["tokens"]) for sample in samples]
    longest = max(lengths)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    for row, sample in enumerate(samples):
        tokens[row, : lengths[row]] = sample["tokens"]
    return {
        "tokens": tokens,
        "mask": torch.arange(longest) < torch.tensor(lengths)[:, None],
        "meta": {
            "titles": [sample["title"] for sample in samples],
            "lengths": lengths,
            "starts": torch.tensor([sample["start"] for sample in samples], dtype=torch.int32),
            "padding_share": 1 - sum(lengths) / (len(samples) * longest),
        },
    }


class Tokens:
    """One language modelling job.

    `autocast_dtype` is the precision of `loss`: bf16 at full size, None (no autocast) on the small one. Equality runs set it to None on the
    instance; a float64 model is never autocast.
    """

    def __init__(self, settings: TokensSettings) -> None:
        """Keep the settings; nothing is read yet."""
        self.settings = settings
        self.name = settings.name
        self.autocast_dtype = settings.autocast_dtype

    def legacy_loader(self, split: Split) -> DataLoader[Any]:
        """Build the old synchronous loader; pageable memory, new workers every epoch."""
        settings, training = self.settings, split == "train"
        dataset = TokensDataset(
            split,
            min_length=settings.min_length,
            max_length=settings.max_length,
            stride=settings.stride,
            augment=training,
        )
        return DataLoader(
            dataset,
            settings.batch_size,
            shuffle=training,
            num_workers=settings.num_workers,
            collate_fn=collate_passages,
        )

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Copy the three tensors one by one; strings and numbers stay on the host."""
        return {
            "tokens": batch["tokens"].to(device),
            "mask": batch["mask"].to(device),
            "meta": {**batch["meta"], "starts": batch["meta"]["starts"].to(device)},
        }

    def model(self) -> nn.Module:
        """Build the language model."""
        return LanguageModel(self.settings.max_length, self.settings.shape)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean over passages of the mean cross entropy of their bytes, the first byte of each given.

        Not the mean over all bytes of the batch: with unequal lengths the mean of the ranks' means would then differ from the mean of the
        whole, and many ranks could not equal one. So every passage weighs the same, whatever its length.
        """
        tokens, mask = batch["tokens"], batch["mask"]
        mixed = self.autocast_dtype is not None and next(model.parameters()).dtype == torch.float32
        with torch.autocast(tokens.device.type, self.autocast_dtype, enabled=mixed):
            logits = model(tokens, mask)[:, :-1]
            # flat, since CUDA has no deterministic cross entropy over [B, classes, T]
            losses = nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1), reduction="none"
            )
        weights = mask[:, 1:].to(losses.dtype)
        means: torch.Tensor = (losses.view_as(weights) * weights).sum(dim=1) / weights.sum(dim=1)
        return means.mean()


def create() -> Tokens:
    """Build the small job: 87,616 parameters, passages of 32 to 128 bytes."""
    settings = TokensSettings(
        name="tokens", shape=(48, 2, 3), batch_size=32, min_length=32, max_length=128, stride=96, num_workers=2, autocast_dtype=None,
    )  # fmt: skip
    return Tokens(settings)


def create_full() -> Tokens:
    """Build the full job: 26.0 M parameters, passages of 256 to 1,024 bytes."""
    settings = TokensSettings(
        name="tokens_full", shape=(512, 8, 8), batch_size=64, min_length=256, max_length=1024, stride=24, num_workers=8,
        autocast_dtype=torch.bfloat16,
    )  # fmt: skip
    return Tokens(settings)
