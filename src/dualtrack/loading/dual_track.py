"""Legacy and candidate side by side: every batch compared, traffic moved over rung by rung, and legacy back in place at the first error.

    loader = DualTrackLoader(old_loader, lambda: PooledLoader(old_loader(), device, cap_bytes), device)
    for batch in loader: ...

What the trainer gets is bit for bit what legacy alone would give, whoever serves it, and the three global random generators are left as
legacy alone would leave them.
"""

import functools
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import torch

from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.observations import Divergence
from dualtrack.loading.batch_compare import LeafDifference
from dualtrack.loading.divergence_bundle import BundleContext, describe_divergence, write_bundle
from dualtrack.loading.fallback import (
    Journal,
    WorkerDeathsAsValues,
    prepare_epoch,
    read_from,
    rebuild_loader,
    set_sampler_epoch,
)
from dualtrack.loading.routing import RampPosition
from dualtrack.loading.shadow_epoch import EpochParts, EpochPlan, EpochRun
from dualtrack.loading.shadow_evidence import CleanEpochCount, EpochEvidence, EpochTally, ShadowName
from dualtrack.loading.shadow_generators import GeneratorStates, capture_generators, drawing_from, restore_generators
from dualtrack.loading.shadow_settings import DualTrackSettings
from dualtrack.loading.shadow_tracks import CandidateTrack, LegacyTrack, TransferTee, copy_leaves_to
from dualtrack.loading.transfer_device import TransferDevice, open_transfer_device
from dualtrack.loading.transfer_source import host_batches
from dualtrack.loading.transfer_stats import PrefetchStats, TransferClock, TransferCounts, describe_transfers

MOST_BUNDLES = 4


