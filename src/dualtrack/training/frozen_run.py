"""Runs on the frozen epoch, made for fresh processes: record it, train on it by any path, and compare with the baseline.

The frozen epoch is the legacy loader's first epoch after seeding; every path must deliver it again bit for bit.
"""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch.utils.data import DataLoader, IterableDataset

from dualtrack.facts.digests import sha256_bytes
from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import FrozenInputError
from dualtrack.facts.frozen_inputs import BATCHES_FILE, FrozenBatch, FrozenManifest
from dualtrack.facts.observations import Fact
from dualtrack.training.data_paths import DEFAULT_CAP_BYTES, open_data_path
from dualtrack.training.frozen_batches import decode_batch, digest_parameters, digest_tensor, encode_batch
from dualtrack.training.loop import TrainingJob, choose_device, deterministic_algorithms, run_equality_steps
from dualtrack.training.workload import load_workload, seed_everything


class FrozenEpoch(Fact):
    """What the legacy loader delivered in its first epoch after seeding."""

    batches: tuple[FrozenBatch, ...]
    loader: dict[str, Any]
    random_states: dict[str, str]


class EqualitySpec(Fact):
    """What one equality run is asked for."""

    workload: str
    path: str
    """A path of `data_paths`."""
    device: str
    seed: int
    num_steps: int
    cap_bytes: int = DEFAULT_CAP_BYTES
    slot_bytes: int | None = None


class EqualityTrace(Fact):
    """What one path delivered and what training on it gave."""

    path: str
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    initial_parameters_digest: str
    final_parameters_digest: str
    batches: tuple[FrozenBatch, ...] = ()
    loader_stats: dict[str, Any] = {}


