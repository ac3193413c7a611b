"""Launches from a notebook's kernel: as from a shell, and nothing is left when the kernel is killed."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

LAUNCH = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from dualtrack.training.ddp_launch import RankLauncher
from dualtrack.training.launch_spec import LaunchSpec
from dualtrack.training.rank_faults import RankFault
launcher = RankLauncher()
spec = LaunchSpec(task="rank_task_examples:toy_training", world_size=4, timeout_seconds=60)
"""
FOR_A_MINUTE = "launcher.launch(spec.model_copy(update={'faults': (RankFault(kind='sleep', rank=1, phase='forward', step=1, section=1, seconds=60.0),)}))"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BlockingKernelClient, Path]]:
    with tempfile.TemporaryDirectory(prefix="dt-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        manager, client = start_new_kernel(startup_timeout=120, kernel_name="python3")
        try:
            yield client, Path(folder)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def run(client: BlockingKernelClient, code: str) -> str:
    printed: list[str] = []
    reply = client.execute_interactive(
        code, timeout=180, output_hook=lambda message: printed.append(str(message["content"].get("text", "")))
    )
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(printed)


def ranks_in(folder: Path) -> list[psutil.Process]:
    """Return the living processes whose scratch folder is under `folder`: the agent, its forkserver and the ranks."""
    agents = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or [])
    ]
    found = {process.pid: process for agent in agents for process in [agent, *agent.children(recursive=True)]}
    return [process for process in found.values() if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.full
def test_a_notebook_launches_ranks_and_leaves_nothing_when_its_kernel_is_killed(
    kernel: tuple[BlockingKernelClient, Path],
) -> None:
    client, folder = kernel
    run(client, LAUNCH)
    assert "[0, 1, 2, 3]" in run(client, "print([value['rank'] for value in launcher.launch(spec).results])")
    pid = int(run(client, "import os; print(os.getpid())"))
    client.execute(FOR_A_MINUTE)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*/launch-*/journal-00003.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ranks = ranks_in(folder)
    assert len(ranks) >= 5
    os.kill(pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert list(folder.glob("dualtrack-ranks-*")) == []
