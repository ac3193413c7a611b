"""The collate function that runs where batches are made: it fills a slot and sends a description in place of the batch.

It is the only part of the legacy `DataLoader` that is replaced. The default collate stacks straight into the slot; a custom one runs as it
is and its result is copied in. Nothing here draws a random number.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from dualtrack.facts.errors import CapacityError
from dualtrack.loading.batch_layout import (
    BatchPacker,
    PackedLayout,
    SlotOverflow,
    UnpackableBatch,
    contiguous_stride,
    packed_bytes,
    why_not_staged,
)
from dualtrack.loading.pinned_pool import PinnedPool
from dualtrack.loading.shared_slab import prefault
from dualtrack.loading.slot_states import SlotState, stop_when_abandoned

LARGE_STACK_BYTES = (
    1 << 17
)  # below, the second copy costs less than the look, and the allocator gives memory that is mapped already


class CollatedBatch(NamedTuple):
    """What crosses from producer to trainer."""

    slot: int | None
    """None for a batch without staged tensors, and on the pageable path."""
    layout: PackedLayout | None
    batch: Any
    """The ordinary batch on the pageable path."""
    num_bytes: int
    """Bytes that the batch takes, or on the pageable path would have taken, in a slot."""
    reason: str | None = None
    """Why the batch is on the pageable path."""


class SlotCollate:
    """Callable `samples -> CollatedBatch`, in a worker or, without workers, in the trainer."""

    def __init__(
        self, pool: PinnedPool, collate_fn: Callable[[Any], Any], over_size: Literal["pageable", "error"]
    ) -> None:
        """Remember what a producer needs; a spawned worker unpickles just this."""
        self.generation = 0
        self._collate_fn = collate_fn
        self._over_size = over_size
        self._states = pool.states
        self._shared = pool.slab.shared
        self._slot_bytes, self._slots_per_producer = pool.slot_bytes, pool.slots_per_producer
        self._name = pool.settings.name
        self._on_local_wait: Callable[[float], None] | None = pool.on_local_wait
        self._prefaulted: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_local_wait": None}  # the pool stays with the trainer

    def __call__(self, samples: Any) -> CollatedBatch:
        """Collate `samples` into a slot, or onto the counted pageable path."""
        if self._collate_fn is default_collate and default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
            return self._stack_into_slot(samples)
        return self._copy_into_slot(self._collate_fn(samples))

    def _stack_into_slot(self, samples: Any) -> CollatedBatch:
        slot = self._claim()
        try:
            packer = BatchPacker(self._buffer(slot))
            stacker = _Stacker(packer)
            layout = packer.pack(collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: stacker}))
        except (SlotOverflow, UnpackableBatch):
            self._states.move(slot, (SlotState.FILLING,), SlotState.FREE)
            return self._copy_into_slot(default_collate(samples))
        except BaseException:
            self._states.move(slot, (SlotState.FILLING,), SlotState.FREE)
            raise
        if layout.passed_through:  # an object of the user's, made from our stacks: it would go on viewing the slot
            self._states.move(slot, (SlotState.FILLING,), SlotState.FREE)
            return self._copy_into_slot(default_collate(samples))
        return self._filled(slot, layout)

    def _copy_into_slot(self, batch: Any) -> CollatedBatch:
        try:
            num_bytes = packed_bytes(batch)
        except RecursionError:
            return CollatedBatch(None, None, batch, 0, "a container holds itself")
        if num_bytes > self._slot_bytes:
            return self._over_slot(batch, num_bytes)
        slot = self._claim()
        try:
            layout = BatchPacker(self._buffer(slot)).pack(batch)
        except UnpackableBatch as error:
            self._states.move(slot, (SlotState.FILLING,), SlotState.FREE)
            return CollatedBatch(None, None, batch, num_bytes, str(error))
        except BaseException:
            self._states.move(slot, (SlotState.FILLING,), SlotState.FREE)
            raise
        return self._filled(slot, layout)

    def _filled(self, slot: int, layout: PackedLayout) -> CollatedBatch:
        is_used = layout.num_bytes > 0
        self._states.move(slot, (SlotState.FILLING,), SlotState.READY if is_used else SlotState.FREE)
        return CollatedBatch(slot if is_used else None, layout, None, layout.num_bytes)

    def _over_slot(self, batch: Any, num_bytes: int) -> CollatedBatch:
        reason = f"it takes {num_bytes:,} bytes, a slot has {self._slot_bytes:,}"
        if self._over_size == "error":
            raise CapacityError(
                f"pool {self._name!r}: {reason}; pass slot_bytes={num_bytes}, or over_size='pageable' to let such a batch by"
            )
        return CollatedBatch(None, None, batch, num_bytes, reason)

    def _claim(self) -> int:
        worker = get_worker_info()
        producer = 0 if worker is None else worker.id
        slots = range(producer * self._slots_per_producer, (producer + 1) * self._slots_per_producer)
        on_wait = self._on_local_wait if worker is None else stop_when_abandoned(self._states, self.generation)
        if on_wait is None:
            raise AssertionError("a collate that was pickled runs in a DataLoader worker only")
        return self._states.wait(lambda: self._states.claim(slots), producer, on_wait)

    def _buffer(self, slot: int) -> torch.Tensor:
        start = slot * self._slot_bytes
        buffer = torch.frombuffer(self._shared.map, dtype=torch.uint8, offset=start, count=self._slot_bytes)
        if slot not in self._prefaulted:
            self._prefaulted.add(slot)
            prefault(buffer.data_ptr(), self._slot_bytes)
        return buffer


class _Stacker:
    """Stands in for torch's `collate_tensor_fn`: the same stack with the same `out` rules, whose result lies in the slot."""

    def __init__(self, packer: BatchPacker) -> None:
        self._packer = packer
        self._in_worker = get_worker_info() is not None

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        first = batch[0]
        is_plain = why_not_staged(first) is None and not first.requires_grad
        if not is_plain or not (self._in_worker or self._may_stack_in_trainer(batch)):
            result: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
            return result
        shape = (len(batch), *first.shape)
        out = self._packer.place(first.dtype, shape, contiguous_stride(shape))
        return torch.stack(batch, 0, out=out)

    @staticmethod
    def _may_stack_in_trainer(batch: Any) -> bool:
        """Say whether an `out`, which legacy uses in workers only, changes nothing and is worth the look at every sample.

        Without `out` torch promotes mixed types, records for autograd and may follow the strides of its inputs.
        """
        first = batch[0]
        return first.nbytes * len(batch) >= LARGE_STACK_BYTES and all(
            type(item) is torch.Tensor and item.dtype is first.dtype and not item.requires_grad and item.is_contiguous()
            for item in batch
        )
