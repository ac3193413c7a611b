"""One validated settings class a stage; the notebooks' parameters bear the same names.

Settings are frozen and digested before the first measurement, so a changed margin or number of pairs is another run.
"""

import difflib
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dualtrack.facts.digests import sha256_json


class StageSettings(BaseModel):
    """What every stage is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    workload: str = "digits"
    """Bundled name, or `package.module:factory`."""
    device: str = "auto"
    """`auto` takes `cuda` where there is one, else `cpu`."""
    seed: int = Field(default=20260101, ge=0)
    """Seeds `random`, `numpy` and `torch` before the legacy loader and the model are built."""

    @classmethod
    def parse(cls, parameters: dict[str, Any]) -> Self:
        """Validate notebook or command-line parameters.

        Raises:
            ValueError: A name is unknown (the nearest valid name is shown) or a value has the wrong type; nothing was started.
        """
        problems = [cls._unknown(name) for name in parameters if name not in cls.model_fields]
        if problems:
            raise ValueError("; ".join(problems))
        try:
            return cls(**parameters)
        except ValidationError as error:
            lines = [
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}, got {item['input']!r}" for item in error.errors()
            ]
            raise ValueError(f"{cls.__name__}: {'; '.join(lines)}") from error

    @classmethod
    def _unknown(cls, name: str) -> str:
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"valid names are {', '.join(cls.model_fields)}"
        return f"{cls.__name__}: unknown parameter {name!r}; {hint}"

    def digest(self) -> str:
        """Return the digest that is taken before the first measurement."""
        return sha256_json(self.model_dump(mode="json"))


class TimedSettings(StageSettings):
    """What a stage with timed trials is asked for on top."""

    num_pairs: int = Field(default=6, ge=1)
    """Pairs of fresh processes, legacy and candidate; six is the least at which a paired test can reach 5 %."""
    num_warmup_steps: int = Field(default=24, ge=0)
    """Steps before the steady window of a trial; more than an epoch of the digits, since a last partial batch is a shape of its own (on an H200
    its first convolution took 4.5 s)."""
    num_steps: int = Field(default=40, ge=2)
    """Steps in the steady window of a trial."""
    trial_deadline_seconds: float = Field(default=120.0, gt=0)
    """A trial that takes longer is killed and counts as a failure."""


class FreezeSettings(TimedSettings):
    """Stage 0: freeze or verify the legacy pipeline."""

    num_batches: int = Field(default=0, ge=0)
    """Batches to freeze; 0 freezes the whole first epoch."""
    mode: Literal["stored", "recipe"] = "stored"
    """`recipe` keeps digests only, for large or private data."""


class MemorySettings(TimedSettings):
    """Stage 1: the bounded pinned pool."""

    cap_bytes: int = Field(default=0, ge=0)
    """Most bytes that the training pool may hold; 0 takes room for every batch that the legacy loader may have in flight, and two more a worker."""
    eval_cap_bytes: int = Field(default=0, ge=0)
    """Most bytes that the isolated evaluation pool may hold; 0 takes the same as the training pool."""


class TransferSettings(TimedSettings):
    """Stage 2: stream prefetcher and dual track."""

    cap_bytes: int = Field(default=0, ge=0)
    """Most bytes that the pool under the prefetcher may hold; 0 takes room for every batch that the legacy loader may have in flight, and two more a worker."""
    num_epochs: int = Field(default=100, ge=1)
    """Dual-track epochs to run now; the gate wants 100 consecutive clean ones under one key."""
    traffic_ramp: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    """Share of batches that the candidate serves, rung by rung; the last rung must be exactly 1."""

    @field_validator("traffic_ramp", mode="before")
    @classmethod
    def _tuple(cls, value: Any) -> Any:
        """Take a list, as notebooks and YAML give it."""
        return tuple(float(share) for share in value) if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _ends_at_all(self) -> Self:
        """Refuse a ramp that does not rise to exactly 100 %."""
        ramp = self.traffic_ramp
        if not ramp or ramp[-1] != 1.0 or any(not 0 <= share <= 1 for share in ramp) or list(ramp) != sorted(ramp):
            raise ValueError(f"expected a rising ramp within 0..1 whose last rung is exactly 1.0, got {ramp}")
        return self


class ReportSettings(StageSettings):
    """Stage 4: the report is computed from the records of the same run folder; nothing is measured."""
