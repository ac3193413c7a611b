"""The same rung over two hosts by torchrun: two network namespaces that share nothing but a cable."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dualtrack.facts.errors import EvidenceError
from dualtrack.stages.expansion_hosts import main

REPOSITORY = Path(__file__).resolve().parents[2]
TWO_HOSTS = r"""
set -e
ip link set lo up
ip link add cable0 type veth peer name cable1
unshare -n sleep 600 & other=$!
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
ip link set cable1 netns $other
ip addr add 10.77.0.1/24 dev cable0; ip link set cable0 up
nsenter -t $other -n sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev cable1; ip link set cable1 up'
start() { "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --max-restarts 0 --rdzv-backend c10d \
  --rdzv-endpoint 10.77.0.1:29400 --rdzv-id rung --rdzv-conf join_timeout=60,timeout=60,is_host=$2 --local-addr "$1" -m dualtrack.training.ddp_worker "$RUNG"; }
export -f start
GLOO_SOCKET_IFNAME=cable0 start 10.77.0.1 1 & first=$!
GLOO_SOCKET_IFNAME=cable1 nsenter -t $other -n bash -c 'start 10.77.0.2 0' & second=$!
code=0; wait $first || code=$?; wait $second || code=$?
kill $other; exit $code
"""


def can_make_namespaces() -> bool:
    tools = all(shutil.which(name) for name in ("unshare", "nsenter", "ip"))
    return tools and subprocess.run(["unshare", "-rnm", "true"], check=False, capture_output=True).returncode == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dt-") as folder:
        shutil.copy(REPOSITORY / "dualtrack.toml", folder)
        shutil.copytree(REPOSITORY / "frozen_inputs" / "digits", Path(folder) / "frozen_inputs" / "digits")
        yield Path(folder)


@pytest.mark.full
@pytest.mark.skipif(not can_make_namespaces(), reason="needs unshare -rnm, nsenter and ip")
def test_a_rung_over_two_hosts_passes_every_check(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shared)
    ranks = shared / "ranks"
    ranks.mkdir()
    asked = [
        str(ranks),
        "--world-size",
        "4",
        "--ranks-per-host",
        "2",
        "--num-steps",
        "13",
        "--settings",
        '{"num_band_runs": 4}',
    ]
    assert main(["prepare", *asked]) == 0
    with pytest.raises(EvidenceError, match=r"result of each of 4 ranks.*result-00000"):
        main(["judge", *asked])
    environment = {**os.environ, "PYTHON": sys.executable, "RUNG": str(ranks / "rung-4"), "OMP_NUM_THREADS": "1"}
    hosts = subprocess.run(
        ["unshare", "-rnm", "--kill-child", "--fork", "bash", "-c", TWO_HOSTS], env=environment, timeout=240, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert hosts.returncode == 0, hosts.stderr[-3000:]
    assert main(["judge", *asked]) == 0
    assert capsys.readouterr().out.count("holds: ") == 14


@pytest.mark.full
def test_ranks_of_a_killed_torchrun_agent_end_with_it(tmp_path: Path) -> None:
    tasks = REPOSITORY / "tests" / "training"
    (tmp_path / "launch.json").write_text(
        '{"task": "rank_task_examples:toy_training", "world_size": 2, "timeout_seconds": 60, '
        '"faults": [{"kind": "sleep", "rank": 1, "phase": "forward", "step": 1, "section": 1, "seconds": 60}]}'
    )
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "dualtrack.training.ddp_worker",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tasks), "GLOO_SOCKET_IFNAME": "lo"}
    agent = subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("journal-*.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ranks = psutil.Process(agent.pid).children(recursive=True)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
