"""Page-locking of memory that we own, behind two methods, so that every failure of it can be staged without a GPU.

Only the trainer registers, never a worker: a forked child must not touch CUDA. Memory is unregistered before it is unmapped; a mapping
freed while registered made an unrelated later copy fail with "resource already mapped" (seen on an H200, torch 2.11).
"""

import ctypes
from pathlib import Path
from typing import Protocol

import torch

from dualtrack.facts.errors import PoolError

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device, not for the current one alone


class CopyEvent(Protocol):
    """The part of `torch.cuda.Event` that the pool needs."""

    def query(self) -> bool:
        """Say whether the copy before the event has completed."""

    def synchronize(self) -> None:
        """Wait until it has."""


class PageLock(Protocol):
    """Registers address ranges with a driver."""

    bound_by_memlock: bool
    """True when `ulimit -l` limits it. It does not limit `cudaHostRegister`, whose driver pins on its own account."""

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock a range.

        Raises:
            PoolError: The driver refused; nothing is locked and no error is left behind in the driver.
        """

    def unregister(self, address: int) -> None:
        """Give a range back."""


class CudaPageLock:
    """`cudaHostRegister` in the context of one device."""

    bound_by_memlock = False

    def __init__(self, device: torch.device) -> None:
        """Use `device`; without an index, the current one at registration."""
        self._device = device

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock a range; see `PageLock`."""
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, PORTABLE))  # type: ignore[no-untyped-call]
        if code != 0:
            drained = drain_cuda_error()
            raise PoolError(
                f"expected cudaHostRegister to page-lock {num_bytes:,} bytes, got cudaError {code} (drained from the driver: {drained}); "
                "lower cap_bytes, or pass on_lock_failure='pageable' to go on without page-locking"
            )

    def unregister(self, address: int) -> None:
        """Give a range back; see `PageLock`."""
        code = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
        if code != 0:
            drain_cuda_error()
            raise PoolError(
                f"expected cudaHostUnregister to release the slab, got cudaError {code}; was the CUDA context reset before close()?"
            )


def drain_cuda_error() -> bool:
    """Clear the error that a failed runtime call leaves behind, so that the next kernel is not blamed for it; say whether one was found.

    torch binds no `cudaGetLastError`, and every loaded copy of the runtime keeps its own error, so each is asked.
    """
    found = False
    for path in sorted(
        {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    ):
        found |= ctypes.CDLL(path).cudaGetLastError() != 0
    return found
