"""How fast batches come through the host: the default loader, the pinned loader and the pool, data-bound, in fresh alternating processes.

Data-bound means that the consumer does nothing with a batch, so the loader alone sets the rate. On a GPU each rate stands beside its
bound: the smaller of the PCIe bandwidth from page-locked memory and the rate at which as many processes copy into such a slab at once.

    python -m dualtrack.stages.host_path_benchmark --device cpu --json OUT
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
import torch
from torch.utils.data import DataLoader

from dualtrack.facts.observations import Fact
from dualtrack.loading.pooled_loader import HELD_SLOTS, PooledLoader
from dualtrack.measuring.trials import run_or_raise
from dualtrack.stages.host_path_bounds import (
    DEADLINE_SECONDS,
    PREFETCH_FACTOR,
    HostPathCase,
    SourceImages,
    transfer_bandwidth,
)
from dualtrack.training.workload import load_workload, seed_everything

__all__ = ["compare_host_paths", "compare_small_epochs", "main", "transfer_bandwidth"]

HERE = "dualtrack.stages.host_path_benchmark"
BOUNDS = "dualtrack.stages.host_path_bounds"
WARMUP_SECONDS = 1.0

Track = Literal["legacy", "pinned", "pooled"]


class HostPathRate(Fact):
    """One track of one case in one fresh process."""

    track: Track
    case: HostPathCase
    samples_per_second: float
    bytes_per_second: float
    num_batches: int
    loader_stats: dict[str, Any] = {}


class HostPathComparison(Fact):
    """Candidate against the legacy or pinned loader: medians over alternating fresh processes."""

    case: HostPathCase
    against: Track
    rates: tuple[HostPathRate, ...]
    median_bytes_per_second: dict[str, float]
    ratio: float
    """Median of the pool over median of `against`."""
    bound_bytes_per_second: dict[str, float] = {}
    """`pcie` and `host_copies` where there is a GPU."""
    share_of_bound: float | None = None


def measure_track(track: Track, device: str, case_fields: dict[str, Any]) -> dict[str, Any]:
    """Measure one track in this process: batches that arrive on `device` in a window, by the wall clock.

    Returns:
        The fields of a `HostPathRate`; plain, since they cross between processes.
    """
    where, case = torch.device(device), HostPathCase(**case_fields)
    legacy = DataLoader(
        SourceImages(case),
        batch_size=case.batch_size,
        num_workers=case.num_workers,
        prefetch_factor=PREFETCH_FACTOR,
        pin_memory=track == "pinned",
    )
    if track == "pooled":
        cap_bytes = case.num_workers * (PREFETCH_FACTOR + HELD_SLOTS) * case.slot_bytes + 4096
        with PooledLoader(legacy, where, cap_bytes, slot_bytes=case.slot_bytes) as loader:
            num_batches, seconds = _count_batches(iter(loader), lambda batch: batch, where, case.seconds)
            stats = loader.stats().model_dump(mode="json", exclude={"queue_depth", "slots_in_use"})
    else:
        num_batches, seconds = _count_batches(
            iter(legacy),
            lambda batch: [leaf.to(where, non_blocking=track == "pinned") for leaf in batch],
            where,
            case.seconds,
        )
        stats = {}
    return {
        "track": track, "case": case_fields, "num_batches": num_batches, "loader_stats": stats,
        "samples_per_second": num_batches * case.batch_size / seconds, "bytes_per_second": num_batches * case.batch_bytes / seconds,
    }  # fmt: skip


def _count_batches(
    batches: Any, deliver: Callable[[Any], Any], device: torch.device, seconds: float
) -> tuple[int, float]:
    """Count what arrives in a window that starts after a warm-up, with the device's queue empty at both ends."""
    _deliver_for(batches, deliver, device, WARMUP_SECONDS)
    return _deliver_for(batches, deliver, device, seconds)


def _deliver_for(
    batches: Any, deliver: Callable[[Any], Any], device: torch.device, seconds: float
) -> tuple[int, float]:
    started, num_batches = time.perf_counter(), 0
    while time.perf_counter() - started < seconds or num_batches < 2:
        deliver(next(batches))
        num_batches += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return num_batches, time.perf_counter() - started


