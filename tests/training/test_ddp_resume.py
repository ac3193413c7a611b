"""A restart is a new launch from the last commit, and equals the run that was never disturbed, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dualtrack.facts.errors import LaunchError
from dualtrack.training.checkpoint import latest_commit, read_commit, step_folder
from dualtrack.training.ddp_launch import RankLauncher
from dualtrack.training.launch_spec import LaunchSpec
from dualtrack.training.launch_watch import RankFailed
from dualtrack.training.rank_faults import RankFault
from dualtrack.training.rank_segment import JobSpec, SegmentSpec
from dualtrack.training.rank_tasks import RESUME, ResumeSpec
from dualtrack.training.rank_training import ParallelSettings, RankPath

JOB = JobSpec(
    workload="digits",
    seed=5,
    data_fraction=0.1,
    global_batch=0,
    parallel=ParallelSettings(bucket_cap_mb=0.05),
    path=RankPath(host_cap_bytes=2**24),
)
COMMIT, STOP = 7, 11  # two steps are an epoch: the commit lies inside one


@pytest.fixture(scope="module")
def launcher() -> Iterator[RankLauncher]:
    with RankLauncher() as kept:
        yield kept


def train(
    launcher: RankLauncher, root: Path, world_size: int, *faults: RankFault, job: JobSpec = JOB
) -> tuple[dict[str, Any], ...]:
    segment = SegmentSpec(num_steps=STOP, commit_after=COMMIT, commit_root=str(root))
    arguments = {"job": job.model_dump(mode="json"), "segment": segment.model_dump(mode="json")}
    spec = LaunchSpec(
        task="rank_task_examples:train_and_commit",
        arguments=arguments,
        world_size=world_size,
        timeout_seconds=10,
        faults=faults,
    )
    return launcher.launch(spec).results


def resume(launcher: RankLauncher, root: Path, world_size: int, job: JobSpec = JOB) -> list[dict[str, Any]]:
    spec = ResumeSpec(job=job, root=str(root), num_steps=STOP - COMMIT, float64=False)
    launch = LaunchSpec(
        task=RESUME, arguments={"specs": [spec.model_dump(mode="json")]}, world_size=world_size, timeout_seconds=10
    )
    return [result[0] for result in launcher.launch(launch).results]


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_run_killed_after_its_commit_and_started_again_equals_the_undisturbed_one(
    launcher: RankLauncher, tmp_path: Path, world_size: int
) -> None:
    undisturbed = train(launcher, tmp_path / "whole", world_size)
    with pytest.raises(RankFailed) as caught:
        train(
            launcher,
            tmp_path / "killed",
            world_size,
            RankFault(kind="kill", rank=world_size - 1, phase="reduce", step=COMMIT + 1),
        )
    assert caught.value.rank == world_size - 1
    again = resume(launcher, tmp_path / "killed", world_size)
    for whole, resumed in zip(undisturbed, again, strict=True):
        assert resumed["start_step"] == COMMIT
        assert resumed["curve"]["losses"] == whole["losses"][COMMIT:]
        assert resumed["curve"]["parameter_digests"][str(STOP)] == whole["parameter_digests"][str(STOP)]


def test_another_bucket_layout_would_not_resume_bit_for_bit_from_four_ranks_on(
    launcher: RankLauncher, tmp_path: Path
) -> None:
    whole = train(launcher, tmp_path, 4)
    plain = JOB.model_copy(update={"parallel": JOB.parallel.model_copy(update={"bucket_cap_mb": 25.0})})
    other_layout = resume(launcher, tmp_path, 4, plain)  # one bucket, as any fresh wrapper has it until it is rebuilt
    digests = other_layout[0]["curve"]["parameter_digests"][str(STOP)], whole[0]["parameter_digests"][str(STOP)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("phase", ["checkpoint"])
def test_a_rank_killed_while_the_checkpoint_is_made_leaves_the_previous_state(
    launcher: RankLauncher, tmp_path: Path, phase: str
) -> None:
    with pytest.raises(RankFailed) as caught:
        train(launcher, tmp_path, 2, RankFault(kind="kill", rank=1, phase=phase, step=COMMIT - 1))
    assert (caught.value.rank, latest_commit(tmp_path)) == (1, None)
    train(launcher, tmp_path, 2)
    assert latest_commit(tmp_path) == step_folder(tmp_path, COMMIT)
    assert read_commit(step_folder(tmp_path, COMMIT)).position.world_size == 2


def test_loader_workers_of_a_rank_change_nothing(launcher: RankLauncher, tmp_path: Path) -> None:
    with_workers = JOB.model_copy(update={"path": JOB.path.model_copy(update={"num_workers": 1})})
    plain, worked = train(launcher, tmp_path / "plain", 2), train(launcher, tmp_path / "worked", 2, job=with_workers)
    assert [result["parameter_digests"] for result in plain] == [result["parameter_digests"] for result in worked]


def test_a_commit_of_another_plan_is_refused(launcher: RankLauncher, tmp_path: Path) -> None:
    train(launcher, tmp_path, 1)
    with pytest.raises(LaunchError, match="belongs to another data plan"):
        resume(launcher, tmp_path, 1, JOB.model_copy(update={"data_fraction": 0.2}))


def test_nothing_committed_is_said_so(launcher: RankLauncher, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="found none; run the rung that commits it first"):
        resume(launcher, tmp_path, 1)
