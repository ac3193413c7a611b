"""Host and device memory as the kernel and torch count it."""

import contextlib
from typing import Any

import psutil
import torch

from dualtrack.facts.records import Measured

NO_CUDA = "no CUDA device"


def pss_bytes(include_children: bool = True) -> int:
    """Return the proportional set size of this process and its descendants, in bytes.

    PSS divides a shared page among its users, so a pool that trainer and workers share counts once. Source: `smaps_rollup`, proc(5).
    """
    root = psutil.Process()
    total = 0
    for process in [root, *(root.children(recursive=True) if include_children else [])]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
            total += int(process.memory_full_info().pss)
    return total


def torch_pinned_peak_bytes() -> Measured:
    """Return the peak of page-locked bytes owned by torch's own allocator, rounded up to powers of two as it does.

    Source: `torch.cuda.host_memory_stats()`; memory registered by hand is not in it.
    """
    if not torch.cuda.is_available():
        return Measured(value=None, unit="bytes", reason=NO_CUDA)
    stats: dict[str, Any] = torch.cuda.host_memory_stats()
    for key in ("allocated_bytes.peak", "reserved_bytes.peak"):
        if key in stats:
            return Measured(value=float(stats[key]), unit="bytes")
    return Measured(value=None, unit="bytes", reason="this torch has no peak in host_memory_stats()")


def device_peak_bytes(device: torch.device) -> Measured:
    """Return the peak of device memory allocated by torch."""
    if device.type != "cuda":
        return Measured(value=None, unit="bytes", reason=NO_CUDA)
    return Measured(value=float(torch.cuda.max_memory_allocated(device)), unit="bytes")
