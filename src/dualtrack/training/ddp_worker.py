"""One rank: joins the group, runs its task, leaves a result. Started by our launcher, or by torchrun on many hosts:

    python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        -m dualtrack.training.ddp_worker launch.json

The group always has an explicit timeout; what a timeout does not bound is bounded by the launcher's deadline and the rank's own guard.
"""

import ctypes
import importlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from dualtrack.training.launch_spec import LaunchSpec
from dualtrack.training.rank_faults import planted
from dualtrack.training.rank_guard import RankGuard
from dualtrack.training.rank_journal import RankFailure, RankJournal, write_failure, write_result

COMMUNICATION_ERROR = re.compile(
    r"gloo|NCCL|by peer|Timed out waiting|[Ss]ocket|connectFullMesh|process group|TCPStore|[Bb]arrier|wait timeout|timed out after",
    re.ASCII,
)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a task knows about its rank."""

    rank: int
    world_size: int
    ranks_on_host: int
    device: torch.device
    backend: str
    timeout_seconds: float
    folder: Path
    """The launch folder, shared by the ranks of one host; tensors for the launcher go here."""
    journal: RankJournal


def run_rank(folder: str, liveness: Connection | None) -> None:
    """Run the task of this rank; the environment variables of torchrun say which one it is.

    Args:
        folder: The launch folder.
        liveness: Read end of a pipe whose other end only the launching process has; None under torchrun.
    """
    spec = LaunchSpec.load(Path(folder))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)  # many ranks share a host's cores; more threads a rank only take turns
    descriptor = None if liveness is None else liveness.fileno()
    # the guard comes first: a rank that is told to end before its journal exists says so, and is not taken for a culprit
    with (
        RankGuard(rank, Path(folder), spec.deadline_seconds, descriptor) as guard,
        RankJournal(Path(folder), rank) as journal,
    ):
        guard.journal = journal
        try:
            journal.on_enter = planted(spec.faults, rank)
            journal.enter("start")
            _run_task(spec, Path(folder), journal)
        except BaseException as error:
            write_failure(Path(folder), _describe(rank, error))
            raise
        journal.enter("done")


def _run_task(spec: LaunchSpec, folder: Path, journal: RankJournal) -> None:
    module_name, _, function_name = spec.task.partition(":")
    task = getattr(importlib.import_module(module_name), function_name)
    journal.enter("init")
    with process_group(spec):
        context = RankContext(
            rank=dist.get_rank(), world_size=dist.get_world_size(), ranks_on_host=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            device=_device(spec), backend=dist.get_backend(), timeout_seconds=spec.timeout_seconds, folder=folder, journal=journal,
        )  # fmt: skip
        result = task(context, **spec.arguments)
        write_result(folder, context.rank, result)
        journal.enter("teardown")


@contextmanager
def process_group(spec: LaunchSpec) -> Iterator[None]:
    """Join the group of all ranks and leave it afterwards; after an error it is not torn down, since that can hang."""
    expected = int(os.environ["WORLD_SIZE"])
    if expected != spec.world_size:
        raise ValueError(
            f"expected {spec.world_size} ranks, as launch.json says, got {expected}; check --nnodes and --nproc-per-node"
        )
    device_id = None
    if spec.device == "cuda":
        device_id = _device(spec)
        torch.cuda.set_device(device_id)
    # a device makes the communicator of NCCL eager, so its errors surface here
    dist.init_process_group(
        spec.backend,
        timeout=timedelta(seconds=spec.timeout_seconds),
        device_id=device_id if spec.backend == "nccl" else None,
    )
    yield
    dist.destroy_process_group()


def _device(spec: LaunchSpec) -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if spec.device == "cuda" else torch.device("cpu")


def _describe(rank: int, error: BaseException) -> RankFailure:
    is_communication = isinstance(error, RuntimeError) and bool(COMMUNICATION_ERROR.search(str(error)))
    return RankFailure(
        rank=rank, error=f"{type(error).__name__}: {error}"[:2000], traceback="".join(traceback.format_exception(error))[-8000:],
        is_communication=is_communication, at_seconds=time.monotonic(),
    )  # fmt: skip


def _end_with_agent() -> None:
    """Ask the kernel to kill this rank when torchrun dies; a kill -9 of an agent otherwise leaves its ranks running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run one rank under torchrun; the only argument is the launch file or the folder that holds it."""
    if len(sys.argv) != 2 or "RANK" not in os.environ:
        sys.exit("usage: python -m torch.distributed.run ... -m dualtrack.training.ddp_worker LAUNCH_FOLDER")
    _end_with_agent()
    run_rank(sys.argv[1], None)


if __name__ == "__main__":
    main()
