"""Stage 3 for real, with gloo on this machine: the ladder, what stops it, and the way back."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dualtrack.facts.errors import LaunchError, StageRefused
from dualtrack.facts.expansion_settings import ExpansionSettings
from dualtrack.facts.observations import Equality, Maximum, Ratio, State, Unmeasured, Value
from dualtrack.facts.project import find_project
from dualtrack.facts.records import StageRecord
from dualtrack.facts.settings import FreezeSettings
from dualtrack.stages import expansion
from dualtrack.stages.expansion import STABLE_KEYS, run_expansion_stage
from dualtrack.stages.expansion_checks import probe_gradients
from dualtrack.stages.expansion_curves import run_repeats
from dualtrack.stages.expansion_limits import EXPANSION
from dualtrack.stages.expansion_rung import Rung
from dualtrack.stages.expansion_runs import ExpansionRuns
from dualtrack.stages.freeze import freeze_inputs
from dualtrack.stages.stage_run import Findings, StageRun, open_stage
from dualtrack.training.rank_faults import RankFault
from dualtrack.workloads.digits import Digits
from tests.stages.rung_examples import good_rung

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "ladder": [2, 4], "curve_steps": [12, 12], "commit_step": 5, "num_resumed_steps": 3, "num_repeated_steps": 4, "num_gradient_batches": 2,
    "num_band_runs": 4, "timeout_seconds": 30.0, "num_steps": 4, "num_sweep_rounds": 2, "num_sweep_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dt-") as folder:
        shutil.copy(REPOSITORY / "dualtrack.toml", folder)
        shutil.copytree(REPOSITORY / "frozen_inputs" / "digits", Path(folder) / "frozen_inputs" / "digits")
        yield Path(folder)


def opened(root: Path, folder: str, **parameters: Any) -> StageRun:
    run = open_stage("3_ddp_expansion", ExpansionSettings.parse({**SMALL, **parameters}), f"reports/{folder}", root)
    run.limits = EXPANSION
    return run


@pytest.fixture(scope="module")
def record(root: Path) -> StageRecord:
    return run_expansion_stage(opened(root, "small"))


def test_a_small_ladder_passes_with_every_check_at_every_rung(record: StageRecord) -> None:
    blocking = [line for line in record.verdict.lines if line.state is not State.PASSED and line.needs is None]
    assert blocking == []
    assert record.verdict.state is State.PASSED
    verified = record.observations["rungs_verified"]
    assert isinstance(verified, Equality)
    assert (verified.num_compared, verified.num_equal) == (2, 2)
    assert {f"probe_gradients_bit_equal_at_{size}_ranks" for size in (2, 4)} <= set(record.observations)


def test_all_pools_of_a_host_stay_under_its_cap_together(record: StageRecord) -> None:
    seen = record.observations["pool_peak_share_of_host_cap"]
    assert isinstance(seen, Maximum)
    assert len(seen.values) == 2
    assert 0 < max(seen.values) <= 1


def test_both_planted_faults_are_caught_by_the_integer_probe(record: StageRecord) -> None:
    assert [fault.caught for fault in record.planted_faults] == [True, True]
    assert {fault.observation for fault in record.planted_faults} == {"probe_gradients_bit_equal"}


def test_the_way_back_is_executed_rung_by_rung_and_equal_bit_for_bit(record: StageRecord) -> None:
    assert record.rollback is not None
    assert (record.rollback.from_path, record.rollback.active_path_read_back, record.rollback.verified) == (
        "4 ranks",
        "2 ranks",
        True,
    )
    assert "2 ranks -> single process" in record.rollback.detail
    equal = record.observations["single_process_equals_baseline"]
    assert isinstance(equal, Equality)
    assert (equal.num_mismatched, equal.num_compared > 20) == (0, True)


def test_on_a_cpu_no_speed_is_claimed_and_the_reason_says_so(record: StageRecord) -> None:
    for key in ("step_latency_ratio", "bucket_proposal", "communication_share"):
        seen = record.observations[key]
        assert isinstance(seen, Unmeasured)
        assert seen.reason == "routing verified on CPU, speed not measured"


def test_rungs_become_paired_trials_and_every_launch_is_counted(record: StageRecord) -> None:
    paired = [(trial.track, trial.world_size) for trial in record.trials if trial.block == "paired"]
    assert paired == [("single", 1), ("ddp", 2), ("single", 1), ("ddp", 4)]
    assert [trial.position for trial in record.trials] == list(range(len(record.trials)))
    assert all(trial.data_fraction == 0.1 for trial in record.trials)
    assert {
        "bucket_layout",
        "gradient_error",
        "loss_curves",
        "memory_per_rank",
        "samples_per_second",
        "bucket_sweep",
    } == set(record.figures)


def test_the_data_fraction_and_the_dropped_ids_stand_in_the_record(record: StageRecord) -> None:
    assert record.settings["data_fraction"] == 0.1
    dropped = record.observations["num_dropped_samples"]
    assert isinstance(dropped, Value)
    assert dropped.value == 15
    assert any("15 ids dropped" in note for note in record.notes)


def test_what_must_repeat_is_declared_and_is_in_the_record(record: StageRecord) -> None:
    assert set(record.stable_keys) == set(STABLE_KEYS)
    assert record.stable_digest == record.compute_stable_digest()


@pytest.mark.full
def test_a_rank_that_dies_at_a_rung_stops_the_ladder_and_the_stage_goes_back_to_the_rung_before(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ExpansionRuns.launch_spec

    def with_a_dead_rank(
        self: ExpansionRuns, task: str, arguments: Any, world_size: int, device: str, faults: Any = ()
    ) -> Any:
        if world_size == 4:
            faults = (RankFault(kind="kill", rank=1, phase="reduce", section=2),)
        return real(self, task, arguments, world_size, device, faults)

    monkeypatch.setattr(ExpansionRuns, "launch_spec", with_a_dead_rank)
    record = run_expansion_stage(opened(root, "stopped", ladder=[2, 4, 8], curve_steps=[12, 12, 12]))
    assert record.verdict.state is State.FAILED
    assert record.verdict.deciding == "rungs_verified"
    assert not any(trial.world_size == 8 for trial in record.trials)
    assert any("stopped at 4 ranks" in note and "rank 1" in note and "stay at 2 ranks" in note for note in record.notes)
    assert record.rollback is not None
    assert (record.rollback.from_path, record.rollback.to_path, record.rollback.verified) == (
        "4 ranks",
        "2 ranks",
        True,
    )
    assert any(trial.outcome.state == "failed" and trial.outcome.cause == "killed by signal" for trial in record.trials)


class _PreparedRuns:
    """Stands for the launches: rungs that were prepared by hand, or errors."""

    def __init__(self, run: StageRun, rungs: dict[int, Any]) -> None:
        self.run, self.settings, self.rungs, self.started = run, run.settings, rungs, list[int]()

    def verify(self, world_size: int, num_steps: int, below: int | None) -> Any:
        self.started.append(world_size)
        prepared = self.rungs[world_size]
        if isinstance(prepared, Exception):
            raise prepared
        return prepared


@pytest.mark.parametrize("kind", ["a check fails", "the launch fails"])
def test_the_ladder_stops_at_the_first_rung_that_fails_and_says_what_to_do(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(expansion, "check_rung", _check_without_launch_folder)
    monkeypatch.setattr(expansion, "_note_cost", _no_cost)
    wrong = good_rung(4)
    wrong.results[3]["probe"] = ["a", "changed"]
    second = wrong if kind == "a check fails" else LaunchError("launch of 4 ranks ended: rank 1 was killed by SIGKILL")
    run = opened(root, "climb", ladder=[2, 4, 8], curve_steps=[12, 12, 12])
    runs, findings = _PreparedRuns(run, {2: good_rung(2), 4: second}), Findings()
    rungs, top = expansion._climb(runs, findings)  # type: ignore[arg-type]
    assert (list(rungs), top, runs.started) == ([2], 4, [2, 4])
    verified = findings.observations["rungs_verified"]
    assert isinstance(verified, Equality)
    assert (verified.num_compared, verified.num_equal, verified.num_mismatched) == (3, 1, 2)
    said = "probe_gradients_bit_equal" if kind == "a check fails" else "rank 1 was killed"
    assert any("stopped at 4 ranks" in note and said in note and "stay at 2 ranks" in note for note in run.notes)


def _no_cost(runs: Any, findings: Findings, rung: Rung) -> float:
    return 0.5


def _check_without_launch_folder(rung: Rung, settings: ExpansionSettings) -> dict[str, Any]:
    return {"probe_gradients_bit_equal": probe_gradients(rung.results, rung.probe), "run_repeats": run_repeats(rung)}


def test_a_ladder_that_does_not_divide_the_global_batch_is_refused_before_anything_starts(root: Path) -> None:
    with pytest.raises(ValueError, match="at most 64 ranks"):
        run_expansion_stage(opened(root, "too-many", ladder=[128], curve_steps=[12]))


def test_a_fraction_below_one_step_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="at least one global batch"):
        run_expansion_stage(opened(root, "too-few", data_fraction=0.01))


@pytest.mark.skipif(torch.cuda.device_count() >= 4, reason="needs fewer than four CUDA devices")
def test_nccl_without_a_gpu_for_each_rank_is_refused(root: Path) -> None:
    with pytest.raises(StageRefused, match="a GPU for each of"):
        run_expansion_stage(opened(root, "nccl", backend="nccl"))


class WithBatchNorm(Digits):
    """The digits with a model that many ranks can't equal."""

    def model(self) -> nn.Module:
        """Build a CNN with BatchNorm."""
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))


