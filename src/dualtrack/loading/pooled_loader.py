"""Stage 1's drop-in: a `DataLoader` whose batches come through a bounded, page-locked pool, in one packed copy.

What is preserved of the wrapped loader, bit for bit and in order:

| configuration | how |
|---|---|
| map-style, iterable, `batch_size=None`, custom sampler or batch sampler | the loader's own code runs |
| `shuffle`, `generator`, seeds of workers, draws from the global generators | the loader's own code runs, at the same moments |
| 0 to n workers; fork, forkserver, spawn; `worker_init_fn`; `get_worker_info().dataset` | the same worker loop and the user's own objects |
| `persistent_workers`, several epochs, early `break` | an abandoned epoch's batches are dropped as legacy drops them, their slots reclaimed |
| default collate, also with user types in `default_collate_fn_map` | same function, its stacks lie in the slot |
| custom `collate_fn` | runs unchanged, its tensors are copied into the slot by the worker |
| `drop_last`, `len`, `timeout`, `prefetch_factor` | the loader's own |
| error in dataset or collate | same exception at the same batch; the iteration may go on behind it, as in legacy |
| containers, dtypes, dense strides, `requires_grad` leaves | rebuilt by the layout; a sliced or expanded tensor becomes dense, as `.to(device)` makes it |
| sparse, nested, quantised, CUDA tensors; tensor subclasses; unknown objects | pass through unchanged and are listed in `stats().passed_through` |
| `pin_memory=True` | replaced by the pool |
| `in_order=False`, a subclass with its own `__iter__` | refused with the reason |
| two iterators at once | the newer one ends the older, whose next use is an error |

What it costs where there is nothing to win: without workers, on a CPU device, about 60 microseconds a batch (measured on two shared cores:
13 against 70 for batches of eight small samples).
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

import torch
from torch.utils.data import DataLoader

from dualtrack.facts.errors import CapacityError, PoolError
from dualtrack.loading.batch_layout import ALIGN_BYTES, aligned, map_leaves, why_not_staged
from dualtrack.loading.batch_source import BatchSource, refuse_unpreservable
from dualtrack.loading.host_batch import HostBatch
from dualtrack.loading.loader_stats import LoaderCounts, LoaderStats, torch_pinned_peak_bytes
from dualtrack.loading.page_locking import CudaPageLock, PageLock
from dualtrack.loading.pinned_budget import PinnedBudget
from dualtrack.loading.pinned_pool import PinnedPool
from dualtrack.loading.pinned_slab import PoolSettings
from dualtrack.loading.slot_collate import CollatedBatch, SlotCollate
from dualtrack.loading.slot_states import SlotState

DEFAULT_CAP_BYTES = 2 * 2**30
HELD_SLOTS = 2  # a loop holds the batch of this step while it asks for the next


class LoaderOptions(TypedDict, total=False):
    """Keyword arguments of `PooledLoader`; `LoaderSettings` and `PoolSettings` say what each means."""

    slot_bytes: int | None
    over_size: Literal["pageable", "error"]
    name: str
    wait_seconds: float
    budget: PinnedBudget | None
    page_lock: PageLock | Literal["auto"] | None
    on_lock_failure: Literal["error", "pageable"]


@dataclass(frozen=True, kw_only=True)
class LoaderSettings(PoolSettings):
    """How a pooled loader behaves, beside its pool."""

    slot_bytes: int | None = None
    """Bytes of the largest batch, from stage 0's record; None divides the cap by the slots that workers and consumer can use."""
    over_size: Literal["pageable", "error"] = "pageable"
    """A batch over its slot takes the counted pageable path, or is an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over_size not in ("pageable", "error"):
            raise ValueError(f"expected over_size 'pageable' or 'error', got {self.over_size!r}")


class PooledLoader:
    """An existing `DataLoader` through a bounded pool. Attributes that it does not have itself are the wrapped loader's.

    Attributes:
        loader: The wrapped loader, untouched.
        device: Where iterating delivers batches.
        pool: The pool, open until `close()`.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        device: torch.device | str = "cuda",
        cap_bytes: int = DEFAULT_CAP_BYTES,
        **options: Unpack[LoaderOptions],
    ) -> None:
        """Open the pool; workers start when an iteration starts.

        Args:
            loader: The legacy loader; its behaviour is preserved, see the table of this module.
            device: `cuda`, `cuda:1`, or `cpu` for views into the pool without any copy.
            cap_bytes: The most host memory that the pool may ever own.
            options: See `LoaderOptions`.

        Raises:
            LoaderError: The loader can't be preserved.
            CapacityError: The cap is below one batch per worker, or above what the budget or the machine can give.
            PoolError: The driver refused to page-lock and `on_lock_failure` is `error`.
            ValueError: The device is not there.
        """
        refuse_unpreservable(loader)
        self.loader = loader
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"expected a CUDA device for device={str(device)!r}, torch sees none; pass device='cpu'")
        if options.get("page_lock", "auto") == "auto":
            options["page_lock"] = CudaPageLock(self.device) if self.device.type == "cuda" else None
        self._settings = LoaderSettings(**options)  # type: ignore[arg-type] # "auto" is resolved above
        self.pool = self._open_pool(cap_bytes)
        self._source = BatchSource(
            loader, self.pool, SlotCollate(self.pool, loader.collate_fn, self._settings.over_size)
        )
        self._counts = LoaderCounts()
        self._num_iterations = 0
        self._stop_workers = weakref.finalize(self, self._source.stop)

    def _open_pool(self, cap_bytes: int) -> PinnedPool:
        num_producers = max(1, self.loader.num_workers)
        num_slots = num_producers * ((self.loader.prefetch_factor or 1) + HELD_SLOTS)
        slot_bytes = self._settings.slot_bytes or cap_bytes // num_slots // ALIGN_BYTES * ALIGN_BYTES or ALIGN_BYTES
        return PinnedPool(
            cap_bytes, slot_bytes, num_slots=num_slots, num_producers=num_producers, settings=self._settings
        )

    def host_batches(self) -> "HostBatches":
        """Start an epoch and return its leased batches; the draws of `iter(loader)` happen here, as in legacy.

        Raises:
            PoolError: The loader is closed.
        """
        self.pool.check_open()
        self._num_iterations += 1
        self._source.start()
        return HostBatches(self, self._num_iterations)

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch; batches arrive on `device`, ordered after the work queued on the consumer's current stream.

        On a CPU device a batch views its slot while spare slots are left, else it is copied out, so a kept batch never changes.
        """
        return map(self._deliver, self.host_batches())

    def _deliver(self, batch: HostBatch) -> Any:
        if batch.is_pageable or batch.packed is None:
            return map_leaves(self._to_device, batch.views())
        if self.device.type == "cuda":
            return self._copy_packed(batch, batch.packed)
        if batch.num_bytes == 0 or self._can_lend(batch):
            return batch.views()
        self._counts.num_copied_views += 1
        self._counts.note_allocation()
        copied = batch.unpack(batch.packed, own="all")
        batch.release()
        return copied

    def _to_device(self, leaf: Any) -> Any:
        """Copy just what the packed copy would have carried, so that where a leaf lives does not depend on the batch's size."""
        if why_not_staged(leaf) is not None:
            return leaf
        return leaf.detach().to(self.device).requires_grad_(leaf.requires_grad)

    def _copy_packed(self, batch: HostBatch, packed: torch.Tensor) -> Any:
        with torch.cuda.device(self.device):
            on_device = torch.empty(batch.num_bytes, dtype=torch.uint8, device=self.device)
            on_device.copy_(packed, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        batch.release_after(copied)
        return batch.unpack(on_device, own="small")

    def _can_lend(self, batch: HostBatch) -> bool:
        """Say whether the producer of this batch keeps enough slots to go on while the consumer holds it."""
        slots = self.pool.slots_of(batch.slot // self.pool.slots_per_producer) if batch.slot is not None else range(0)
        num_lent = self.pool.states.count(SlotState.LEASED, slots)
        num_kept_back = min(self.loader.prefetch_factor or 1, max(1, len(slots) - HELD_SLOTS))
        return len(slots) - num_lent >= num_kept_back

    def receive(self, iteration: int, index: int) -> HostBatch:
        """Return the next batch of an iteration; `HostBatches` calls this.

        Raises:
            PoolError: A newer iteration has begun, or the loader is closed.
            CapacityError: The first batch shows that the cap or the slot is too small.
        """
        self.pool.check_open()
        if iteration != self._num_iterations:
            raise PoolError(
                "expected the newest iteration of this loader; a later iter() has ended this one: use one loader per concurrent loop"
            )
        self.pool.reap()
        self._counts.note_slots(self.pool.states.count(SlotState.READY), self.pool.num_slots_in_use)
        collated = self._source.next()
        self._count(collated)
        lease = None if collated.slot is None else self.pool.adopt(collated.slot)
        return HostBatch(index, collated, lease)

    def _count(self, collated: CollatedBatch) -> None:
        counts = self._counts
        counts.num_batches += 1
        is_over = collated.layout is None and collated.num_bytes > self.pool.slot_bytes
        if is_over and counts.num_batches == 1:
            self._refuse_small_cap(collated.num_bytes)
        counts.num_over_cap_batches += is_over
        counts.num_pageable_batches += collated.layout is None or (
            self._settings.page_lock is not None and not self.pool.slab.is_page_locked
        )
        if collated.layout is None:
            counts.note_allocation()
            return
        counts.note_passed_through(collated.layout.passed_through)
        if collated.slot is not None:
            counts.num_filled_slots += 1
            counts.filled_bytes += collated.num_bytes

    def _refuse_small_cap(self, batch_bytes: int) -> None:
        """Refuse at the first batch what would send every batch down the pageable path unasked."""
        smallest_bytes = self.pool.num_producers * aligned(batch_bytes)
        if self._settings.slot_bytes is None or batch_bytes > self.pool.cap_bytes:
            self.close()
            raise CapacityError(
                f"pool {self._settings.name!r}: one batch takes {batch_bytes:,} bytes, a slot has {self.pool.slot_bytes:,} and the cap is "
                f"{self.pool.cap_bytes:,}; the smallest cap that works is {smallest_bytes:,} with slot_bytes={aligned(batch_bytes)}"
            )

    def end(self, iteration: int) -> None:
        """End an iteration that its consumer left; persistent workers stay. `HostBatches` calls this."""
        if iteration == self._num_iterations and not self._source.keeps_workers:
            self._source.stop()

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def stats(self) -> LoaderStats:
        """Return what was seen so far."""
        pool, counts = self.pool, self._counts
        has_lock = self._settings.page_lock is not None
        return LoaderStats(
            cap_bytes=pool.cap_bytes,
            pool_current_bytes=pool.current_bytes,
            pool_peak_bytes=pool.peak_bytes,
            pinned_peak_bytes=pool.pinned_peak_bytes if has_lock else None,
            torch_pinned_peak_bytes=torch_pinned_peak_bytes(),
            is_page_locked=pool.pinned_bytes > 0,
            lock_failure=pool.slab.lock_failure,
            num_slots=pool.num_slots,
            slot_bytes=pool.slot_bytes,
            slab_overhead=1 - pool.num_slots * pool.slot_bytes / pool.slab_bytes,
            slots_in_use_bytes=pool.num_slots_in_use * pool.slot_bytes,
            slots_in_use_peak_bytes=counts.most_slots_in_use * pool.slot_bytes,
            producer_wait_seconds=pool.producer_wait_seconds,
            consumer_wait_seconds=self._source.consumer_wait_seconds,
            num_batches=counts.num_batches,
            num_over_cap_batches=counts.num_over_cap_batches,
            num_pageable_batches=counts.num_pageable_batches,
            num_copied_views=counts.num_copied_views,
            num_allocations_after_warmup=counts.num_allocations_after_warmup,
            slot_fill_ratio=counts.filled_bytes / (counts.num_filled_slots * pool.slot_bytes)
            if counts.num_filled_slots
            else None,
            passed_through=dict(counts.passed_through),
            queue_depth=counts.queue_depth.points(),
            slots_in_use=counts.slots_in_use.points(),
        )

    def close(self) -> None:
        """Stop the workers, wait for copies in flight and return the memory. Twice is fine; views that still live stay readable."""
        self.pool.begin_close()
        self._source.stop()
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HostBatches(Iterator[HostBatch]):
    """One epoch of leased batches. An error is raised at the batch where it belongs; the next call goes on behind it."""

    def __init__(self, loader: PooledLoader, iteration: int) -> None:
        """Belong to an iteration that was started."""
        self._loader = loader
        self._iteration = iteration
        self._index = -1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> HostBatch:
        self._index += 1
        return self._loader.receive(self._iteration, self._index)

    def __del__(self) -> None:
        self._loader.end(self._iteration)