class _RecordingSampler:
    """Passes a sampler's items on and keeps them; iterating draws exactly what the sampler itself draws."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.items = sampler, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        for item in self.sampler:
            self.items.append(item)
            yield item

    def __len__(self) -> int:
        return len(self.sampler)


def record_epoch(workload: str, seed: int, num_batches: int | None, folder: str | None) -> FrozenEpoch:
    """Iterate the legacy loader once and digest every batch; with `folder`, store the tensors there too.

    Args:
        workload: Reference of the workload.
        seed: Seeds the three global generators before the loader is built.
        num_batches: Keep only the first so many; None keeps the epoch.
        folder: Where `batches.safetensors` goes; None keeps digests only.

    Raises:
        FrozenInputError: A batch can't be frozen without loss, or the epoch is empty.
    """
    seed_everything(seed)
    loader = load_workload(workload).legacy_loader("train")
    facts, watched, sampler = _describe(loader)
    states = _random_states()
    frozen: list[FrozenBatch] = []
    stored: dict[str, torch.Tensor] = {}
    for place, batch in enumerate(watched):
        if place == num_batches:
            break
        structure, tensors = encode_batch(batch, f"batch_{place:04d}")
        ids = _sample_ids(sampler, place)
        frozen.append(_frozen_batch(structure, tensors, ids))
        if folder is not None:
            stored |= tensors
    if not frozen or not any(batch.tensors for batch in frozen):
        raise FrozenInputError(
            f"expected batches with tensors from {workload}'s legacy loader, got {len(frozen)} batches without any"
        )
    if folder is not None:
        _store(Path(folder) / BATCHES_FILE, stored)
    return FrozenEpoch(batches=tuple(frozen), loader=facts, random_states=states)


def train_on_frozen_epoch(spec: EqualitySpec) -> EqualityTrace:
    """Train on the first `num_steps` batches that the path delivers after seeding, with deterministic algorithms.

    Returns:
        Losses, gradient norms, digests of the parameters before and after, and a digest for every tensor delivered on the device.
    """
    with deterministic_algorithms():
        device = choose_device(spec.device)
        workload = load_workload(spec.workload)
        job = TrainingJob(workload, device, spec.seed)
        initial = digest_parameters(job.model)
        delivered: list[FrozenBatch] = []
        with open_data_path(
            spec.path, workload, device, cap_bytes=spec.cap_bytes, slot_bytes=spec.slot_bytes
        ) as opened:
            losses, norms = run_equality_steps(
                job, opened.epoch(), spec.num_steps, lambda step, batch: delivered.append(digest_delivered(batch, step))
            )
            stats = opened.stats()
        return EqualityTrace(
            path=spec.path, losses=tuple(losses), gradient_norms=tuple(norms), initial_parameters_digest=initial,
            final_parameters_digest=digest_parameters(job.model), batches=tuple(delivered), loader_stats=stats,
        )  # fmt: skip


def digest_delivered(batch: Any, step: int) -> FrozenBatch:
    """Return structure and digests of a batch that a path delivered at `step`, to be compared with the frozen one."""
    structure, tensors = encode_batch(batch, f"batch_{step:04d}")
    return _frozen_batch(structure, tensors, None)


def load_frozen_batches(folder: Path, manifest: FrozenManifest, workload: str) -> list[Any]:
    """Return the frozen batches as CPU tensors in the legacy structure, verified.

    A freeze of digests only runs the legacy loader again and compares every tensor with its digest.

    Raises:
        FrozenInputError: What the recipe gives now differs from what was frozen; the message names the first batch.
    """
    if manifest.mode == "stored":
        tensors = load_file(folder / BATCHES_FILE)
        return [decode_batch(batch.structure, tensors) for batch in manifest.batches]
    seed_everything(manifest.seed)
    batches = []
    loader = load_workload(workload).legacy_loader("train")
    for place, (frozen, batch) in enumerate(
        zip(manifest.batches, loader, strict=False)
    ):  # in this order no batch too many is loaded
        structure, tensors = encode_batch(batch, f"batch_{place:04d}")
        found = _frozen_batch(structure, tensors, frozen.sample_ids)
        if found != frozen:
            raise FrozenInputError(
                f"batch {place} of the recipe differs from its frozen digest; the dataset, the loader or a version changed. "
                "Restore them, or freeze again with a reason"
            )
        batches.append(batch)
    return batches


def _frozen_batch(structure: Any, tensors: dict[str, torch.Tensor], ids: tuple[int, ...] | None) -> FrozenBatch:
    digests = {name: digest_tensor(tensor) for name, tensor in tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return FrozenBatch(structure=structure, tensors=digests, sample_ids=ids, num_bytes=size)


def _describe(loader: Any) -> tuple[dict[str, Any], Any, _RecordingSampler | None]:
    """Return what is worth recording of a loader, the loader to iterate, and its watched sampler where it has indices."""
    facts: dict[str, Any] = {"class": f"{type(loader).__module__}.{type(loader).__qualname__}"}
    if not isinstance(loader, DataLoader):
        return facts, loader, None
    facts |= {
        "batch_size": loader.batch_size, "num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor,
        "drop_last": loader.drop_last, "persistent_workers": loader.persistent_workers, "sampler": type(loader.sampler).__name__,
        "collate_function": getattr(loader.collate_fn, "__qualname__", type(loader.collate_fn).__name__), "dataset": type(loader.dataset).__name__,
    }  # fmt: skip
    if isinstance(loader.dataset, IterableDataset):
        return facts, loader, None
    facts["num_batches"] = len(loader)
    watched, name = copy.copy(loader), "batch_sampler" if loader.batch_sampler is not None else "sampler"
    sampler = _RecordingSampler(getattr(loader, name))
    object.__setattr__(watched, name, sampler)  # DataLoader forbids setting it after construction; the copy is ours
    return facts, watched, sampler


def _sample_ids(sampler: _RecordingSampler | None, place: int) -> tuple[int, ...] | None:
    if sampler is None:
        return None
    item = sampler.items[place]
    ids = item if isinstance(item, list | tuple) else [item]
    return tuple(int(value) for value in ids) if all(isinstance(value, int | np.integer) for value in ids) else None


def _random_states() -> dict[str, str]:
    numpy_state = np.random.get_state(legacy=False)["state"]  # type: ignore[call-overload, unused-ignore]
    return {
        "torch": digest_tensor(torch.get_rng_state()),
        "numpy": sha256_bytes(numpy_state["key"].tobytes() + str(numpy_state["pos"]).encode()),
        "random": sha256_bytes(repr(random.getstate()).encode()),
    }


def _store(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors and read them back: safetensors can save dtypes that it can't load."""
    try:
        content = save(tensors)
        write_atomically(path, content, overwrite=True)
        again = load_file(path)
    except Exception as error:
        path.unlink(missing_ok=True)
        raise FrozenInputError(
            f"a tensor can't be stored and read back by safetensors ({error}); use the digests-only mode"
        ) from error
    for name, tensor in tensors.items():
        if digest_tensor(again[name]) != digest_tensor(tensor):
            path.unlink()
            raise FrozenInputError(f"{name} came back changed from storage ({tensor.dtype}); use the digests-only mode")
