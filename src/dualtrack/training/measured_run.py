"""A timed training run on one data path, made for a fresh process: plain arguments in, plain data out."""

import contextlib
import math
import os
import statistics
import time
from collections.abc import Generator
from typing import Any

import torch
from pydantic import Field

from dualtrack.facts.errors import NonFiniteLoss
from dualtrack.facts.observations import Fact
from dualtrack.facts.records import Measured
from dualtrack.measuring import flops, memory
from dualtrack.training.data_paths import DEFAULT_CAP_BYTES, DataPath, open_data_path
from dualtrack.training.loop import TrainingJob, choose_device, precision_of
from dualtrack.training.workload import load_workload


class RunSpec(Fact):
    """What one timed run is asked for."""

    workload: str
    track: str
    """A path of `data_paths`: `legacy`, `pinned`, `pooled`, `prefetched` or `cached`."""
    device: str
    seed: int
    num_warmup_steps: int = Field(ge=0)
    num_steps: int = Field(ge=1)
    cap_bytes: int = DEFAULT_CAP_BYTES
    slot_bytes: int | None = None
    sample_memory: bool = False
    """Read memory after each step and count FLOPs at the end; such a run is never timed against another."""
    flops_per_step: float | None = None
    """From a run with `sample_memory`, so that a timed run can state its MFU."""


def measure_run(spec: RunSpec) -> dict[str, Any]:
    """Train `num_warmup_steps + num_steps` steps over as many epochs as that takes, and time the steady window.

    On CUDA a step's time is the distance of two events at the ends of steps, so that overlap is not disturbed; the window as a whole is
    synchronised at both edges. On CPU it is wall time.

    Returns:
        The fields of a `Trial` that a run knows: `batch_size`, `num_warmup_steps`, `num_steps`, `step_seconds`, `data_wait_seconds`,
        `samples_per_second`, `flops_per_step`, `mfu`, `peaks`, `memory`, `loader_stats`, `load_average`.

    Raises:
        NonFiniteLoss: The last loss of the window is NaN or infinite.
    """
    load_average = os.getloadavg()[0]
    device = choose_device(spec.device)
    workload = load_workload(spec.workload)
    job = TrainingJob(workload, device, spec.seed)
    with open_data_path(spec.track, workload, device, cap_bytes=spec.cap_bytes, slot_bytes=spec.slot_bytes) as path:
        window = _Window(device, spec.num_warmup_steps, path if spec.sample_memory else None)
        with contextlib.closing(_endless(path)) as batches:
            for step in range(spec.num_warmup_steps + spec.num_steps):
                window.begin(step)
                batch = next(batches)
                window.got_batch(batch)
                loss = job.step(batch)
                window.end(step)
        window.close()
        if not math.isfinite(float(loss)):
            raise NonFiniteLoss(
                f"step {step}: expected a finite loss, got {float(loss)}; lower the learning rate or look at the batch"
            )
        stats = path.stats()
        counted = _flops(spec, job, batch)
    step_seconds = window.step_seconds()
    result: dict[str, Any] = {
        "batch_size": max(window.batch_sizes), "num_warmup_steps": spec.num_warmup_steps, "num_steps": spec.num_steps,
        "step_seconds": step_seconds, "data_wait_seconds": window.data_wait_seconds[spec.num_warmup_steps :],
        "samples_per_second": sum(window.batch_sizes[spec.num_warmup_steps :]) / window.seconds,
        "peaks": _peaks(stats, device, window), "memory": window.memory_samples(), "loader_stats": stats, "load_average": load_average,
    }  # fmt: skip
    if counted is not None:
        utilisation = flops.model_flops_utilisation(
            counted, statistics.median(step_seconds), device, precision_of(workload)
        )
        result |= {"flops_per_step": counted.model_dump(), "mfu": utilisation.model_dump()}
    return result


