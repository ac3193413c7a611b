"""One epoch of the dual track, batch by batch: fetch both sides, compare, choose who serves, and fall back without losing a batch.

The delivered batch is the routed side's, and never one that a shadow has found different from legacy's.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from dualtrack.facts.errors import LoaderError
from dualtrack.facts.observations import Divergence
from dualtrack.loading.batch_compare import BatchComparison, LeafDifference, compare_batches
from dualtrack.loading.fallback import Journal, WorkerDeathsAsValues
from dualtrack.loading.routing import serves_candidate
from dualtrack.loading.shadow_evidence import EpochTally, ShadowName
from dualtrack.loading.shadow_generators import GeneratorStates, capture_generators, drawing_from, restore_generators
from dualtrack.loading.shadow_tracks import CandidateTrack, Companion, LegacyTrack, TransferTee
from dualtrack.loading.transfer_device import TransferDevice
from dualtrack.loading.transfer_pipeline import Staged, TransferPipeline


class EpochPlan(NamedTuple):
    """What an epoch is to do."""

    epoch: int
    share: float
    rung: int | None
    loader_shadow: bool
    transfer_shadow: bool

    @property
    def needs_legacy(self) -> bool:
        """True when the legacy loader itself has to run: to be compared, or to serve."""
        return self.loader_shadow or (self.share < 1 and not self.transfer_shadow)

    @property
    def shadows(self) -> tuple[ShadowName, ...]:
        """Names of the shadows that are on."""
        names: list[tuple[ShadowName, bool]] = [
            ("loader shadow", self.loader_shadow),
            ("transfer shadow", self.transfer_shadow),
        ]
        return tuple(name for name, is_on in names if is_on)


@dataclass
class EpochParts:
    """What an epoch works with; the loader owns it."""

    device: TransferDevice
    journal: Journal
    tally: EpochTally
    order: random.Random
    deaths: WorkerDeathsAsValues
    deadline_seconds: float
    open_legacy: Callable[[int], LegacyTrack]
    """Build the legacy track so that its next batch is the one at a position of this epoch."""
    on_divergence: Callable[[int, ShadowName, LeafDifference, tuple[Any, Any]], Divergence]
    """Keep the first divergence of the epoch."""


class EpochRun:
    """The epoch under way. `advance` prepares the next batch, `take` hands it out and keeps no reference."""

    def __init__(
        self,
        plan: EpochPlan,
        parts: EpochParts,
        legacy: LegacyTrack | None,
        candidate: CandidateTrack | None,
        tee: TransferTee | None,
        position: int = 0,
    ) -> None:
        """Begin at `position`; both tracks stand there. Without a candidate, legacy runs alone."""
        self.plan, self.legacy, self.position = plan, legacy, position
        self._parts, self._candidate, self._tee = parts, candidate, tee
        self._is_trusted = True
        self._delivered: Any = None

    @property
    def has_candidate(self) -> bool:
        """False once the candidate was lost."""
        return self._candidate is not None

    def take(self) -> Any:
        """Return the batch that `advance` prepared."""
        batch, self._delivered = self._delivered, None
        return batch

    def advance(self) -> bool:
        """Prepare the next batch, or say that the epoch is over.

        Raises:
            Exception: Legacy's own errors; the candidate's never come this far.
        """
        self._parts.deaths.refresh()
        before = capture_generators()
        self._note_states(before)
        by_candidate = self._is_trusted and serves_candidate(self.plan.share, self.plan.epoch, self.position)
        if self.legacy is None:
            is_over = self._advance_alone(before, by_candidate)
        else:
            is_over = self._advance_beside(self.legacy, before, by_candidate)
        if is_over:
            return False
        self.position += 1
        self._parts.journal.current.num_fetched = self.position
        return True

    @property
    def _pipeline(self) -> TransferPipeline | None:
        return self._candidate.pipeline if self._candidate is not None else None

    def _note_states(self, before: GeneratorStates) -> None:
        """Remember the states before a fetch that may draw in this process, for whoever has to read up to here again."""
        pipeline = self._pipeline
        may_draw = pipeline is None or pipeline.look_ahead_note is not None
        if self.position > 0 and may_draw:  # the draws of position 0 begin with those of the epoch itself
            self._parts.journal.current.fetch_states[self.position] = before

    def _advance_alone(self, before: GeneratorStates, by_candidate: bool) -> bool:
        """Take the batch from the candidate's loader, the only one that runs; at an error legacy takes its place."""
        staged = self._fetch_candidate()
        if (
            staged is None
            and self._candidate is not None
            and (num_expected := _length_of(self._candidate.loader)) > self.position
        ):
            self._lose_candidate(
                LoaderError(f"expected {num_expected} batches, the candidate ended after {self.position}")
            )
        if not self.has_candidate:
            restore_generators(before)
            self.legacy = self._parts.open_legacy(self.position)
            return self._advance_beside(self.legacy, before, by_candidate)
        if staged is None:
            return True
        self._choose(staged, None, by_candidate)
        return False

    def _advance_beside(self, legacy: LegacyTrack, before: GeneratorStates, by_candidate: bool) -> bool:
        """Fetch from both, each from the same states of the global generators; legacy's states are the ones that stay."""
        staged, after = None, before
        is_candidate_first = self.has_candidate and self._parts.order.random() < 0.5
        if is_candidate_first:
            staged, after = self._fetch_apart(before)
        has_batch, host = legacy.fetch()
        if self.has_candidate and not is_candidate_first:
            staged, after = self._fetch_apart(before)
        if self.has_candidate:
            self._parts.tally.order.append("C" if is_candidate_first else "L")
            self._parts.tally.num_generator_differences += not after.equals(capture_generators())
            if has_batch != (staged is not None):
                ended, other = ("candidate", "legacy") if has_batch else ("legacy", "candidate")
                self._lose_candidate(
                    LoaderError(
                        f"expected epochs of equal length, {ended} ended before batch {self.position} and {other} did not"
                    )
                )
        if not has_batch:
            return True
        if staged is None or not self.has_candidate:
            self._deliver(legacy.copy(host), by_candidate=False)
        else:
            self._choose(staged, host, by_candidate)
        return False

    def _fetch_apart(self, before: GeneratorStates) -> tuple[Staged | None, GeneratorStates]:
        """Fetch from the candidate as if it were alone in the process; return the states that it would have left, too."""
        with drawing_from(before):
            return self._fetch_candidate(), capture_generators()

    def _fetch_candidate(self) -> Staged | None:
        pipeline = self._pipeline
        if pipeline is None:
            return None
        try:
            return pipeline.next()
        except Exception as error:  # noqa: BLE001 (the candidate's errors are evidence; legacy goes on in its place)
            self._lose_candidate(error)
            return None

    def _lose_candidate(self, error: Exception) -> None:
        """Go on with legacy alone. Whatever the clean-up of the candidate raises on top belongs to the same loss."""
        tally = self._parts.tally
        tally.note_error(self.position, error)
        if self.plan.share > 0 and self._is_trusted:
            tally.num_fallbacks += 1
        tally.fallback_position = self.position if tally.fallback_position is None else tally.fallback_position
        candidate, self._candidate = self._candidate, None
        self._is_trusted = False
        try:
            if candidate is not None:
                candidate.abandon()
        except Exception as second:  # noqa: BLE001 (see above)
            tally.note_error(self.position, second)

    def _choose(self, staged: Staged, host: Any, by_candidate: bool) -> None:
        """Compare as planned, then deliver the routed side's batch, or legacy's if they differ."""
        self._parts.tally.num_pageable += staged.is_pageable
        companion: Companion | None = staged.companion
        legacy_batch = self._legacy_batch(host, companion, by_candidate)
        try:
            is_equal = self._compare(staged, legacy_batch, companion, by_candidate)
        except Exception as error:  # noqa: BLE001 (a comparison that could not be made is no equality)
            self._lose_candidate(error)
            is_equal = False
        if not is_equal and self._is_trusted and self.plan.share > 0:
            self._is_trusted = False
            self._parts.tally.num_fallbacks += 1
            self._parts.tally.fallback_position = self.position
        if by_candidate and is_equal:
            self._deliver(staged.batch, by_candidate=True)
            self._reuse(companion)
        elif self.legacy is not None:
            # the compared copy of a batch routed to the candidate lies on the comparison's stream: copy anew on the consumer's
            self._deliver(self.legacy.copy(host) if by_candidate else legacy_batch, by_candidate=False)
            self._reuse(companion)
        else:
            self._deliver(companion.batch if companion is not None else staged.batch, by_candidate=False)

    def _legacy_batch(self, host: Any, companion: Companion | None, by_candidate: bool) -> Any:
        """Return legacy's device batch: from its own loader, or what the tee made of the candidate's host batch."""
        if self.legacy is None:
            return companion.batch if companion is not None else None
        if not by_candidate:
            return self.legacy.copy(host)
        if not self.plan.loader_shadow:
            return None
        with self._parts.device.beside():
            return self.legacy.copy(host)

    def _compare(self, staged: Staged, legacy_batch: Any, companion: Companion | None, by_candidate: bool) -> bool:
        """Compare on the device behind both copies, on a stream of its own so that the training step need not be waited for."""
        pipeline = self._pipeline
        if not self.plan.shadows or staged.transfer is None or pipeline is None:
            return True
        device, raw = self._parts.device, pipeline.raw(staged)
        is_on_consumers_stream = not by_candidate or self.legacy is None
        with device.beside(staged.transfer.end, *([device.record()] if is_on_consumers_stream else [])):
            results = []
            if companion is not None:
                results.append(self._compare_one("transfer shadow", companion.batch, raw))
            if self.plan.loader_shadow and self.legacy is not None:
                results.append(
                    self._compare_one("loader shadow", legacy_batch, raw if companion is None else companion.batch)
                )
        return all(results)

    def _compare_one(self, shadow: ShadowName, legacy: Any, candidate: Any) -> bool:
        parts = self._parts
        comparison: BatchComparison = compare_batches(
            legacy,
            candidate,
            synchronize=False,
            before_reading=lambda: parts.device.wait(
                parts.device.record(), parts.deadline_seconds, f"the comparison of the {shadow}"
            ),
        )
        parts.tally.note_comparison(shadow, comparison)
        if comparison.first is not None and parts.tally.first_divergence is None:
            parts.tally.first_divergence = parts.on_divergence(
                self.position, shadow, comparison.first, (legacy, candidate)
            )
        return comparison.equal

    def _reuse(self, companion: Companion | None) -> None:
        if companion is not None and self._tee is not None:
            self._tee.give_back(companion)

    def _deliver(self, batch: Any, *, by_candidate: bool) -> None:
        self._delivered = batch
        self._parts.tally.note_delivered(by_candidate)


def _length_of(loader: Any) -> int:
    """Return the number of batches, or 0 for a loader that ends where it ends (the length of an iterable dataset is an estimate)."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return 0
    try:
        return len(loader)
    except TypeError:
        return 0
