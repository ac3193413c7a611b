"""Data as a plan: which sample goes to which rank at which step is arithmetic, so it can be checked without starting a process.

Step s of epoch e uses `permutation(seed, e)[s * B : (s + 1) * B]` of the selected ids, and rank r of W gets the r-th of W equal slices. The
global batch B is the same at every world size, so 1, 4, 8 and 32 ranks see the same samples at the same step; nothing is padded or repeated.
"""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualtrack.facts.digests import sha256_json

Ids = npt.NDArray[np.int64]
_SELECTION = 2**32 - 1  # marks the draw of the subset among the draws of the epochs, whose numbers stay below it


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The samples of every step; pure arithmetic on a seed.

    Raises:
        ValueError: The subset is smaller than one global batch, or an argument is out of its range.
    """

    num_samples: int
    """Length of the dataset."""
    global_batch: int
    """Samples a step over all ranks."""
    data_fraction: float
    """Share of the dataset to use, 0 to 1; floored to a multiple of the global batch."""
    seed: int

    def __post_init__(self) -> None:
        """Refuse a plan without a single full step."""
        if not 0 < self.data_fraction <= 1:
            raise ValueError(f"expected 0 < data_fraction <= 1, got {self.data_fraction}")
        if self.global_batch < 1 or self.seed < 0:
            raise ValueError(f"expected global_batch >= 1 and seed >= 0, got {self.global_batch} and {self.seed}")
        if self.num_wanted < self.global_batch:
            raise ValueError(
                f"expected at least one global batch of {self.global_batch} samples, got {self.num_wanted} "
                f"({self.data_fraction:.0%} of {self.num_samples}); take more data or a smaller batch"
            )

    @property
    def num_wanted(self) -> int:
        """Samples in the fraction before it is floored to full steps."""
        return int(self.num_samples * self.data_fraction)

    @property
    def steps_per_epoch(self) -> int:
        """Full global batches in the subset."""
        return self.num_wanted // self.global_batch

    @property
    def selected_ids(self) -> Ids:
        """The ids that are used, in the order they were drawn."""
        return self._drawn[: self.steps_per_epoch * self.global_batch]

    @property
    def dropped_ids(self) -> Ids:
        """The ids of the fraction that do not fill another step, listed rather than padded."""
        return self._drawn[self.steps_per_epoch * self.global_batch :]

    def epoch_ids(self, epoch: int) -> Ids:
        """Return the selected ids in the order of one epoch."""
        return _permuted(self.selected_ids.tobytes(), self.seed, epoch)

    def position(self, global_step: int) -> tuple[int, int]:
        """Return epoch and step within it of a step counted from the start of training."""
        return divmod(global_step, self.steps_per_epoch)

    def step_ids(self, global_step: int) -> Ids:
        """Return the ids of all ranks at one step, in order."""
        epoch, step = self.position(global_step)
        return self.epoch_ids(epoch)[step * self.global_batch : (step + 1) * self.global_batch]

    def rank_ids(self, global_step: int, rank: int, world_size: int) -> Ids:
        """Return the ids of one rank at one step.

        Raises:
            ValueError: The world size does not divide the global batch, or there is no such rank.
        """
        size = self.batch_per_rank(world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"expected a rank in 0..{world_size - 1}, got {rank}")
        return self.step_ids(global_step)[rank * size : (rank + 1) * size]

    def batch_per_rank(self, world_size: int) -> int:
        """Return the samples a rank gets at each step.

        Raises:
            ValueError: There are more ranks than samples in a global batch, or the shards would be uneven; nothing is padded to make them fit.
        """
        if world_size < 1:
            raise ValueError(f"expected a world size of at least 1, got {world_size}")
        if world_size > self.global_batch:
            raise ValueError(
                f"expected at most {self.global_batch} ranks, one a sample of the global batch, got {world_size}; take a larger global batch"
            )
        if self.global_batch % world_size:
            raise ValueError(
                f"expected a world size that divides the global batch of {self.global_batch}, got {world_size}: shards would be uneven, and the "
                "mean over ranks would no longer be the mean over samples; change one of the two"
            )
        return self.global_batch // world_size

    def digest(self) -> str:
        """Return the digest of everything that decides the order of samples; ranks compare it before they train."""
        return sha256_json(
            [self.num_samples, self.global_batch, self.data_fraction, self.seed, self.epoch_ids(0).tolist()]
        )

    @property
    def _drawn(self) -> Ids:
        return _drawn(self.num_samples, self.num_wanted, self.seed)


@functools.lru_cache(maxsize=8)
def _drawn(num_samples: int, num_wanted: int, seed: int) -> Ids:
    ids = (
        np.random.Generator(np.random.PCG64([seed, _SELECTION])).permutation(num_samples)[:num_wanted].astype(np.int64)
    )
    ids.flags.writeable = False
    return ids


@functools.lru_cache(maxsize=64)
def _permuted(selected: bytes, seed: int, epoch: int) -> Ids:
    ids = np.frombuffer(selected, dtype=np.int64)
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(ids)
    order.flags.writeable = False
    return order