def with_batch_norm() -> WithBatchNorm:
    """Build the workload."""
    return WithBatchNorm()


def test_a_model_with_batch_norm_is_refused_by_the_stage_with_the_layer_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "dualtrack.toml").write_text('workload = "digits"\n')
    workload = f"{__name__}:with_batch_norm"
    freeze_inputs(find_project(tmp_path), FreezeSettings(workload=workload, num_batches=2), reason="test")
    with pytest.raises(StageRefused, match=r"found 1: .*use GroupNorm"):
        run_expansion_stage(opened(tmp_path, "norm", workload=workload))


@pytest.mark.full
def test_the_missions_ladder_of_4_8_and_32_ranks_passes_with_all_checks(root: Path) -> None:
    started = time.monotonic()
    record = run_expansion_stage(
        opened(root, "mission", ladder=[4, 8, 32], curve_steps=[100, 100, 30], num_gradient_batches=3, num_band_runs=8)
    )
    seconds = time.monotonic() - started
    assert record.verdict.state is State.PASSED
    assert record.rollback is not None
    assert (record.rollback.from_path, record.rollback.verified) == ("32 ranks", True)
    assert seconds < 300  # 90 s on two cores of its own; here the machine may be shared


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_with_fewer_gpus_than_ranks_routing_is_verified_on_gloo_and_said_so(root: Path) -> None:
    size = 2 * torch.cuda.device_count()
    power = 1 << (size - 1).bit_length()
    record = run_expansion_stage(opened(root, "few-gpus", ladder=[power], curve_steps=[12]))
    assert record.verdict.state is not State.FAILED, record.verdict
    assert any(f"{power} ranks on gloo" in note for note in record.notes)
    assert isinstance(record.observations["step_latency_ratio"], Unmeasured)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_pass_every_check_on_nccl_and_are_timed(root: Path) -> None:
    record = run_expansion_stage(opened(root, "nccl-2", ladder=[2], curve_steps=[12], num_pairs=2, num_steps=20))
    failed = [
        line for line in record.verdict.lines if line.state is State.FAILED and line.observation != "step_latency_ratio"
    ]
    assert failed == []
    assert any("2 ranks on nccl" in note for note in record.notes)
    assert isinstance(record.observations["step_latency_ratio"], Ratio)
    proposal, share = record.observations["bucket_proposal"], record.observations["communication_share"]
    assert isinstance(proposal, Value)
    assert isinstance(share, Value)
    assert record.rollback is not None
    assert record.rollback.verified
