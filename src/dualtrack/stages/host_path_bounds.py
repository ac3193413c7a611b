"""What bounds the host path: the link to the device, and how fast processes copy into shared memory at once.

`transfer_bandwidth` also shows why memory is page-locked at all: the same copy from pageable, pinned and pooled memory, by size.
"""

import itertools
import math
import time
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from dualtrack.facts.observations import Fact
from dualtrack.loading.batch_layout import aligned
from dualtrack.loading.page_locking import CudaPageLock
from dualtrack.loading.pinned_pool import PinnedPool, PoolSettings
from dualtrack.loading.pooled_loader import HELD_SLOTS
from dualtrack.loading.shared_slab import SharedBytes, prefault

DEADLINE_SECONDS = 120.0
PREFETCH_FACTOR = 2  # torch's default, for every track alike
LABEL_BYTES = 8


class HostPathCase(Fact):
    """Images of one kind through one number of workers."""

    batch_size: int
    image_shape: tuple[int, int, int] = (3, 224, 224)
    dtype: Literal["uint8", "float32"] = "uint8"
    num_workers: int = 2
    num_sources: int = 64
    """Distinct images in memory; few stay in the processor's caches, many do not."""
    seconds: float = 3.0
    """Length of the measured window, after a warm-up."""

    @property
    def batch_bytes(self) -> int:
        """Bytes of one batch of images."""
        return self.batch_size * math.prod(self.image_shape) * (1 if self.dtype == "uint8" else 4)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: images and labels, each aligned."""
        return aligned(self.batch_bytes) + aligned(self.batch_size * LABEL_BYTES)


class SourceImages(Dataset[tuple[torch.Tensor, int]]):
    """An endless supply of ready images, so that only their transport costs time."""

    def __init__(self, case: HostPathCase) -> None:
        """Make the images of `case`."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (case.num_sources, *case.image_shape), dtype=torch.uint8, generator=generator)
        self.images = images if case.dtype == "uint8" else images.float()
        self.num_samples = case.batch_size * 1_000_000

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % len(self.images)], index


def measure_host_copies(case_fields: dict[str, Any]) -> float:
    """Return the bytes a second that as many processes as the case has workers copy into one slab, each into slots of its own."""
    case = HostPathCase(**case_fields)
    context = torch.multiprocessing.get_context("fork")
    slots_per_worker = PREFETCH_FACTOR + HELD_SLOTS
    slab = SharedBytes(-(-case.num_workers * slots_per_worker * case.slot_bytes // 4096) * 4096, "benchmark")
    sources = SourceImages(case)
    barrier, results = context.Barrier(case.num_workers), context.SimpleQueue()
    arguments = [
        (slab, worker * slots_per_worker, sources, case, barrier, results) for worker in range(case.num_workers)
    ]
    workers = [context.Process(target=_copy_for_a_while, args=argument, daemon=True) for argument in arguments]
    for worker in workers:
        worker.start()
    rate = sum(results.get() for _ in workers)
    for worker in workers:
        worker.join(DEADLINE_SECONDS)
    slab.close()
    return float(rate)


def _copy_for_a_while(
    slab: SharedBytes, first_slot: int, sources: SourceImages, case: HostPathCase, barrier: Any, results: Any
) -> None:
    torch.set_num_threads(1)
    shape = (case.batch_size, *case.image_shape)
    slots = []
    for slot in range(first_slot, first_slot + PREFETCH_FACTOR + HELD_SLOTS):
        buffer = torch.frombuffer(slab.map, dtype=torch.uint8, offset=slot * case.slot_bytes, count=case.batch_bytes)
        prefault(buffer.data_ptr(), buffer.numel())
        slots.append(buffer.view(sources.images.dtype).view(shape))
    samples = [sources[index][0] for index in range(case.batch_size)]
    barrier.wait(DEADLINE_SECONDS)
    started, num_bytes = time.perf_counter(), 0
    for slot_view in itertools.cycle(slots):
        torch.stack(samples, 0, out=slot_view)
        num_bytes += case.batch_bytes
        if time.perf_counter() - started > case.seconds:
            break
    results.put(num_bytes / (time.perf_counter() - started))


def transfer_bandwidth(sizes_bytes: list[int], device: str = "cuda", num_repeats: int = 20) -> list[dict[str, Any]]:
    """Return, for each size, the host-to-device bytes a second from pageable, pinned and pooled memory.

    Without a GPU every figure is None and `reason` says why.
    """
    if not torch.cuda.is_available():
        empty = dict.fromkeys(("pageable", "pinned", "pooled"))
        return [{"size_bytes": size, **empty, "reason": "not measured: no CUDA device"} for size in sizes_bytes]
    return [_bandwidth_of(size, torch.device(device), num_repeats) for size in sizes_bytes]


def _bandwidth_of(size_bytes: int, device: torch.device, num_repeats: int) -> dict[str, Any]:
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    settings = PoolSettings(name="bandwidth", page_lock=CudaPageLock(device))
    with PinnedPool(aligned(size_bytes) + 4096, size_bytes, num_slots=1, settings=settings) as pool:
        lease = pool.acquire(size_bytes)
        sources = {
            "pageable": torch.zeros(size_bytes, dtype=torch.uint8),
            "pinned": torch.zeros(size_bytes, dtype=torch.uint8).pin_memory(),
            "pooled": lease.tensor(size_bytes),
        }
        rates = {kind: _copy_rate(source, target, num_repeats) for kind, source in sources.items()}
        lease.release()
    return {"size_bytes": size_bytes, **rates, "reason": None}


def _copy_rate(source: torch.Tensor, target: torch.Tensor, num_repeats: int) -> float:
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(target.device)
    started = time.perf_counter()
    for _ in range(num_repeats):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(target.device)
    return num_repeats * source.numel() / (time.perf_counter() - started)


def measure_pcie(num_bytes: int, device: str) -> float:
    """Return the bytes a second of copies of one batch's size from torch's own pinned memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
    return _copy_rate(source, torch.empty(num_bytes, dtype=torch.uint8, device=device), 100)