def _endless(path: DataPath) -> Generator[Any, None, None]:
    while True:
        empty = True
        for batch in path.epoch():
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "expected at least one batch an epoch, the loader gave none; check the dataset and drop_last"
            )


def _flops(spec: RunSpec, job: TrainingJob, batch: Any) -> Measured | None:
    """Return FLOPs per step: known already, counted now (outside the timed window), or not asked for."""
    if spec.flops_per_step is not None:
        return Measured(value=spec.flops_per_step, unit="FLOP")
    return flops.count_step_flops(lambda: job.step(batch)) if spec.sample_memory else None


def _peaks(stats: dict[str, Any], device: torch.device, window: "_Window") -> dict[str, Any]:
    """Return the peaks of a run; what the path or the machine does not have carries its reason."""
    missing = "no CUDA device" if device.type != "cuda" else "this path has no pool of its own"
    torch_pinned = memory.torch_pinned_peak_bytes()
    pool = stats.get("pool_peak_bytes")
    pinned = stats.get("pinned_peak_bytes") if pool is not None else torch_pinned.value
    peaks = {
        "pinned_peak_bytes": Measured(value=pinned, unit="bytes", reason=missing if pinned is None else None),
        "pool_peak_bytes": Measured(value=pool, unit="bytes", reason="this path has no pool" if pool is None else None),
        "torch_pinned_peak_bytes": torch_pinned,
        "device_peak_bytes": memory.device_peak_bytes(device),
    }
    if window.pss_bytes:
        peaks["pss_peak_bytes"] = Measured(value=max(window.pss_bytes), unit="bytes")
    return {name: value.model_dump() for name, value in peaks.items()}


class _Window:
    """Clocks of one run: when each step ended, how long each batch was waited for, and memory where asked."""

    def __init__(self, device: torch.device, num_warmup_steps: int, sampled: DataPath | None) -> None:
        self.device, self.num_warmup_steps, self.sampled = device, num_warmup_steps, sampled
        self.batch_sizes: list[int] = []
        self.data_wait_seconds: list[float] = []
        self.pss_bytes: list[int] = []
        self.pool_bytes: list[int | None] = []
        self.device_bytes: list[int] = []
        self.sampled_at: list[float] = []
        self._ends: list[Any] = []
        self._first = self._asked = self._last = 0.0

    def begin(self, step: int) -> None:
        if step == self.num_warmup_steps:
            self._synchronise()
            self._first = time.perf_counter()
            self._ends.append(self._mark())
        self._asked = time.perf_counter()

    def got_batch(self, batch: Any) -> None:
        self.data_wait_seconds.append(time.perf_counter() - self._asked)
        leaves = [
            leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim > 0
        ]
        self.batch_sizes.append(leaves[0].shape[0] if leaves else 1)

    def end(self, step: int) -> None:
        if step >= self.num_warmup_steps:
            self._ends.append(self._mark())
        if self.sampled is not None:
            self.sampled_at.append(time.perf_counter())
            self.pss_bytes.append(memory.pss_bytes())
            self.pool_bytes.append(self.sampled.pool_bytes())
            if self.device.type == "cuda":
                self.device_bytes.append(torch.cuda.memory_allocated(self.device))

    def close(self) -> None:
        self._synchronise()
        self._last = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._last - self._first

    def step_seconds(self) -> list[float]:
        pairs = zip(self._ends, self._ends[1:], strict=False)
        if self.device.type == "cuda":
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]

    def memory_samples(self) -> dict[str, Any] | None:
        if not self.sampled_at:
            return None
        pool = None if any(value is None for value in self.pool_bytes) else self.pool_bytes
        seconds = [moment - self.sampled_at[0] for moment in self.sampled_at]
        return {
            "seconds": seconds,
            "pss_bytes": self.pss_bytes,
            "pool_bytes": pool,
            "device_bytes": self.device_bytes or None,
        }

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # on the consumer's current stream: the end of the step's kernels
        return event

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
