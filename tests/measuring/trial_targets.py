"""Functions that the trial tests run in fresh processes."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

from dualtrack.facts.errors import NonFiniteLoss


def describe_process() -> dict[str, Any]:
    """Say what this process is."""
    preloaded = "torch" in sys.modules
    import torch

    return {"pid": os.getpid(), "torch_was_preloaded": preloaded, "cuda_initialised": torch.cuda.is_initialized()}


def raise_value_error() -> None:
    """Fail as a bug does."""
    raise ValueError("expected the planted fault")


def raise_memory_error() -> None:
    """Fail as a full machine does."""
    raise MemoryError


def raise_non_finite_loss() -> None:
    """Fail as a diverged training does."""
    raise NonFiniteLoss("step 3: nan")


def kill_itself() -> None:
    """Die as the kernel's out-of-memory killer makes one die."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave_early() -> None:
    """End with status 0 and no result."""
    os._exit(0)


def sleep_with_child(marker: str) -> None:
    """Start a child and sleep far beyond any deadline."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", marker])
    time.sleep(300)


def describe_workers() -> dict[str, Any]:
    """Say how a DataLoader would start its workers here."""
    import multiprocessing

    return {
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
    }
