"""The controlled experiment of a stage: fresh processes in a fixed order, legacy beside candidate.

A block `paired` alternates legacy and candidate (ABBA); `noise floor` is legacy against legacy in the same session; `headroom` trains on a
cached batch; `extra` runs sample memory after each step and count FLOPs, and are never timed against another.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from tqdm.auto import tqdm

from dualtrack.facts.records import Outcome, Trial
from dualtrack.measuring.trials import abba_order, run_in_fresh_process
from dualtrack.stages.stage_run import StageRun
from dualtrack.training.data_paths import DEFAULT_CAP_BYTES
from dualtrack.training.measured_run import RunSpec

Block = Literal["paired", "noise floor", "headroom", "extra"]
MEASURE = "dualtrack.training.measured_run:measure_run"


class TrialSeries:
    """Runs trials one after another and keeps them in order of execution."""

    def __init__(self, run: StageRun, *, cap_bytes: int = DEFAULT_CAP_BYTES, slot_bytes: int | None = None) -> None:
        """Prepare; nothing is started."""
        self.run, self.cap_bytes, self.slot_bytes = run, cap_bytes, slot_bytes
        self.trials: list[Trial] = []
        self._flops: float | None = None

    def sample_memory(self, tracks: Sequence[str]) -> None:
        """Run one `extra` trial a track, with memory read after each step; the FLOPs counted there serve the timed trials' MFU."""
        for track in tracks:
            trial = self._one("extra", track, 0, sample_memory=True)
            if trial.flops_per_step is not None and trial.flops_per_step.value is not None:
                self._flops = trial.flops_per_step.value

    def compare(self, candidate: str, num_pairs: int, block: Block = "paired") -> None:
        """Run `num_pairs` pairs of legacy and `candidate` in ABBA order; in the noise floor both sides are legacy."""
        order = abba_order(num_pairs)
        for pair in tqdm(
            range(num_pairs),
            desc=f"{block}: legacy and {candidate}",
            unit="pair",
            mininterval=1.0,
            dynamic_ncols=False,
            ncols=80,
        ):
            tracks = ["legacy", candidate] if order[pair] == "legacy first" else [candidate, "legacy"]
            for track in tracks:
                self._one(block, track, pair)

    def repeat(self, track: str, num_trials: int, block: Block) -> None:
        """Run `num_trials` trials of one track by itself."""
        for place in range(num_trials):
            self._one(block, track, place)

    def _one(self, block: Block, track: str, pair: int, sample_memory: bool = False) -> Trial:
        settings = self.run.settings
        spec = RunSpec(
            workload=settings.workload, track=track, device=self.run.device, seed=settings.seed, num_warmup_steps=settings.num_warmup_steps,
            num_steps=settings.num_steps, cap_bytes=self.cap_bytes, slot_bytes=self.slot_bytes, sample_memory=sample_memory,
            flops_per_step=self._flops,
        )  # fmt: skip
        started_at = datetime.now(UTC)
        result, outcome = run_in_fresh_process(MEASURE, {"spec": spec}, settings.trial_deadline_seconds)
        position = len(self.trials)
        trial = Trial(
            name=f"{self.run.stage}-{position:03d}-{track}", block=block, track=track, pair=pair, position=position, started_at=started_at,
            outcome=Outcome.model_validate(outcome), **(result or {}),
        )  # fmt: skip
        self.trials.append(trial)
        return trial
