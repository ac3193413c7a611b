"""The supervised process between launcher and ranks: it runs torch's elastic agent, and its process group is what gets killed.

Started as `python -m dualtrack.training.ddp_agent` in a session of its own, so that agent, forkserver, ranks and their loader workers are one
process group. It serves launches until its control connection ends; when the launcher is gone, the group ends itself.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dualtrack.training.rank_guard import LAUNCHER_GONE_EXIT_CODE
from dualtrack.training.rank_processes import end_group

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch._inductor.config",
    "dualtrack.training.ddp_worker",
    "dualtrack.training.rank_tasks",
)
"""DDP's constructor imports `torch._dynamo` in every process: 1.3 s of CPU a rank, measured on 2 cores, unless the forkserver has done it."""


def _warm() -> None:
    """Do nothing; a first process proves that the forkserver has finished its imports."""


def serve(control: Connection, liveness: Connection, scratch: Path) -> None:
    """Run launches one after another until the control connection ends."""
    threading.Thread(
        target=_end_with_launcher, args=(liveness, scratch, os.getppid()), name="liveness", daemon=True
    ).start()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    first = context.Process(target=_warm)
    first.start()
    import torch.distributed.launcher.api  # noqa: F401  (while the forkserver does its own imports)

    first.join()
    control.send_bytes(json.dumps({"ready": True}).encode())
    while True:
        try:
            request = json.loads(control.recv_bytes())
        except EOFError:
            return
        answer = run_elastic(request, liveness) if request else {"alive": True}
        control.send_bytes(json.dumps(answer).encode())


def run_elastic(request: dict[str, Any], liveness: Connection) -> dict[str, Any]:
    """Run one elastic launch and say how it ended; exit codes by rank where the agent saw them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from dualtrack.training.ddp_worker import run_rank

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=request["world_size"], run_id=request["run_id"], rdzv_backend="c10d",
        rdzv_endpoint=request["endpoint"], rdzv_configs={"timeout": request["timeout_seconds"]}, max_restarts=0, monitor_interval=0.1,
        start_method="forkserver", local_addr="127.0.0.1", logs_specs=DefaultLogsSpecs(log_dir=request["log_folder"], redirects=Std.ALL),
    )  # fmt: skip
    try:
        elastic_launch(config, run_rank)(request["folder"], liveness)
    except ChildFailedError as error:
        return {
            "state": "failed",
            "exit_codes": {str(rank): failure.exitcode for rank, failure in error.failures.items()},
        }
    except Exception:  # noqa: BLE001 (whatever the agent says goes to the launcher, which raises)
        return {"state": "error", "error": traceback.format_exc()[-4000:]}
    return {"state": "completed"}


def _end_with_launcher(liveness: Connection, scratch: Path, launcher: int) -> None:
    """Wait for the launcher's end; then end the group, remove what lies about, and end this process.

    The pipe tells at once. The parent's id tells too, should a process that the launcher forked hold the pipe open.
    """
    with contextlib.suppress(OSError, EOFError):
        while not liveness.poll(1.0) and os.getppid() == launcher:
            pass
    end_group(os.getpgrp(), apart_from=os.getpid())
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(LAUNCHER_GONE_EXIT_CODE)


def main() -> None:
    """Serve the launcher that holds the other ends of the two descriptors named on the command line."""
    control_fd, liveness_fd, scratch = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    log = os.open(scratch / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = os.environ["TMPDIR"] = str(
        scratch
    )  # sockets and error files of torch and multiprocessing go where the launcher cleans up
    serve(Connection(control_fd), Connection(liveness_fd, writable=False), scratch)


if __name__ == "__main__":
    main()
