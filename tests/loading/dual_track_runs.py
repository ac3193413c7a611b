"""What the tests of the dual track share: datasets that draw from everything, legacy's own run, and the same run on two tracks."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from dualtrack.loading.dual_track import DualTrackLoader
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.routing import TrafficRamp
from dualtrack.loading.shadow_generators import GeneratorStates, capture_generators
from dualtrack.loading.shadow_settings import DualTrackSettings
from dualtrack.loading.transfer_device import HostTransferDevice
from dualtrack.training.workload import seed_everything

NUM_SAMPLES = 11  # 4 batches of 3, the last one partial
NUM_BATCHES = 4
RETIRED = DualTrackSettings(ramp=TrafficRamp(shares=(1.0,)), loader_shadow=False, transfer_shadow=False)
SHADOW = DualTrackSettings()
ALL_TRAFFIC = DualTrackSettings(ramp=TrafficRamp(shares=(1.0,)))
TRANSFER_ONLY = DualTrackSettings(loader_shadow=False)
MODES = {
    "shadow": SHADOW,
    "half": DualTrackSettings(ramp=TrafficRamp(shares=(0.5, 1.0), num_clean_epochs_per_rung=9)),
    "all traffic": ALL_TRAFFIC,
    "transfer shadow only": TRANSFER_ONLY,
    "retired": RETIRED,
}


class Drawing(Dataset):
    """The sample's index, and noise from all three global generators of wherever it runs."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(5) + random.random() + float(np.random.rand()), index


def legacy_loader(num_workers: int = 0, **options: Any) -> DataLoader:
    return DataLoader(Drawing(), batch_size=3, shuffle=True, num_workers=num_workers, **options)


def pooled(loader: DataLoader, **options: Any) -> PooledLoader:
    return PooledLoader(loader, device="cpu", cap_bytes=64 * 1024, slot_bytes=1024, **options)


def train(loader: Any, num_epochs: int, draws: bool = True) -> tuple[list[list[Any]], GeneratorStates]:
    """Run a training loop whose steps draw from the generators, and return all batches and the generators' last states."""
    epochs = []
    for _ in range(num_epochs):
        batches = []
        for images, labels in loader:
            step = torch.rand(()) + random.random() + float(np.random.rand()) if draws else torch.zeros(())
            batches.append((images.clone(), labels.clone(), step))
            images.fill_(float("nan"))  # a step may write into its batch
        epochs.append(batches)
    return epochs, capture_generators()


def legacy_run(
    num_epochs: int, build: Callable[[], Any] = legacy_loader, seed: int = 5
) -> tuple[list[list[Any]], GeneratorStates]:
    seed_everything(seed)
    return train(build(), num_epochs)


def dual_loader(
    build: Callable[[], Any] = legacy_loader,
    candidate: Callable[[], Any] | None = None,
    settings: DualTrackSettings = SHADOW,
    **options: Any,
) -> DualTrackLoader:
    device = options.pop("device", None) or HostTransferDevice(torch.device("cpu"))
    return DualTrackLoader(build, candidate or (lambda: pooled(build())), device, settings, **options)


def assert_same_run(
    expected: tuple[list[list[Any]], GeneratorStates], got: tuple[list[list[Any]], GeneratorStates]
) -> None:
    assert [len(epoch) for epoch in got[0]] == [len(epoch) for epoch in expected[0]]
    for number, (one, other) in enumerate(zip(expected[0], got[0], strict=True)):
        for place, (batch, found) in enumerate(zip(one, other, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(batch, found, strict=True)), f"epoch {number}, batch {place}"
    assert expected[1].equals(got[1]), "the global generators must stand where legacy alone leaves them"
