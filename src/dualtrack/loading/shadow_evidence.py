"""What one dual-track epoch showed, and the count of consecutive clean epochs that a promotion needs.

An epoch is *clean* when both shadows compared every batch and found all of them equal, with no error, no fallback, no pageable batch and no
deadline passed. It is *not counted* when nothing went wrong but it proves less: a shadow was off, or the consumer left early. Everything
else is *dirty* and sets the count back to 0.
"""

from typing import Literal

from pydantic import Field

from dualtrack.facts.observations import Divergence, Fact
from dualtrack.loading.batch_compare import BatchComparison

CLEAN_EPOCH_TARGET = 100
MOST_ERROR_TEXTS = 8

Verdict = Literal["clean", "dirty", "not counted"]
ShadowName = Literal["loader shadow", "transfer shadow"]


class ShadowCounts(Fact):
    """Comparisons of one shadow in one epoch; `num_compared + num_skipped` is the number of batches that the epoch delivered."""

    num_compared: int = Field(default=0, ge=0)
    num_equal: int = Field(default=0, ge=0)
    num_mismatched: int = Field(default=0, ge=0)
    num_skipped: int = Field(default=0, ge=0)


class EpochEvidence(Fact):
    """What one epoch of the dual track showed."""

    epoch: int
    rung: int | None
    """Rung of the ramp; None in probation."""
    traffic_share: float
    """Share of batches that the candidate was to serve."""
    num_batches: int
    """Delivered batches."""
    num_served_by_candidate: int
    loader_shadow: ShadowCounts | None
    """Legacy loader against pooled loader; None when this shadow was off."""
    transfer_shadow: ShadowCounts | None
    """Legacy copy against candidate copy of the same fetched batch; None when this shadow was off."""
    num_fallbacks: int
    """Times that legacy took over from a candidate which served traffic."""
    num_errors: int
    num_deadline: int
    """Errors among them that were deadlines passed."""
    num_pageable: int
    fallback_position: int | None
    """Batch from which legacy went on alone."""
    errors: tuple[str, ...]
    """The first few, as `batch 3: ValueError: ...`."""
    first_divergence: Divergence | None
    order: str
    """Which side was fetched first at each position: `L` legacy, `C` candidate; empty where only one side ran."""
    num_generator_differences: int
    """Positions at which legacy and candidate left the global random generators in different states."""
    is_complete: bool
    seconds: float
    device: str
    verdict: Verdict
    reasons: tuple[str, ...]
    """Why the epoch is not clean; empty for a clean one."""

    @property
    def clean(self) -> bool:
        """True for an epoch that counts towards a promotion."""
        return self.verdict == "clean"

    @property
    def num_compared(self) -> int:
        """Comparisons of both shadows."""
        return sum(shadow.num_compared for shadow in (self.loader_shadow, self.transfer_shadow) if shadow is not None)


class CleanEpochCount(Fact):
    """Consecutive clean epochs under one key: another key starts at 0."""

    key: str
    count: int = Field(default=0, ge=0)
    target: int = Field(default=CLEAN_EPOCH_TARGET, ge=1)
    reset_reasons: tuple[str, ...] = ()
    """One for each dirty epoch, oldest first."""

    def after(self, evidence: EpochEvidence) -> "CleanEpochCount":
        """Return the count behind one more epoch."""
        if evidence.verdict == "clean":
            return self.model_copy(update={"count": self.count + 1})
        if evidence.verdict == "dirty":
            reason = f"epoch {evidence.epoch}: {'; '.join(evidence.reasons)}"
            return self.model_copy(update={"count": 0, "reset_reasons": (*self.reset_reasons, reason)})
        return self

    @property
    def is_reached(self) -> bool:
        """True when the gate may pass."""
        return self.count >= self.target

    def __str__(self) -> str:
        """Say `n of 100`."""
        return f"{self.count} of {self.target}"