class DualTrackLoader:
    """Iterate it epoch after epoch, as the legacy loader; batches arrive on the device.

    Attributes:
        evidence: One `EpochEvidence` for each epoch, oldest first.
        clean_epochs: The count of consecutive clean epochs.
        ramp_position: Rung and share of traffic.
    """

    def __init__(
        self,
        legacy: Callable[[], Iterable[Any]],
        candidate: Callable[[], Iterable[Any]],
        device: torch.device | str | TransferDevice = "cuda",
        settings: DualTrackSettings | None = None,
        *,
        legacy_copy: Callable[[Any], Any] | None = None,
        on_epoch: Callable[[EpochEvidence], None] | None = None,
    ) -> None:
        """Build both loaders where legacy alone would build its own; a legacy loader that nothing needs is never built.

        Args:
            legacy: Builds the old loader.
            candidate: Builds the new one: a `PooledLoader`, or any iterable. It is built again after it failed, and closed at the end.
            device: Where batches go, or the operations themselves.
            settings: See `DualTrackSettings`.
            legacy_copy: The old trainer's copy of a host batch to the device; None is `tensor.to(device)` for each tensor.
            on_epoch: Called at the end of every epoch with its evidence, for the ledger.

        Raises:
            ValueError: The device is not there.
        """
        self.settings = settings or DualTrackSettings()
        self._device = device if isinstance(device, TransferDevice) else open_transfer_device(device)
        self._build_legacy, self._build_candidate = legacy, candidate
        self._legacy_copy = legacy_copy or copy_leaves_to(self._device.device)
        self._on_epoch = on_epoch
        self._clock, self._counts = TransferClock(self._device), TransferCounts()
        self._order = random.Random(self.settings.order_seed)
        self.ramp_position = RampPosition(self.settings.ramp)
        self.evidence: list[EpochEvidence] = []
        self.clean_epochs = CleanEpochCount(
            key=self.settings.clean_epoch_key, count=self.settings.num_clean_epochs_before, target=self.settings.clean_epoch_target
        )  # fmt: skip
        self._num_bundles = self._next_epoch = 0
        self._resume_position: int | None = None
        self._sampler_epoch: int | None = None
        self._running: Generator[Any, None, None] | None = None
        self._run: EpochRun | None = None
        self._journal = Journal(capture_generators())
        self._legacy: LegacyTrack | None = None
        self._candidate: CandidateTrack | None = None
        if self._plan().needs_legacy:
            self._legacy = LegacyTrack(legacy(), self._legacy_copy)
            with drawing_from(self._journal.construction):
                self._candidate = self._new_candidate(candidate())
        else:
            self._candidate = self._new_candidate(candidate())

    def _new_candidate(self, loader: Any) -> CandidateTrack:
        return CandidateTrack(loader, self._device, self.settings.depth, self._clock, self._counts)

    def _plan(self) -> EpochPlan:
        """Return what the next epoch is to do; in probation both shadows run, whatever the settings say."""
        ramp, settings = self.ramp_position, self.settings
        return EpochPlan(
            epoch=self._next_epoch, share=ramp.share, rung=None if ramp.in_probation else ramp.rung,
            loader_shadow=settings.loader_shadow or ramp.in_probation, transfer_shadow=settings.transfer_shadow or ramp.in_probation,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        """Start the next epoch, or go on in one that `load_state_dict` named; one that is still under way ends."""
        self._end_running()
        self._running = self._epoch()
        return self._running

    def _epoch(self) -> Generator[Any, None, None]:
        plan, started, is_complete = self._plan(), time.monotonic(), False
        tally = EpochTally(plan.shadows)
        with WorkerDeathsAsValues() as deaths:
            try:
                run = self._run = self._begin(plan, tally, deaths)
                while run.advance():
                    yield run.take()
                is_complete = True
            except Exception as error:
                tally.note_error(tally.num_batches, error)
                raise
            finally:
                self._finish(plan, tally, is_complete, time.monotonic() - started)

    def _begin(self, plan: EpochPlan, tally: EpochTally, deaths: WorkerDeathsAsValues) -> EpochRun:
        """Bring the tracks to the start of the epoch, or to the position that was loaded."""
        position, self._resume_position = self._resume_position, None
        if position is None:
            known = self._candidate or self._legacy
            self._journal.begin_epoch(
                capture_generators(), known.loader if known is not None else None, self._sampler_epoch
            )
        else:
            tally.not_counted_because(f"the epoch was resumed at batch {position}")
        position = position or 0
        self._ready_legacy(plan, position)
        tee = None
        if plan.transfer_shadow:
            tee = TransferTee(
                self._legacy_copy, self._device, self._order, self.settings.deadline_seconds, not plan.needs_legacy
            )
        try:
            candidate = self._ready_candidate(position, tee)
        except Exception as error:
            if self._legacy is None:
                raise
            tally.note_error(position, error)
            candidate = None
        parts = EpochParts(
            self._device, self._journal, tally, self._order, deaths, self.settings.deadline_seconds, self._open_legacy,
            functools.partial(self._keep_divergence, plan.epoch, tally),
        )  # fmt: skip
        return EpochRun(plan, parts, self._legacy, candidate, tee, position)

    def _ready_legacy(self, plan: EpochPlan, position: int) -> None:
        if not plan.needs_legacy:
            self._legacy = None
        elif self._legacy is None:
            self._legacy = self._open_legacy(position)
        else:
            set_sampler_epoch(self._legacy.loader, self._sampler_epoch)
            self._legacy.begin()

    def _open_legacy(self, position: int) -> LegacyTrack:
        """Build the legacy track so that its next batch is the one at `position` of the current epoch."""
        track = LegacyTrack(rebuild_loader(self._build_legacy, self._journal), self._legacy_copy)
        if position == 0:  # its first fetch makes the epoch's draws, as legacy's own does
            prepare_epoch(track.loader, self._journal.current)
            track.begin()
        else:
            track.begin(read_from(track.loader, self._journal.current, position, iter))
        return track

    def _ready_candidate(self, position: int, tee: TransferTee | None) -> CandidateTrack:
        """Begin the candidate's epoch, with a new candidate if the last one was lost."""
        if self._candidate is None:
            self._candidate = self._new_candidate(rebuild_loader(self._build_candidate, self._journal))
            prepare_epoch(self._candidate.loader, self._journal.current)
        loader = self._candidate.loader
        set_sampler_epoch(loader, self._sampler_epoch)
        source = functools.partial(host_batches, loader)
        if position:
            source = functools.partial(read_from, loader, self._journal.current, position, host_batches)
        # what is read again in front of the position comes with the first batch
        self._candidate.begin(source, self.settings.deadline_seconds * (1 + position), tee)
        return self._candidate

    def _finish(self, plan: EpochPlan, tally: EpochTally, is_complete: bool, seconds: float) -> None:
        """Let go of the epoch, judge it, and move along the ramp."""
        run, self._run = self._run, None
        if run is not None:
            self._legacy = run.legacy
            if not run.has_candidate:
                self._candidate = None
        for track in (self._legacy, self._candidate):
            if track is not None:
                track.end()
        self._next_epoch += 1
        evidence = tally.evidence(
            epoch=plan.epoch, rung=plan.rung, traffic_share=plan.share, is_complete=is_complete, seconds=seconds,
            device=str(self._device.device),
        )  # fmt: skip
        self.evidence.append(evidence)
        self.clean_epochs = self.clean_epochs.after(evidence)
        if evidence.verdict == "clean":
            self.ramp_position.note_clean()
        elif evidence.verdict == "dirty":
            self.ramp_position.note_dirty()
        if self._on_epoch is not None:
            self._on_epoch(evidence)

    def _keep_divergence(
        self,
        epoch: int,
        tally: EpochTally,
        position: int,
        shadow: ShadowName,
        difference: LeafDifference,
        sides: tuple[Any, Any],
    ) -> Divergence:
        """Write the bundle of an epoch's first divergence; a bundle that can't be written is an error of its own, not the training's end."""
        context = BundleContext(
            epoch=epoch, step=position, shadow=shadow, device=str(self._device.device), sample_reference=self.settings.sample_reference
        )  # fmt: skip
        parent, name = self.settings.bundle_folder, f"epoch-{epoch}-step-{position}-{shadow.replace(' ', '-')}"
        if parent is None or self._num_bundles == MOST_BUNDLES:
            return describe_divergence(context, difference, None)
        try:
            write_bundle(parent / name, context, difference, *sides)
        except (OSError, EvidenceError) as error:
            tally.note_error(position, error)
            return describe_divergence(context, difference, None)
        self._num_bundles += 1
        return describe_divergence(context, difference, f"{parent.name}/{name}")

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch's number to the samplers of both sides, as a training script does with a `DistributedSampler`."""
        self._sampler_epoch = epoch

    def __len__(self) -> int:
        track = self._legacy or self._candidate
        if track is None:
            raise TypeError("this dual track is closed and has no length")
        return len(track.loader)

    def prefetch_stats(self) -> PrefetchStats:
        """Return the candidate's transfer figures over all epochs."""
        pipeline = self._candidate.pipeline if self._candidate is not None else None
        in_flight = (
            (0, 0, None)
            if pipeline is None
            else (pipeline.num_in_flight, pipeline.look_ahead, pipeline.look_ahead_note)
        )
        return describe_transfers(
            self._device.mode, self.settings.depth, self._counts, self._clock, in_flight, "no CUDA device"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands, as JSON data: behind the last batch that was handed out."""
        return {
            "epoch": self._next_epoch,
            "position": self._run.position if self._run is not None else None,
            "sampler_epoch": self._sampler_epoch,
            "journal": self._journal.to_plain(),
            "generators": capture_generators().to_plain(),
            "ramp": self.ramp_position.to_plain(),
            "num_clean_epochs": self.clean_epochs.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called, usually in a new process: the next iteration gives the next batch of that epoch.

        The three global generators are put back, too. The batches in front of the position are read again and dropped.
        """
        self.close()
        self._journal = Journal.from_plain(state["journal"])
        self._next_epoch, self._resume_position = state["epoch"], state["position"]
        self._sampler_epoch = state["sampler_epoch"]
        self.ramp_position.restore(state["ramp"])
        self.clean_epochs = self.clean_epochs.model_copy(update={"count": state["num_clean_epochs"]})
        restore_generators(GeneratorStates.from_plain(state["generators"]))

    def _end_running(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def close(self) -> None:
        """End the epoch, close the candidate and let go of legacy. Twice is fine; a later iteration builds both again."""
        self._end_running()
        candidate, self._candidate, self._legacy = self._candidate, None, None
        if candidate is not None:
            candidate.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
