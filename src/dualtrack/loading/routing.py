"""Which track serves a batch: a deterministic rule on epoch and position, and a ramp of traffic shares that ends at exactly 100 %."""

from fractions import Fraction
from typing import Self

from pydantic import Field, model_validator

from dualtrack.facts.observations import Fact

EPOCH_STRIDE = 7
"""Shares are decimal fractions, so their denominators have the factors 2 and 5 only; 7 moves through all residues."""


def serves_candidate(share: float, epoch: int, position: int) -> bool:
    """Say whether the candidate serves the batch at `position` of `epoch`.

    The served positions are evenly spaced and shift from epoch to epoch. With share n/d any d batches in a row hold exactly n of them, and
    over any d epochs in a row every position is served exactly n times.

    Args:
        share: Share of traffic in 0..1, taken as the decimal number that it prints as.
        epoch: Number of the epoch, from 0.
        position: Place in the epoch, from 0.
    """
    exact = Fraction(str(share))
    place = position + EPOCH_STRIDE * epoch
    return (place + 1) * exact // 1 > place * exact // 1


class TrafficRamp(Fact):
    """Shares of traffic, rung by rung. A rung is left only after clean epochs of its own; nothing is promoted by time."""

    shares: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    num_clean_epochs_per_rung: int = Field(default=10, ge=1)
    """Consecutive clean epochs on a rung before the next one; ten let a 10 % rung serve every position once."""

    @model_validator(mode="after")
    def _ends_at_all(self) -> Self:
        """Refuse a ramp that does not rise to exactly 100 %."""
        shares = self.shares
        if (
            not shares
            or shares[-1] != 1.0
            or any(not 0 <= share <= 1 for share in shares)
            or list(shares) != sorted(set(shares))
        ):
            raise ValueError(f"expected a rising ramp within 0..1 whose last rung is exactly 1.0, got {shares}")
        return self


class RampPosition:
    """Where a ramp stands. A dirty epoch takes all traffic away from the candidate.

    A ramp that starts at 0 climbs again from its first rung. Any other one (a retired legacy path) stays in probation, at 0 with both shadows,
    until somebody decides anew.
    """

    def __init__(self, ramp: TrafficRamp) -> None:
        """Stand on the first rung."""
        self.ramp = ramp
        self.rung = 0
        self.in_probation = False
        self._num_clean = 0

    @property
    def share(self) -> float:
        """Share of batches that the candidate serves now."""
        return 0.0 if self.in_probation else self.ramp.shares[self.rung]

    def note_clean(self) -> None:
        """Count a clean epoch; enough of them lead to the next rung."""
        self._num_clean += 1
        if self._num_clean >= self.ramp.num_clean_epochs_per_rung and self.rung + 1 < len(self.ramp.shares):
            self.rung += 1
            self._num_clean = 0

    def note_dirty(self) -> None:
        """Take the traffic away."""
        self.rung = self._num_clean = 0
        self.in_probation = self.ramp.shares[0] > 0

    def to_plain(self) -> list[int]:
        """Return the position as JSON data."""
        return [self.rung, self._num_clean, int(self.in_probation)]

    def restore(self, plain: list[int]) -> None:
        """Stand where `to_plain` was called."""
        self.rung, self._num_clean, self.in_probation = plain[0], plain[1], bool(plain[2])
