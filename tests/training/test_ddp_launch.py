"""Launches that go well and launches in which something breaks: a named error in time, and nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dualtrack.facts.errors import LaunchError
from dualtrack.training import ddp_launch
from dualtrack.training.ddp_launch import RankLauncher, launch
from dualtrack.training.launch_spec import LaunchSpec
from dualtrack.training.launch_watch import RankFailed
from dualtrack.training.rank_faults import FaultKind, RankFault
from dualtrack.training.rank_processes import living_in_group

TIMEOUT_SECONDS = 3.0  # the deadline is then 19 s


def toy(
    world_size: int = 4,
    *faults: RankFault,
    timeout_seconds: float = TIMEOUT_SECONDS,
    task: str = "toy_training",
    **arguments: Any,
) -> LaunchSpec:
    return LaunchSpec(
        task=f"rank_task_examples:{task}",
        arguments=arguments,
        world_size=world_size,
        timeout_seconds=timeout_seconds,
        faults=faults,
    )


def fault(kind: FaultKind, phase: str, rank: int = 2, step: int = 0, **more: Any) -> RankFault:
    return RankFault(kind=kind, rank=rank, phase=phase, step=step, **more)


@pytest.fixture(scope="module")
def launcher() -> Iterator[RankLauncher]:
    with RankLauncher() as kept:
        yield kept


@pytest.fixture
def short_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of its own with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="dt-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def failed(launcher: RankLauncher, spec: LaunchSpec) -> tuple[RankFailed, float]:
    """Run a launch that must fail; return its error and how long it took, and check that no rank is left."""
    launcher.make_ready()
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        launcher.launch(spec)
    seconds = time.monotonic() - started
    group = launcher.agent_pid
    left = (
        []
        if group is None
        else [pid for pid in living_in_group(group) if psutil.Process(pid).name() != "" and is_rank(pid, group)]
    )
    assert left == []
    return caught.value, seconds


def is_rank(pid: int, group: int) -> bool:
    """A rank is a grandchild of the agent: the agent itself, its forkserver and its resource tracker are its children."""
    process = psutil.Process(pid)
    return pid != group and process.ppid() != group


def test_every_rank_runs_and_returns_its_result(launcher: RankLauncher) -> None:
    result = launcher.launch(toy(4))
    assert [value["rank"] for value in result.results] == [0, 1, 2, 3]
    assert {value["world_size"] for value in result.results} == {4}
    assert 0 < result.seconds_until_up <= result.seconds


def test_the_agent_serves_one_launch_after_another_with_a_fresh_process_each(launcher: RankLauncher) -> None:
    pids = [value["pid"] for _ in range(2) for value in launcher.launch(toy(2)).results]
    assert len(set(pids)) == 4


@pytest.mark.parametrize("phase", ["start", "forward", "reduce", "teardown"])
def test_a_rank_killed_in_any_phase_is_named_within_the_deadline(launcher: RankLauncher, phase: str) -> None:
    step = {"start": 0, "teardown": 2}.get(phase, 1)
    error, seconds = failed(launcher, toy(4, fault("kill", phase, step=step)))
    assert error.rank == 2
    assert f"phase {phase}" in str(error)
    assert seconds < 10


def test_a_rank_that_raises_is_named_with_its_traceback(launcher: RankLauncher) -> None:
    error, _ = failed(launcher, toy(4, fault("raise", "forward", step=1)))
    assert error.rank == 2
    assert "PlantedRankFault: planted on rank 2" in str(error)
    assert "rank_faults.py" in error.rank_traceback


def test_a_rank_that_leaves_early_with_exit_code_0_is_a_failure(launcher: RankLauncher) -> None:
    error, _ = failed(launcher, toy(4, fault("exit", "forward", step=1)))
    assert error.rank == 2
    assert "left early" in str(error)


def test_nan_on_one_rank_is_named_before_it_reaches_the_others(launcher: RankLauncher) -> None:
    error, _ = failed(launcher, toy(4, task="checked_training", nan_rank=1))
    assert error.rank == 1
    assert "NonFiniteLoss" in str(error)


def test_a_rank_that_sleeps_past_the_timeout_is_named_although_the_others_complain(launcher: RankLauncher) -> None:
    error, seconds = failed(launcher, toy(4, fault("sleep", "forward", step=1, seconds=60.0), timeout_seconds=1.5))
    assert error.rank == 2
    assert "Timed out" in error.rank_traceback
    assert seconds < 3 * 1.5 + 10


def test_a_frozen_rank_is_named_and_killed(launcher: RankLauncher) -> None:
    error, seconds = failed(launcher, toy(4, fault("freeze", "forward", step=1), timeout_seconds=1.5))
    assert error.rank == 2
    assert "is stopped" in str(error)
    assert seconds < 3 * 1.5 + 10


@pytest.mark.full
def test_a_rank_that_freezes_while_joining_is_named(launcher: RankLauncher) -> None:
    error, _ = failed(launcher, toy(4, fault("freeze", "init"), timeout_seconds=1.5))
    assert (error.rank, "phase init" in str(error)) == (2, True)


def test_an_abort_in_native_code_is_named_with_the_last_words_of_its_stderr(launcher: RankLauncher) -> None:
    error, _ = failed(launcher, toy(2, fault("abort", "forward", rank=1, step=1)))
    assert error.rank == 1
    assert "stderr ended with" in str(error)


@pytest.mark.full
def test_a_slow_rank_is_flagged_by_its_own_time_and_the_run_goes_on(launcher: RankLauncher) -> None:
    result = launcher.launch(
        toy(4, fault("sleep", "forward", seconds=0.4, repeat=True, section=1), timeout_seconds=20, num_steps=10)
    )
    assert list(result.slow_ranks) == [2]


@pytest.mark.full
def test_another_world_size_than_the_launch_file_says_is_refused(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    toy(4).save(tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "dualtrack.training.ddp_worker", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert "expected 4 ranks, as launch.json says, got 2" in run.stderr


def test_a_rendezvous_port_in_use_is_refused_at_once(launcher: RankLauncher) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        endpoint = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(LaunchError, match=r"Address already in use.*port 0"):
            launcher.launch(toy(2).model_copy(update={"endpoint": endpoint}))


def test_uneven_batches_forced_past_the_plan_are_an_error_on_all_ranks_and_no_hang(launcher: RankLauncher) -> None:
    error, seconds = failed(launcher, toy(4, task="uneven_training", timeout_seconds=20))
    assert "rank that exhausted" in str(error) or "exhausted all inputs" in str(error)
    assert seconds < 20


def test_a_reduction_of_another_length_on_one_rank_never_ends_well(launcher: RankLauncher) -> None:
    error, seconds = failed(launcher, toy(4, task="other_length"))
    assert seconds < 3 * TIMEOUT_SECONDS + 10
    assert "no error" not in str(error)


@pytest.mark.full
def test_the_same_port_serves_again_after_a_launch_that_was_killed(launcher: RankLauncher) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = {"endpoint": f"127.0.0.1:{probe.getsockname()[1]}"}
    failed(launcher, toy(2, fault("kill", "forward", rank=1, step=1)).model_copy(update=endpoint))
    assert len(launcher.launch(toy(2).model_copy(update=endpoint)).results) == 2


@pytest.mark.full
def test_nothing_is_left_after_close_neither_process_nor_port_nor_file(short_temporary_folder: Path) -> None:
    launcher = RankLauncher()
    launcher.launch(toy(2))
    with pytest.raises(RankFailed):
        launcher.launch(toy(2, fault("kill", "forward", rank=1, step=1)))
    group = launcher.agent_pid
    assert group is not None
    launcher.close()
    launcher.close()
    assert living_in_group(group) == []
    assert list(short_temporary_folder.iterdir()) == []


def test_no_port_stays_open_after_a_launch(launcher: RankLauncher) -> None:
    launcher.launch(toy(2))
    group = launcher.agent_pid
    assert group is not None
    listening = [
        connection
        for pid in living_in_group(group)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == "LISTEN"
    ]
    assert listening == []


@pytest.mark.full
def test_a_killed_agent_is_an_error_and_the_next_launch_works() -> None:
    with RankLauncher() as launcher:
        launcher.launch(toy(2))
        assert launcher.agent_pid is not None
        os.kill(launcher.agent_pid, signal.SIGKILL)
        while psutil.Process(launcher.agent_pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
        assert len(launcher.launch(toy(2)).results) == 2


@pytest.mark.full
def test_an_agent_killed_during_a_launch_takes_its_ranks_with_it() -> None:
    with RankLauncher() as launcher:
        launcher.launch(toy(2))
        group = launcher.agent_pid
        assert group is not None
        killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(1.5); os.kill({group}, 9)"])
        with pytest.raises(LaunchError):
            launcher.launch(toy(2, fault("sleep", "forward", rank=1, step=1, seconds=60.0), timeout_seconds=30))
        killer.wait()
        assert living_in_group(group) == []


def test_when_the_launching_process_is_killed_no_process_and_no_file_of_it_is_left(
    short_temporary_folder: Path,
) -> None:
    environment = {**os.environ, "TMPDIR": str(short_temporary_folder)}
    script = Path(__file__).with_name("launch_for_tests.py")
    parent = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while len(living_in_group(group)) < 4 or not list(short_temporary_folder.glob("*/launch-*/journal-00001.json")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while living_in_group(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert living_in_group(group) == []
    assert list(short_temporary_folder.iterdir()) == []


@pytest.mark.full
def test_a_teardown_that_hangs_ends_at_the_deadline_and_names_the_rank(launcher: RankLauncher) -> None:
    error, seconds = failed(launcher, toy(4, fault("sleep", "teardown", step=2, seconds=300.0), timeout_seconds=1.0))
    assert (error.rank, "phase teardown" in str(error)) == (2, True)
    assert 13 <= seconds < 13 + 8


@pytest.mark.full
def test_a_process_that_does_not_exit_ends_at_the_deadline(launcher: RankLauncher) -> None:
    error, seconds = failed(launcher, toy(2, task="lingering", timeout_seconds=1.0))
    assert "does not exit" in str(error)
    assert seconds < 13 + 8


@pytest.mark.full
def test_a_mute_port_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp_launch, "refuse_busy_endpoint", lambda endpoint: None)
    with socket.socket() as mute, RankLauncher() as launcher:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        spec = toy(2, timeout_seconds=1.0).model_copy(update={"endpoint": f"127.0.0.1:{mute.getsockname()[1]}"})
        launcher.make_ready()
        started = time.monotonic()
        with pytest.raises(LaunchError, match=r"no rank came up.*the rendezvous at 127"):
            launcher.launch(spec)
        assert time.monotonic() - started < 13 + 8


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "raise", "exit"])
def test_the_right_rank_is_named_in_ten_of_ten_repeats(launcher: RankLauncher, kind: FaultKind) -> None:
    named = [failed(launcher, toy(4, fault(kind, "forward", rank=repeat % 4, step=1)))[0].rank for repeat in range(10)]
    assert named == [repeat % 4 for repeat in range(10)]


@pytest.mark.full
def test_thirty_two_ranks_run_a_toy_job_in_15_seconds_and_2_gigabytes(launcher: RankLauncher) -> None:
    result = launcher.launch(toy(32, task="weighed_training", timeout_seconds=60))
    assert result.seconds < 15
    assert sum(value["pss_bytes"] for value in result.results) < 2 * 10**9


@pytest.mark.full
def test_the_short_form_keeps_results_in_the_callers_folder(tmp_path: Path) -> None:
    result = launch(toy(1), tmp_path / "mine")
    assert result.results[0]["rank"] == 0
    assert (tmp_path / "mine" / "launch.json").exists()


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", ["kill", "raise", "exit", "freeze"])
def test_on_nccl_a_lost_rank_is_named_although_the_survivor_learns_nothing(
    launcher: RankLauncher, kind: FaultKind
) -> None:
    changes = {"backend": "nccl", "device": "cuda"}
    spec = toy(2, fault(kind, "forward", rank=1, step=1), timeout_seconds=12.0)
    error, seconds = failed(launcher, spec.model_copy(update=changes))
    assert error.rank == 1
    assert seconds < 3 * 12 + 10 + 10


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_nccl_every_rank_has_a_gpu_of_its_own(launcher: RankLauncher) -> None:
    result = launcher.launch(toy(2, timeout_seconds=60).model_copy(update={"backend": "nccl", "device": "cuda"}))
    assert [value["device"] for value in result.results] == ["cuda:0", "cuda:1"]