class EpochTally:
    """Counts an epoch while it runs."""

    def __init__(self, shadows: tuple[ShadowName, ...]) -> None:
        """Start at zero with the shadows that are on."""
        self.num_batches = self.num_served_by_candidate = 0
        self.num_errors = self.num_deadline = self.num_fallbacks = self.num_pageable = (
            self.num_generator_differences
        ) = 0
        self.fallback_position: int | None = None
        self.first_divergence: Divergence | None = None
        self.order: list[str] = []
        self._errors: list[str] = []
        self._compared: dict[ShadowName, list[bool]] = {name: [] for name in shadows}
        self._not_counted: list[str] = []

    def note_comparison(self, shadow: ShadowName, comparison: BatchComparison) -> None:
        """Count one comparison."""
        self._compared[shadow].append(comparison.equal)

    def note_error(self, position: int, error: BaseException) -> None:
        """Count one error at its batch."""
        self.num_errors += 1
        self.num_deadline += isinstance(error, TimeoutError)
        if len(self._errors) < MOST_ERROR_TEXTS:
            self._errors.append(f"batch {position}: {type(error).__name__}: {error}")

    def note_delivered(self, by_candidate: bool) -> None:
        """Count one delivered batch."""
        self.num_batches += 1
        self.num_served_by_candidate += by_candidate

    def not_counted_because(self, reason: str) -> None:
        """Say why the epoch proves less than a clean one without anything being wrong."""
        self._not_counted.append(reason)

    def evidence(
        self, *, epoch: int, rung: int | None, traffic_share: float, is_complete: bool, seconds: float, device: str
    ) -> EpochEvidence:
        """Close the tally and judge the epoch."""
        shadows = {name: self._counts(compared) for name, compared in self._compared.items()}
        dirty, not_counted = self._dirty_reasons(shadows), list(self._not_counted)
        if not is_complete:
            not_counted.append(f"the consumer left after {self.num_batches} batches")
        if self.num_batches == 0 and not not_counted:
            dirty.append("no batch was delivered")
        not_counted += [f"the {name} was off" for name in ("loader shadow", "transfer shadow") if name not in shadows]
        verdict: Verdict = "dirty" if dirty else "not counted" if not_counted else "clean"
        return EpochEvidence(
            epoch=epoch, rung=rung, traffic_share=traffic_share, num_batches=self.num_batches,
            num_served_by_candidate=self.num_served_by_candidate, loader_shadow=shadows.get("loader shadow"),
            transfer_shadow=shadows.get("transfer shadow"), num_fallbacks=self.num_fallbacks, num_errors=self.num_errors,
            num_deadline=self.num_deadline, num_pageable=self.num_pageable, fallback_position=self.fallback_position,
            errors=tuple(self._errors), first_divergence=self.first_divergence, order="".join(self.order),
            num_generator_differences=self.num_generator_differences, is_complete=is_complete, seconds=seconds, device=device,
            verdict=verdict, reasons=tuple(dirty + not_counted),
        )  # fmt: skip

    def _counts(self, compared: list[bool]) -> ShadowCounts:
        num_equal = sum(compared)
        # a position compared but not delivered (the consumer got an error there) must not make the rest negative
        num_skipped = max(0, self.num_batches - len(compared))
        return ShadowCounts(
            num_compared=len(compared),
            num_equal=num_equal,
            num_mismatched=len(compared) - num_equal,
            num_skipped=num_skipped,
        )

    def _dirty_reasons(self, shadows: dict[ShadowName, ShadowCounts]) -> list[str]:
        reasons = []
        for name, counts in shadows.items():
            if counts.num_mismatched:
                reasons.append(f"{name}: {counts.num_mismatched} of {counts.num_compared} batches differ")
            if counts.num_skipped:
                reasons.append(f"{name}: {counts.num_skipped} of {self.num_batches} batches were not compared")
        counted = {
            "errors": self.num_errors, "fallbacks": self.num_fallbacks, "pageable batches": self.num_pageable,
            "deadlines passed": self.num_deadline, "differences in the global random generators": self.num_generator_differences,
        }  # fmt: skip
        return reasons + [f"{number} {what}" for what, number in counted.items() if number]
