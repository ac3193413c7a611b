"""The launches of one expansion stage: the single process, the rungs, the returns; each is kept as a trial.

Everything that a launch needs beyond its settings (legacy gradients, checkpoints) lies in one scratch folder that goes with the stage.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import LaunchError, StageRefused, TrialError
from dualtrack.facts.expansion_settings import ExpansionSettings
from dualtrack.facts.records import Outcome, Trial
from dualtrack.measuring.trials import run_or_raise
from dualtrack.stages.expansion_rung import Rung
from dualtrack.stages.stage_run import StageRun
from dualtrack.training.ddp_launch import RankLauncher
from dualtrack.training.launch_spec import LaunchSpec
from dualtrack.training.launch_watch import LaunchResult, RankFailed
from dualtrack.training.legacy_gradients import LegacyGradients, LegacySpec
from dualtrack.training.planned_loader import plan_for
from dualtrack.training.rank_checks import probe_baseline
from dualtrack.training.rank_faults import RankFault
from dualtrack.training.rank_segment import JobSpec, SegmentSpec
from dualtrack.training.rank_tasks import PROBE, RESUME, VERIFY, ResumeSpec, VerifySpec
from dualtrack.training.rank_training import GradientFault, ParallelSettings, RankPath
from dualtrack.training.workload import load_workload

RECORD_LEGACY = "dualtrack.training.legacy_gradients:record_legacy_gradients"
STEPS_BETWEEN_DIGESTS = 10


class ExpansionRuns:
    """Owns the launcher and the scratch folder; a context manager."""

    def __init__(self, run: StageRun, folder: Path | None = None, ranks_per_host: int | None = None) -> None:
        """Start the launcher's agent, which warms up meanwhile; refuse what the machine can't do.

        Args:
            run: The opened stage.
            folder: Where legacy gradients and checkpoints go, shared by all hosts; None takes a scratch folder that goes with this object.
            ranks_per_host: For rungs over several hosts; None has all ranks on this one.

        Raises:
            StageRefused: The workload's data has no indices, or NCCL was asked for without a GPU for each rank.
            ValueError: The ladder does not fit the global batch, or the fraction holds no full batch.
        """
        self.run, self.ranks_per_host = run, ranks_per_host
        self.settings: ExpansionSettings = run.settings
        self.workload = load_workload(self.settings.workload)
        legacy = self.workload.legacy_loader("train")
        self.plan = plan_for(legacy, self.settings.data_fraction, run.frozen.seed, self.settings.global_batch)
        for world_size in self.settings.ladder:
            self.plan.batch_per_rank(world_size)
            self.backend(world_size)
        self.trials: list[Trial] = []
        self._legacy: dict[str, LegacyGradients] = {}
        self._singles: dict[str, dict[str, Any]] = {}
        self._scratch = None if folder is not None else tempfile.TemporaryDirectory(prefix="dualtrack-ladder-")
        self.folder = folder if folder is not None else Path(self._scratch.name if self._scratch else "")
        self.launcher = RankLauncher()

    def close(self) -> None:
        """End the launcher and remove the scratch folder; twice is fine."""
        self.launcher.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def backend(self, world_size: int) -> str:
        """Return `nccl` where every rank gets a GPU of its own, else `gloo`; two NCCL ranks can't share a GPU.

        Raises:
            StageRefused: NCCL was asked for and there are too few GPUs.
        """
        num_devices = torch.cuda.device_count() if self.run.device.startswith("cuda") else 0
        num_needed = min(world_size, self.ranks_per_host or world_size)
        if self.settings.backend == "nccl" and num_devices < num_needed:
            raise StageRefused(
                f"expected a GPU for each of {num_needed} NCCL ranks of a host, found {num_devices}; take backend='auto' or a shorter ladder"
            )
        return "nccl" if self.settings.backend != "gloo" and num_devices >= num_needed else "gloo"

    def device(self, world_size: int) -> str:
        """Return where the ranks of a rung compute."""
        return "cuda" if self.backend(world_size) == "nccl" else "cpu"

    def job(self, **changes: Any) -> JobSpec:
        """Return what every rank trains."""
        settings = self.settings
        spec = JobSpec(
            workload=settings.workload, seed=self.run.frozen.seed, data_fraction=settings.data_fraction, global_batch=settings.global_batch,
            parallel=ParallelSettings(
                bucket_cap_mb=settings.bucket_cap_mb, gradient_as_bucket_view=settings.gradient_as_bucket_view, static_graph=settings.static_graph
            ),
            path=RankPath(host_cap_bytes=settings.host_cap_bytes, num_workers=settings.num_workers),
        )  # fmt: skip
        return spec.model_copy(update=changes)

    def legacy(self, device: str) -> LegacyGradients:
        """Return the legacy gradients on the frozen batches, computed once for each kind of device in a fresh process.

        Raises:
            StageRefused: The model or the loss can't be equal on many ranks; the message says why.
        """
        kept = self.folder / f"legacy-{device}.json"
        if device not in self._legacy and kept.is_file():
            self._legacy[device] = LegacyGradients.model_validate_json(kept.read_bytes())
        if device not in self._legacy:
            spec = LegacySpec(
                workload=self.settings.workload, frozen_folder=str(self.run.frozen_folder), folder=str(self.folder / f"legacy-{device}"), device=device,
                seed=self.run.frozen.seed, num_batches=self.settings.num_gradient_batches, largest_world_size=max(self.settings.ladder),
                bucket_caps_mb=(self.settings.bucket_cap_mb,), anchor_device=self.run.device,
            )  # fmt: skip
            try:
                self._legacy[device] = run_or_raise(RECORD_LEGACY, {"spec": spec}, self.settings.trial_deadline_seconds)
            except TrialError as error:
                refusal = str(error).rpartition("StageRefused: ")
                if refusal[1]:
                    raise StageRefused(refusal[2].strip()) from error
                raise
            write_atomically(kept, self._legacy[device].model_dump_json().encode())
        return self._legacy[device]

    def single(self, device: str) -> dict[str, Any]:
        """Return what one rank gives for the same task, with the permuted reruns; run once for each kind of device."""
        kept = self.folder / f"single-{device}.json"
        if device not in self._singles and kept.is_file():
            self._singles[device] = json.loads(kept.read_bytes())
        if device not in self._singles:
            longest = max(self.settings.curve_steps)
            chain = self.settings.commit_step + (len(self.settings.ladder) + 1) * self.settings.num_resumed_steps
            seeds = tuple(range(1, self.settings.num_band_runs + 1))
            spec = self._verify_spec(1, device, longest, max(longest, chain)).model_copy(update={"band_seeds": seeds})
            self._singles[device] = self.launch(VERIFY, {"spec": spec.model_dump(mode="json")}, 1, device).results[0]
            write_atomically(kept, json.dumps(self._singles[device]).encode())
        return self._singles[device]

    def verify(self, world_size: int, num_steps: int, below: int | None) -> Rung:
        """Run one rung and return what its ranks gave, beside what it is compared with.

        Args:
            world_size: Number of ranks.
            num_steps: Steps of the loss curves.
            below: The rung below, whose float64 commit this one continues; None for the first.
        """
        device = self.device(world_size)
        spec = self.verify_spec(world_size, num_steps, below)
        single, legacy = self.single(device), self.legacy(device)
        launched = self.launch(VERIFY, {"spec": spec.model_dump(mode="json")}, world_size, device)
        return Rung(
            world_size=world_size, backend=self.backend(world_size), results=launched.results, folder=launched.folder, legacy=legacy, single=single,
            probe=self.expected_probe(device), plan=self.plan, seconds_until_up=launched.seconds_until_up, slow_ranks=launched.slow_ranks,
        )  # fmt: skip

    def verify_spec(self, world_size: int, num_steps: int, below: int | None) -> VerifySpec:
        """Return what the ranks of a rung are asked for."""
        spec = self._verify_spec(world_size, self.device(world_size), num_steps, num_steps)
        if spec.curve64 is None:
            return spec
        root = self.commit_root("float64", below if below is not None else 1)
        continued = ResumeSpec(job=self.job(), root=str(root), num_steps=self.settings.num_resumed_steps, float64=True)
        return spec.model_copy(update={"continued": continued})

    def resume(self, world_size: int, specs: Sequence[ResumeSpec]) -> tuple[Any, ...]:
        """Continue from commits with so many ranks and return what each rank gave."""
        arguments = {"specs": [spec.model_dump(mode="json") for spec in specs]}
        return self.launch(RESUME, arguments, world_size, self.device(world_size)).results

    def probe(
        self, world_size: int, planted: GradientFault = "", faults: tuple[RankFault, ...] = ()
    ) -> tuple[Any, ...]:
        """Run the integer probe alone with something planted; such a launch is no trial."""
        device = self.device(world_size)
        spec = self._verify_spec(world_size, device, 1, 1)
        job = self.job(parallel=self.job().parallel.model_copy(update={"planted": planted}))
        arguments = {"spec": spec.model_copy(update={"job": job}).model_dump(mode="json")}
        return self.launcher.launch(self.launch_spec(PROBE, arguments, world_size, device, faults)).results

    def expected_probe(self, device: str) -> list[str]:
        """Return the digests of the probe's gradients from this one process."""
        return probe_baseline(
            Path(self.legacy(device).folder), self.settings.num_gradient_batches, self.run.frozen.seed
        )

    def commit_root(self, precision: str, world_size: int) -> Path:
        """Return where a rung commits its checkpoints."""
        return self.folder / f"{precision}-{world_size}"

    def launch(self, task: str, arguments: dict[str, Any], world_size: int, device: str) -> LaunchResult:
        """Launch and keep the launch as a trial, whether it comes to its end or not.

        Raises:
            LaunchError: It did not.
        """
        started_at, started = datetime.now(UTC), time.monotonic()
        outcome = Outcome(state="completed", exit_code=0, seconds=0.0)
        try:
            return self.launcher.launch(self.launch_spec(task, arguments, world_size, device))
        except LaunchError as error:
            outcome = Outcome(state="failed", cause=cause_of(error), detail=str(error)[:4000], seconds=0.0)
            raise
        finally:
            outcome = outcome.model_copy(update={"seconds": time.monotonic() - started})
            self.keep_trial(world_size, started_at, outcome)

    def keep_trial(self, world_size: int, started_at: datetime, outcome: Outcome, **measured: Any) -> None:
        """Add a launch to the trials, in order of execution."""
        track, position = "single" if world_size == 1 else "ddp", len(self.trials)
        settings = {"block": "extra", "pair": 0, "data_fraction": self.settings.data_fraction, **measured}
        self.trials.append(Trial(
            name=f"{self.run.stage}-{position:03d}-{track}-{world_size}", track=track, position=position, started_at=started_at, outcome=outcome,
            world_size=world_size, **settings,
        ))  # fmt: skip

    def _verify_spec(self, world_size: int, device: str, num_steps: int, num_steps64: int) -> VerifySpec:
        settings, legacy = self.settings, self.legacy(device)
        curve = SegmentSpec(
            num_steps=num_steps, num_sample_digests=min(num_steps, self.plan.steps_per_epoch), commit_after=settings.commit_step,
            digest_every=STEPS_BETWEEN_DIGESTS, digest_after=(settings.commit_step + settings.num_resumed_steps,),
            commit_root=str(self.commit_root("float32", world_size)),
        )  # fmt: skip
        curve64 = curve.model_copy(
            update={
                "num_steps": num_steps64,
                "num_sample_digests": 0,
                "commit_root": str(self.commit_root("float64", world_size)),
            }
        )
        return VerifySpec(
            job=self.job(), legacy_folder=legacy.folder, num_gradient_batches=settings.num_gradient_batches, curve32=curve,
            curve64=curve64 if legacy.float64_error is None else None, num_repeated_steps=settings.num_repeated_steps,
        )  # fmt: skip

    def launch_spec(
        self, task: str, arguments: dict[str, Any], world_size: int, device: str, faults: tuple[RankFault, ...] = ()
    ) -> LaunchSpec:
        """Return a launch with the stage's timeout and the rung's backend."""
        return LaunchSpec(
            task=task, arguments=arguments, world_size=world_size, timeout_seconds=self.settings.timeout_seconds,
            backend="nccl" if device == "cuda" else "gloo", device="cuda" if device == "cuda" else "cpu", faults=faults,
        )  # fmt: skip


def cause_of(error: LaunchError) -> str:
    """Return one of the named causes of a trial's end."""
    if not isinstance(error, RankFailed):
        return "exception"
    if "killed" in error.cause or "left early" in error.cause:
        return "killed by signal"
    return "exception" if "raised" in error.cause else "deadline passed"
