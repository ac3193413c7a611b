"""The data paths that the overlap benchmark times, each in a process of its own: plain arguments in, plain data out."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import torch

from dualtrack.loading.batch_layout import aligned
from dualtrack.loading.dual_track import DualTrackLoader
from dualtrack.loading.pooled_loader import HELD_SLOTS, PooledLoader
from dualtrack.loading.routing import TrafficRamp
from dualtrack.loading.shadow_settings import DualTrackSettings
from dualtrack.loading.stream_prefetcher import CUDADataPrefetcher
from dualtrack.training.loop import TrainingJob, choose_device
from dualtrack.training.workload import load_workload

CASES = {
    "resnet50_fp32": "dualtrack.workloads.images:create_full_resnet50_fp32",
    "resnet50_uint8": "dualtrack.workloads.images:create_full_resnet50_uint8",
    "vit_s_fp32": "dualtrack.workloads.images:create_full_vit_s_fp32",
    "vit_s_uint8": "dualtrack.workloads.images:create_full_vit_s_uint8",
    "small": "dualtrack.workloads.images:create",
}
SEED = 20260101


def measure_track(case: str, track: str, device: str, num_warmup_steps: int, num_steps: int) -> dict[str, Any]:
    """Train on one data path in this process and return the mean step of the window; plain data, since it crosses between processes."""
    where, workload = choose_device(device), load_workload(CASES[case])
    num_batches = num_warmup_steps + num_steps + 2
    settings: Any = getattr(workload, "settings")  # noqa: B009 (the images workload's own; the Workload protocol has none)
    # one epoch longer than the window: worker starts at epoch ends are the same for all tracks and not what is measured
    long: Any = dataclasses.replace(settings, num_train_samples=settings.batch_size * num_batches)
    workload = type(workload)(long)  # type: ignore[call-arg]
    job = TrainingJob(workload, where, SEED)
    with ExitStack() as stack:
        batches, stats = _open_track(track, workload, where, stack)
        for _ in range(num_warmup_steps):
            job.step(next(batches))
        _finish_device(where)
        started = time.perf_counter()
        for _ in range(num_steps):
            job.step(next(batches))
        _finish_device(where)
        seconds = (time.perf_counter() - started) / num_steps
        return {"seconds_per_step": seconds, "prefetcher": stats()}


def _finish_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _open_track(
    track: str, workload: Any, device: torch.device, stack: ExitStack
) -> tuple[Iterator[Any], Callable[[], dict[str, Any] | None]]:
    """Open a data path; what it owns is closed with `stack`. Returns its batches and a function for its figures."""
    legacy = workload.legacy_loader("train")

    def to_device(batch: Any) -> Any:
        return workload.to_device(batch, device)

    if track == "cached":
        batch = to_device(next(iter(legacy)))
        return iter(lambda: batch, None), _no_stats
    if track == "legacy":
        return map(to_device, legacy), _no_stats
    if track in ("pin_memory", "plain"):
        legacy.pin_memory = True
        if track == "plain":
            return PlainPrefetcher(legacy, device), _no_stats
        return ([leaf.to(device, non_blocking=True) for leaf in batch] for batch in legacy), _no_stats
    if track == "prefetched":
        prefetcher = stack.enter_context(
            CUDADataPrefetcher(stack.enter_context(_pool(legacy, workload, device)), device)
        )
        return iter(prefetcher), lambda: prefetcher.stats().model_dump(mode="json", exclude={"timeline"})
    is_retired = track == "retired"
    dual_settings = DualTrackSettings(
        ramp=TrafficRamp(shares=(1.0,) if is_retired else (0.0, 1.0)), loader_shadow=not is_retired, transfer_shadow=not is_retired
    )  # fmt: skip
    dual = stack.enter_context(
        DualTrackLoader(
            lambda: workload.legacy_loader("train"), lambda: _pool(legacy, workload, device), device, dual_settings, legacy_copy=to_device
        )
    )  # fmt: skip
    dual_batches = stack.enter_context(closing(iter(dual)))  # type: ignore[type-var] # a generator, which has close
    return dual_batches, lambda: dual.prefetch_stats().model_dump(mode="json", exclude={"timeline"})


def _no_stats() -> None:
    return None


def _pool(loader: Any, workload: Any, device: torch.device) -> PooledLoader:
    """Put a pool around the loader with as many slots as its workers and the consumer can use."""
    images, _ = loader.dataset[0]
    batch_size = workload.settings.batch_size
    slot_bytes = aligned(images.numel() * images.element_size() * batch_size) + aligned(
        batch_size * torch.int64.itemsize
    )
    num_slots = max(1, loader.num_workers) * ((loader.prefetch_factor or 1) + HELD_SLOTS)
    return PooledLoader(loader, device, num_slots * slot_bytes + 4096, slot_bytes=slot_bytes)


class PlainPrefetcher:
    """The migration document's own prefetcher: one batch ahead, allocated under the side stream, `record_stream` on each tensor."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        """Make the stream and preload the first batch."""
        self._iterator, self._device = iter(loader), device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._preload()

    def _preload(self) -> None:
        self._next = next(self._iterator, None)
        if self._next is not None:
            with torch.cuda.stream(self._stream):
                self._next = [leaf.to(self._device, non_blocking=True) for leaf in self._next]

    def __iter__(self) -> "PlainPrefetcher":
        return self

    def __next__(self) -> Any:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        batch = self._next
        if batch is None:
            raise StopIteration
        for leaf in batch:
            leaf.record_stream(torch.cuda.current_stream(self._device))
        self._preload()
        return batch
