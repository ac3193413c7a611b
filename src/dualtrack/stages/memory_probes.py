"""What stage 1 tries out in fresh processes besides timing: a full pool, two pools at once, a cap that is too small, a process group."""

import tempfile
import time
from itertools import zip_longest
from pathlib import Path

import torch

from dualtrack.facts.errors import CapacityError, StageRefused
from dualtrack.facts.observations import Fact
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.stages.stage_run import refuse_distributed
from dualtrack.training.data_paths import open_data_path, poolable_loader
from dualtrack.training.frozen_batches import digest_leaves
from dualtrack.training.loop import choose_device
from dualtrack.training.workload import Split, load_workload, seed_everything


class PoolProbe(Fact):
    """One pool under a sleeping consumer."""

    cap_bytes: int
    pool_bytes_over_time: tuple[tuple[float, int], ...]
    """Seconds since the first batch, bytes of slots in use."""
    pool_peak_bytes: int
    producer_wait_seconds: float
    batch_digests: tuple[str, ...]


def probe_full_pool(
    workload: str, device: str, seed: int, cap_bytes: int, slot_bytes: int, sleep_seconds: float
) -> PoolProbe:
    """Let the workers run against a consumer that sleeps: the pool must fill, and then the producer must wait."""
    where, job = choose_device(device), load_workload(workload)
    seed_everything(seed)
    with PooledLoader(
        poolable_loader(job, job.legacy_loader("train")), device=where, cap_bytes=cap_bytes, slot_bytes=slot_bytes
    ) as loader:
        return _drain(loader, cap_bytes, sleep_seconds)


def probe_isolated_pools(
    workload: str, device: str, seed: int, cap_bytes: int, eval_cap_bytes: int, slot_bytes: int
) -> dict[str, PoolProbe]:
    """Read training and evaluation at once, each from its own pool, batch by batch in turn."""
    where, job = choose_device(device), load_workload(workload)
    seed_everything(seed)
    with (
        PooledLoader(
            poolable_loader(job, job.legacy_loader("train")),
            device=where,
            cap_bytes=cap_bytes,
            slot_bytes=slot_bytes,
            name="train",
        ) as train,
        PooledLoader(
            poolable_loader(job, job.legacy_loader("eval")),
            device=where,
            cap_bytes=eval_cap_bytes,
            slot_bytes=slot_bytes,
            name="eval",
        ) as evaluation,
    ):
        digests: dict[str, list[str]] = {"train": [], "eval": []}
        samples: dict[str, list[tuple[float, int]]] = {"train": [], "eval": []}
        started = time.perf_counter()
        for train_batch, eval_batch in zip_longest(train, evaluation):
            for name, loader, batch in (("train", train, train_batch), ("eval", evaluation, eval_batch)):
                if batch is not None:
                    digests[name].append(digest_leaves(batch))
                samples[name].append((time.perf_counter() - started, loader.stats().slots_in_use_bytes))
        pairs = (("train", train, cap_bytes), ("eval", evaluation, eval_cap_bytes))
        return {name: _probe(loader, cap, samples[name], digests[name]) for name, loader, cap in pairs}


def digest_split(workload: str, split: Split, device: str, seed: int) -> tuple[str, ...]:
    """Return one digest a batch of the legacy path over one epoch of `split`."""
    seed_everything(seed)
    with open_data_path("legacy", load_workload(workload), choose_device(device), split=split) as path:
        return tuple(digest_leaves(batch) for batch in path.epoch())


def probe_small_cap(workload: str, device: str, cap_bytes: int, slot_bytes: int) -> str:
    """Return the refusal that a cap below one batch meets, or an empty string when nothing refused it."""
    job = load_workload(workload)
    try:
        with PooledLoader(
            poolable_loader(job, job.legacy_loader("train")),
            device=choose_device(device),
            cap_bytes=cap_bytes,
            slot_bytes=slot_bytes,
        ) as loader:
            next(iter(loader))
    except CapacityError as error:
        return str(error)
    return ""


def probe_process_group() -> str:
    """Initialise a process group of one rank and return stage 1's refusal, or an empty string when it did not refuse."""
    with tempfile.TemporaryDirectory() as scratch:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{Path(scratch) / 'store'}", rank=0, world_size=1
        )
        try:
            refuse_distributed("1_pinned_pool")
        except StageRefused as error:
            return str(error)
        finally:
            torch.distributed.destroy_process_group()
    return ""


def _drain(loader: PooledLoader, cap_bytes: int, sleep_seconds: float) -> PoolProbe:
    digests: list[str] = []
    samples: list[tuple[float, int]] = []
    started = time.perf_counter()
    for batch in loader:
        time.sleep(sleep_seconds)
        samples.append((time.perf_counter() - started, loader.stats().slots_in_use_bytes))
        digests.append(digest_leaves(batch))
    return _probe(loader, cap_bytes, samples, digests)


def _probe(loader: PooledLoader, cap_bytes: int, samples: list[tuple[float, int]], digests: list[str]) -> PoolProbe:
    stats = loader.stats()
    return PoolProbe(
        cap_bytes=cap_bytes, pool_bytes_over_time=tuple(samples), pool_peak_bytes=stats.pool_peak_bytes,
        producer_wait_seconds=stats.producer_wait_seconds, batch_digests=tuple(digests),
    )  # fmt: skip
