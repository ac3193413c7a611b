"""A world size that was run, with what it is compared with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualtrack.training.data_plan import DataPlan
from dualtrack.training.legacy_gradients import LegacyGradients


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A world size that was run: what each rank returned, and beside it what it is compared with."""

    world_size: int
    backend: str
    results: tuple[dict[str, Any], ...]
    folder: Path
    """Launch folder with the ranks' gradients for V7."""
    legacy: LegacyGradients
    single: dict[str, Any]
    """What the single process returned for the same task."""
    probe: list[str]
    """Digests of the probe's gradients from one plain process."""
    plan: DataPlan
    seconds_until_up: float = 0.0
    slow_ranks: dict[int, float] = field(default_factory=dict)

    @property
    def curves(self) -> list[str]:
        """Names of the loss curves that the ranks ran."""
        return [curve for curve in ("curve32", "curve64") if curve in self.results[0]]
