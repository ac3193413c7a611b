"""One batch in host memory, leased from a pool slot."""

from typing import Any, Literal

import torch

from dualtrack.facts.errors import PoolError
from dualtrack.loading.page_locking import CopyEvent
from dualtrack.loading.pinned_pool import Lease
from dualtrack.loading.slot_collate import CollatedBatch


class HostBatch:
    """A batch that is valid until it is released; when it and every view of it are gone, its slot returns by itself.

    Attributes:
        index: Position in the epoch, from 0.
        num_bytes: Used bytes of the packed buffer; 0 for a batch without staged tensors.
        packed: uint8 `[num_bytes]` view of the slot, page-locked when the pool is; None on the pageable path and after release.
        is_pageable: True when the batch did not fit or can't be packed; `views()` then is the ordinary batch.
        reason: Why it is pageable.
        slot: The leased slot; None on the pageable path and for a batch without staged tensors.
    """

    def __init__(self, index: int, collated: CollatedBatch, lease: Lease | None) -> None:
        """Join what came from the producer with the lease of its slot."""
        self.index = index
        self.is_pageable = collated.layout is None
        self.num_bytes = 0 if self.is_pageable else collated.num_bytes
        self.reason = collated.reason
        self.slot = collated.slot
        self._collated = collated
        self._lease = lease
        self.packed: torch.Tensor | None = None
        if lease is not None:
            self.packed = lease.tensor(self.num_bytes)
        elif not self.is_pageable:
            self.packed = torch.empty(0, dtype=torch.uint8)

    def views(self) -> Any:
        """Return the batch with CPU tensors that view the slot; structure and types are legacy's.

        Raises:
            PoolError: The batch was released.
        """
        if self._collated.layout is None:
            return self._collated.batch
        if self.packed is None:
            raise PoolError(
                f"batch {self.index}: expected a leased slot, it was released; take views before the release"
            )
        return self._collated.layout.unpack(self.packed)

    def unpack(self, packed_on_device: torch.Tensor, own: Literal["none", "small", "all"] = "none") -> Any:
        """Cut the same structure out of a copy of `packed`.

        The tensors alias `packed_on_device`; who owns that buffer and on which stream it becomes valid is the caller's affair. Leaves
        that pass through are the same objects at each call.

        Args:
            packed_on_device: uint8 `[num_bytes]` on any device.
            own: Which tensors are copied into a storage of their own, on the current stream; see `PackedLayout.unpack`.

        Raises:
            PoolError: The batch is on the pageable path and has no packed form.
        """
        if self._collated.layout is None:
            raise PoolError(f"batch {self.index} is pageable ({self.reason}): copy the tensors of views() one by one")
        return self._collated.layout.unpack(packed_on_device, own)

    @property
    def passed_through(self) -> dict[str, int]:
        """What was not staged: description -> how many."""
        return {} if self._collated.layout is None else self._collated.layout.passed_through

    def release_after(self, event: CopyEvent) -> None:
        """Give the slot back when `event`, recorded after the last copy out of `packed`, has completed."""
        self.packed = None
        if self._lease is not None:
            self._lease.release_after(event)

    def release(self) -> None:
        """Give the slot back now: no copy is in flight, no view will be read again. Twice is fine."""
        self.packed = None
        if self._lease is not None:
            self._lease.release()
