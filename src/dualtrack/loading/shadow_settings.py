"""How a dual track runs."""

from pathlib import Path
from typing import Any

from pydantic import Field

from dualtrack.facts.observations import Fact
from dualtrack.loading.routing import TrafficRamp
from dualtrack.loading.shadow_evidence import CLEAN_EPOCH_TARGET


class DualTrackSettings(Fact):
    """Settings of one `DualTrackLoader`."""

    ramp: TrafficRamp = TrafficRamp()
    """Shares of traffic; `TrafficRamp(shares=(1.0,))` with both shadows off is a retired legacy path."""
    loader_shadow: bool = True
    """Run the legacy loader as well and compare its batches with the candidate's."""
    transfer_shadow: bool = True
    """Copy each host batch of the candidate's loader with legacy's copy, too, and compare on the device."""
    depth: int = Field(default=2, ge=1)
    """Batches in flight while a step computes."""
    deadline_seconds: float = Field(default=120.0, gt=0)
    """The longest wait for a host batch or for a comparison; then legacy goes on."""
    order_seed: int = 0
    """Seeds the generator that decides which side goes first."""
    bundle_folder: Path | None = None
    """Where first divergences are written; None writes none."""
    sample_reference: dict[str, Any] = {}
    """Goes into a bundle: how to find the frozen sample."""
    clean_epoch_key: str = ""
    """What the count of clean epochs is kept under."""
    num_clean_epochs_before: int = Field(default=0, ge=0)
    """Clean epochs that the ledger has under the key already."""
    clean_epoch_target: int = Field(default=CLEAN_EPOCH_TARGET, ge=1)
