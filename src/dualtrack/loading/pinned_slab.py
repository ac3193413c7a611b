"""The pool's memory: one slab, reserved in the budget, allocated, page-locked, and given back in the opposite order."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from dualtrack.facts.errors import PoolError
from dualtrack.loading.page_locking import PageLock
from dualtrack.loading.pinned_budget import PinnedBudget, process_budget
from dualtrack.loading.shared_slab import SharedBytes


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """How a pool behaves; its sizes are arguments of its own."""

    name: str = "train"
    """Names the pool in messages and in the budget's list."""
    wait_seconds: float = 600.0
    """Deadline of every wait of the consumer. Ten minutes: legacy waits for ever, and a first batch may follow a long worker start."""
    budget: PinnedBudget | None = None
    """What the sum of pools stays under; None is the budget of the process, all that the machine can give."""
    page_lock: PageLock | None = None
    """Page-locks the slab; None leaves it pageable, as on a machine without CUDA."""
    on_lock_failure: Literal["error", "pageable"] = "error"
    """`pageable` goes on without page-locking when the driver refuses; every batch then counts as pageable."""

    def __post_init__(self) -> None:
        if self.wait_seconds <= 0:
            raise ValueError(
                f"expected wait_seconds above 0, got {self.wait_seconds}; a wait without a deadline is not offered"
            )
        if self.on_lock_failure not in ("error", "pageable"):
            raise ValueError(f"expected on_lock_failure 'error' or 'pageable', got {self.on_lock_failure!r}")


class PinnedSlab:
    """Bytes `[num_bytes]` shared with the workers, page-locked if the settings say so. Its pool frees it."""

    def __init__(self, num_bytes: int, settings: PoolSettings) -> None:
        """Reserve, allocate and page-lock.

        Raises:
            CapacityError: The budget or the machine can't give the bytes; nothing was allocated.
            PoolError: The driver refused to page-lock and `on_lock_failure` is `error`; everything was given back.
        """
        self.num_bytes = num_bytes
        self.lock_failure: str | None = None
        self.is_open = True
        self._page_lock: PageLock | None = None
        self._owner = os.getpid()
        self._budget = settings.budget or process_budget()
        bound_by_memlock = settings.page_lock is not None and settings.page_lock.bound_by_memlock
        self._key = self._budget.reserve(num_bytes, settings.name, bound_by_memlock)
        try:
            self.shared = SharedBytes(num_bytes, f"pool-{settings.name}")
            self.address = torch.frombuffer(self.shared.map, dtype=torch.uint8).data_ptr()
            if settings.page_lock is not None:
                self._register(settings.page_lock, settings.on_lock_failure)
        except BaseException:
            self.free()
            raise

    def _register(self, page_lock: PageLock, on_failure: str) -> None:
        try:
            page_lock.register(self.address, self.num_bytes)
            self._page_lock = page_lock
        except PoolError as error:
            if on_failure == "error":
                raise
            self.lock_failure = str(error)

    @property
    def is_page_locked(self) -> bool:
        """True while the pages are locked."""
        return self._page_lock is not None

    def cut(self, start: int, num_bytes: int) -> memoryview:
        """Return a fresh view of a part; `torch.frombuffer` keeps it alive until the last tensor over it is gone."""
        return memoryview(self.shared.map)[start : start + num_bytes]

    def free(self) -> None:
        """Unlock the pages, drop the mapping and return the bytes to the budget; no copy may be running. Twice is fine.

        An interrupt in the middle leaves the rest to the next call. A forked child's copy frees nothing, since the trainer still uses it.
        """
        if not self.is_open or os.getpid() != self._owner:
            return
        try:
            if self._page_lock is not None:
                self._page_lock.unregister(self.address)
        except PoolError:
            self._drop()
            raise
        self._drop()

    def _drop(self) -> None:
        self._page_lock = None
        if hasattr(self, "shared"):
            self.shared.close()
        self._budget.give_back(self._key)
        self.is_open = False
