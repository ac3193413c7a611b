"""Inputs that are made, not stored: a recipe is a generator, its settings and the digest that its output must have.

Everything a recipe decides comes from integers (SplitMix64 here, raw PCG64 words in the generators), so the digest depends neither on
torch's random generators nor on how a CPU orders floating point sums.
"""

import importlib.resources
from importlib.resources.abc import Traversable
from typing import Any, Protocol

from dualtrack.facts.digests import sha256_bytes, sha256_json
from dualtrack.facts.errors import FrozenInputError
from dualtrack.facts.frozen_inputs import LFS_HEADER
from dualtrack.training.frozen_batches import digest_batch

MASK = 2**64 - 1


class RepeatableDataset(Protocol):
    """A map-style dataset; with `augment` off, a sample depends on its index alone."""

    augment: bool

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


def mix(seed: int, index: int) -> int:
    """Return 64 well mixed bits for `index`: output number `index` of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) started at `seed`."""
    word = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def recipe_digest(dataset: RepeatableDataset, num_samples: int = 64) -> str:
    """Return one digest over the length and the first `num_samples` samples of a dataset without augmentation.

    Raises:
        ValueError: The dataset augments, so its samples change from call to call.
    """
    if dataset.augment:
        raise ValueError(
            "expected a dataset with augment=False, got augment=True; only samples that repeat have a digest"
        )
    samples = [digest_batch(dataset[index], "sample") for index in range(min(num_samples, len(dataset)))]
    return sha256_json([len(dataset), samples])


def verify_digest(what: str, found: str, expected: str) -> None:
    """Compare the digest of generated content with the one it was frozen with.

    Raises:
        FrozenInputError: They differ: this machine makes other inputs than those the evidence was gathered on.
    """
    if found != expected:
        raise FrozenInputError(
            f"{what}: expected digest {expected}, this machine generated {found}; results would not be comparable: "
            "report the versions of Python and numpy, and do not freeze over it"
        )


def read_bundled(file_name: str, expected_sha256: str, folder: Traversable | None = None) -> bytes:
    """Read a data file that ships with the package and verify it.

    Args:
        file_name: Name in `workloads/data`.
        expected_sha256: Digest of the file's raw bytes.
        folder: Where to look instead of `workloads/data`.

    Raises:
        FrozenInputError: The file is missing, is a git-LFS pointer, or differs from its digest.
    """
    path = (folder or importlib.resources.files("dualtrack.workloads").joinpath("data")).joinpath(file_name)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise FrozenInputError(
            f"expected the bundled file data/{file_name}, found none; install dualtrack again"
        ) from error
    if content.startswith(LFS_HEADER):
        raise FrozenInputError(f"data/{file_name} is a git-LFS pointer, not the data; run `git lfs pull`")
    found = sha256_bytes(content)
    if found != expected_sha256:
        raise FrozenInputError(
            f"data/{file_name}: expected SHA-256 {expected_sha256}, found {found}; restore the file or install dualtrack again"
        )
    return content
