"""Launch a task on many ranks of this host and get results or a named error, from a notebook as from a shell.

PyTorch's elastic agent starts the ranks from a forkserver that has preloaded torch, in a supervised process group. This process owns the
deadline: a rank without progress for 3 x timeout + 10 s, in any phase from start to exit, ends the launch; whatever happens, no process,
port or file of it is left.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dualtrack.facts.errors import LaunchError
from dualtrack.training.launch_spec import LaunchSpec
from dualtrack.training.launch_watch import LaunchResult, LaunchWatch
from dualtrack.training.rank_processes import end_group, end_processes

START_SECONDS = 120.0
"""For importing torch twice on a loaded machine; a launch's own deadline starts afterwards."""
POLL_SECONDS = 0.1
AGENT_SECONDS = 3.0
"""For an agent whose ranks were killed to say so; an agent that does is kept for the next launch."""
LONGEST_BASE = 50
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What an enclosing torchrun left in the environment is not for the ranks of this launch."""


class RankLauncher:
    """Keeps the supervised agent with its warm forkserver between launches; one launch at a time, from one thread.

    The first launch pays for the imports, a later one only for its ranks. `close()` twice is fine.
    """

    def __init__(self) -> None:
        """Start the agent's process; it warms up while the caller does something else."""
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def agent_pid(self) -> int | None:
        """Process id of the agent, which is also the id of its process group; None when it does not run."""
        return None if self._process is None else self._process.pid

    def launch(self, spec: LaunchSpec, folder: Path | None = None) -> LaunchResult:
        """Run the task on every rank and return what the ranks returned.

        Args:
            spec: Task, world size, timeout.
            folder: An empty or new folder for journals, logs and results; None makes one that lives as long as this launcher.

        Raises:
            RankFailed: A rank was killed, raised, left early, or did not get any further within the deadline.
            LaunchError: The rendezvous port is in use, or the agent itself failed.
        """
        refuse_busy_endpoint(spec.endpoint)
        self.make_ready()
        run_id = uuid.uuid4().hex[:12]
        folder = folder if folder is not None else self._scratch / f"launch-{run_id}"
        folder.mkdir(parents=True, exist_ok=True)
        spec.save(folder)
        request = {
            "world_size": spec.world_size, "run_id": run_id, "endpoint": spec.endpoint, "timeout_seconds": max(1, int(spec.timeout_seconds)),
            "log_folder": str(folder / "logs"), "folder": str(folder),
        }  # fmt: skip
        watch = LaunchWatch(spec, folder)
        ended_well = False
        try:
            self._control.send_bytes(json.dumps(request).encode())
            outcome = self._wait(watch)
            error = watch.judge(outcome)
            # an agent that said itself that the launch failed has ended its ranks and can serve again
            ended_well = outcome["state"] in ("completed", "failed") and not watch.running()
        finally:
            if not ended_well:
                self.close()
        if error is not None:
            raise error
        return watch.result()

    def close(self) -> None:
        """End the agent, its forkserver and every rank, and remove their files.

        Raises:
            LaunchError: A process survived SIGKILL.
        """
        process, self._process = self._process, None
        if process is None:
            return
        left = end_group(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
        self._control.close()
        self._liveness.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        if left:
            raise LaunchError(
                f"processes {left} of the launch survived SIGKILL, so they sleep in the kernel; the host needs attention"
            )

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _start(self) -> None:
        """Start the agent in a session of its own; only this process has the write end of the liveness pipe."""
        base = tempfile.gettempdir()
        # the forkserver's socket lies in it, and the path of a socket has at most 107 bytes
        self._scratch = Path(
            tempfile.mkdtemp(prefix="dualtrack-ranks-", dir=base if len(base) <= LONGEST_BASE else "/tmp")
        )
        self._control, control = multiprocessing.Pipe()
        liveness, self._liveness = multiprocessing.Pipe(duplex=False)
        self._is_ready = False
        command = [
            sys.executable,
            "-m",
            "dualtrack.training.ddp_agent",
            str(control.fileno()),
            str(liveness.fileno()),
            str(self._scratch),
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(control.fileno(), liveness.fileno()),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=_agent_environment(),
        )
        control.close()
        liveness.close()

    def make_ready(self) -> None:
        """Wait until the agent can start ranks at once; `launch` does this too.

        Raises:
            LaunchError: The agent did not start.
        """
        if self._process is None or (self._is_ready and not self._answers()):
            self.close()
            self._start()
        if self._is_ready:
            return
        message = self._receive() if self._control.poll(START_SECONDS) else None
        if message is None or not message.get("ready"):
            log = _tail(self._scratch / "agent.log")
            self.close()
            raise LaunchError(
                f"expected the launch agent to start within {START_SECONDS:.0f} s, it did not; its last words:\n{log}"
            )
        self._is_ready = True

    def _answers(self) -> bool:
        """Ask the agent for a sign of life; a process that was killed may take a while to be seen as dead."""
        try:
            self._control.send_bytes(b"{}")
        except OSError:
            return False
        return self._control.poll(AGENT_SECONDS) and self._receive() is not None

    def _wait(self, watch: LaunchWatch) -> dict[str, Any]:
        """Wait for the agent's word, a failure, or the deadline of a rank, whichever comes first."""
        while not self._control.poll(POLL_SECONDS):
            reason = watch.reason_to_stop()
            if reason is not None:
                # the agent alone would wait up to 30 s for a rank that ignores SIGTERM, and for ever for one that hangs at its exit
                end_processes(watch.running())
                said = self._receive() if self._control.poll(AGENT_SECONDS) else None
                return {**said, "stopped": reason} if said is not None else {"state": reason}
        return self._receive() or {"state": "agent died", "error": _tail(self._scratch / "agent.log")}

    def _receive(self) -> dict[str, Any] | None:
        try:
            message: dict[str, Any] = json.loads(self._control.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None
        return message


def launch(spec: LaunchSpec, folder: Path | None = None) -> LaunchResult:
    """Run one launch with an agent of its own; see `RankLauncher.launch`. Without `folder` only the results survive."""
    with RankLauncher() as launcher:
        return launcher.launch(spec, folder)


def refuse_busy_endpoint(endpoint: str) -> None:
    """Refuse a rendezvous port that somebody else holds: the agent would take a mute stranger for its store and wait.

    Raises:
        LaunchError: The port is in use on this host.
        ValueError: The endpoint is not `host:port`.
    """
    host, separator, port = endpoint.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"expected an endpoint host:port, got {endpoint!r}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise LaunchError(
                f"expected to bind the rendezvous endpoint {endpoint}, got {error.strerror}; end its owner or use port 0, which takes a free one"
            ) from error


def _agent_environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    kept.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no look-up of its name, which fails or hangs on many
    kept.setdefault("OMP_NUM_THREADS", "1")
    kept["PYTHONPATH"] = os.pathsep.join(
        entry for entry in sys.path if entry
    )  # a workload of the caller's own must be found in the ranks
    return kept


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:] if path.exists() else "(none)"