def compare_host_paths(case: HostPathCase, device: str, against: Track, num_repeats: int) -> HostPathComparison:
    """Run `against` and the pool alternately, each time in a fresh process, and set the medians side by side."""
    rates: list[HostPathRate] = []
    for repeat in range(num_repeats):
        tracks: list[Track] = [against, "pooled"] if repeat % 2 == 0 else ["pooled", against]
        for track in tracks:
            arguments = {"track": track, "device": device, "case_fields": case.model_dump()}
            rates.append(HostPathRate(**run_or_raise(f"{HERE}:measure_track", arguments, DEADLINE_SECONDS)))
    medians: dict[str, float] = {}
    for track in (against, "pooled"):
        medians[track] = statistics.median(rate.bytes_per_second for rate in rates if rate.track == track)
    bounds: dict[str, float] = {}
    if device.startswith("cuda"):
        pcie_arguments: dict[str, Any] = {"num_bytes": case.slot_bytes, "device": device}
        bounds["pcie"] = run_or_raise(f"{BOUNDS}:measure_pcie", pcie_arguments, DEADLINE_SECONDS)
        bounds["host_copies"] = run_or_raise(
            f"{BOUNDS}:measure_host_copies", {"case_fields": case.model_dump()}, DEADLINE_SECONDS
        )
    return HostPathComparison(
        case=case, against=against, rates=tuple(rates), median_bytes_per_second=medians, ratio=medians["pooled"] / medians[against],
        bound_bytes_per_second=bounds, share_of_bound=medians["pooled"] / min(bounds.values()) if bounds else None,
    )  # fmt: skip


def measure_small_epochs(track: Track, workload: str, num_epochs: int) -> float:
    """Return the seconds of one epoch (median) of a bundled workload's own loader on the CPU, worker start included."""
    seed_everything(0)
    legacy: Any = load_workload(workload).legacy_loader("train")
    loader: Any = PooledLoader(legacy, "cpu", 1 << 22) if track == "pooled" else legacy
    seconds = []
    for _ in range(num_epochs):
        started = time.perf_counter()
        for _ in loader:
            pass
        seconds.append(time.perf_counter() - started)
    if track == "pooled":
        loader.close()
    return statistics.median(seconds)


def compare_small_epochs(workload: str, num_repeats: int, num_epochs: int = 20) -> dict[str, Any]:
    """Return the median epoch seconds of legacy and pool over alternating fresh processes, and their ratio."""
    seconds: dict[str, list[float]] = {"legacy": [], "pooled": []}
    for repeat in range(num_repeats):
        for track in ("legacy", "pooled") if repeat % 2 == 0 else ("pooled", "legacy"):
            arguments = {"track": track, "workload": workload, "num_epochs": num_epochs}
            seconds[track].append(run_or_raise(f"{HERE}:measure_small_epochs", arguments, DEADLINE_SECONDS))
    medians = {track: statistics.median(values) for track, values in seconds.items()}
    return {
        "workload": workload,
        "epoch_seconds": seconds,
        "median_seconds": medians,
        "pooled_over_legacy": medians["pooled"] / medians["legacy"],
    }


CPU_CASES = (HostPathCase(batch_size=64, num_sources=64), HostPathCase(batch_size=64, num_sources=3000))
GPU_CASES = tuple(
    HostPathCase(batch_size=256, dtype=dtype, num_workers=num_workers, num_sources=512, seconds=2.0)
    for dtype in ("uint8", "float32")
    for num_workers in (8, 14)
)
BANDWIDTH_SIZES_BYTES = [1 << power for power in range(18, 29, 2)]


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where the records go.")
@click.option(
    "--repeats", "num_repeats", type=int, help="Pairs of fresh processes for each case; 5 on a CPU, 2 on a GPU."
)
def main(device: str, json_path: Path | None, num_repeats: int | None) -> None:
    """Measure the host path and print one line a case."""
    on_gpu = device.startswith("cuda")
    records: dict[str, Any] = {"device": device, "comparisons": []}
    for case in GPU_CASES if on_gpu else CPU_CASES:
        found = compare_host_paths(case, device, "pinned" if on_gpu else "legacy", num_repeats or (2 if on_gpu else 5))
        records["comparisons"].append(found.model_dump(mode="json"))
        gigabytes = {
            name: round(rate / 1e9, 2)
            for name, rate in {**found.median_bytes_per_second, **found.bound_bytes_per_second}.items()
        }
        share = "" if found.share_of_bound is None else f", {found.share_of_bound:.0%} of the bound"
        click.echo(
            f"{case.dtype}, {case.num_workers} workers, {case.num_sources} sources: {gigabytes} GB/s, ratio {found.ratio:.1f}{share}"
        )
    if on_gpu:
        records["bandwidth"] = run_or_raise(
            f"{BOUNDS}:transfer_bandwidth", {"sizes_bytes": BANDWIDTH_SIZES_BYTES, "device": device}, DEADLINE_SECONDS
        )
    else:
        records["small_epochs"] = compare_small_epochs("digits", num_repeats or 5)
        click.echo(
            f"digits: {records['small_epochs']['median_seconds']} s an epoch, pool over legacy {records['small_epochs']['pooled_over_legacy']:.2f}"
        )
    if json_path is not None:
        json_path.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
