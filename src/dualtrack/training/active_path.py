"""The data path that a trainer should use now: what the project's ledger says, unless the kill switch is pulled.

`DUALTRACK_STAGE=legacy` in the environment puts the old path back at the next start, whatever the ledger says.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from dualtrack.facts.ledger import Ledger
from dualtrack.facts.project import find_project
from dualtrack.training.data_paths import DEFAULT_CAP_BYTES, DataPath, open_data_path
from dualtrack.training.workload import Split, Workload

KILL_SWITCH = "DUALTRACK_STAGE"
PATHS = ("legacy", "pooled", "prefetched")


def active_path(root: str | Path | None = None) -> str:
    """Return `legacy`, `pooled` or `prefetched`: the kill switch first, then the ledger, then legacy.

    Raises:
        ValueError: The kill switch names no path.
        LedgerError: The ledger is broken.
    """
    switch = os.environ.get(KILL_SWITCH)
    if switch is not None:
        if switch not in PATHS:
            raise ValueError(f"{KILL_SWITCH}: expected one of {', '.join(PATHS)}, got {switch!r}")
        if switch != "legacy":
            raise ValueError(
                f"{KILL_SWITCH}: expected 'legacy', got {switch!r}; only `dualtrack promote` activates a new path"
            )
        return switch
    return Ledger(find_project(root).ledger).active_path()


@contextlib.contextmanager
def open_loader(
    workload: Workload,
    device: torch.device | str,
    *,
    split: Split = "train",
    cap_bytes: int = DEFAULT_CAP_BYTES,
    root: str | Path | None = None,
) -> Iterator[DataPath]:
    """Open the active data path for a trainer: `with open_loader(...) as path: for batch in path.epoch(): ...`.

    Args:
        workload: The training job.
        device: Where batches go.
        split: `train` or `eval`; each has its own pool.
        cap_bytes: Most bytes of the path's pool; without meaning for `legacy`.
        root: The project's root; None finds it upward by its marker.

    Raises:
        CapacityError: The cap is below one batch or above what the machine has.
    """
    name = active_path(root)
    if os.environ.get(KILL_SWITCH):
        print(f"dualtrack: {KILL_SWITCH}=legacy, the old loader is active", file=sys.stderr)  # noqa: T201 (an operator must see it)
    with open_data_path(name, workload, torch.device(device), split=split, cap_bytes=cap_bytes) as path:
        yield path
