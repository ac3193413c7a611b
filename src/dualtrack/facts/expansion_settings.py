"""What stage 3 is asked for: no limit of it is left to a library's default."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dualtrack.facts.settings import TimedSettings


class ExpansionSettings(TimedSettings):
    """Stage 3: from one process to many ranks, rung by rung."""

    ladder: tuple[int, ...] = (4, 8, 32)
    """World sizes, rising; powers of two, so that dividing by them is exact and the integer probe must be bit-equal."""
    data_fraction: float = Field(default=0.10, gt=0, le=1)
    """Share of the training data, floored to full steps; the mission validates routing on a tenth before anything else."""
    global_batch: int = Field(default=0, ge=0)
    """Samples a step over all ranks, the same at every world size; 0 takes the legacy loader's batch size."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto` takes NCCL where every rank of a rung has a GPU of its own, else gloo on the CPU."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Of the process group: joining and every collective. The launching process kills after 3 x this + 10 s without progress."""
    bucket_cap_mb: float | None = Field(default=0.05, gt=0)
    """Size at which a gradient bucket closes, in MiB; 0.05 cuts the digits' 0.1 MiB in two. None is DDP's default, whose first bucket is smaller."""
    gradient_as_bucket_view: bool = True
    """Gradients live in their bucket: one copy less, the same bits."""
    static_graph: bool = False
    """Promise that every step uses the same parameters; delays DDP's bucket rebuild by a step."""
    host_cap_bytes: int = Field(default=32 * 2**20, gt=0)
    """Most bytes of all ranks' pools on a host; each rank gets an equal share."""
    num_workers: int = Field(default=0, ge=0)
    """Loader processes of each rank; 0 because 32 ranks share one host here."""
    num_gradient_batches: int = Field(default=2, ge=1)
    """Frozen legacy batches whose gradients are compared at each rung."""
    curve_steps: tuple[int, ...] = (30, 30, 12)
    """Steps of the loss curves at each rung, in the order of the ladder; the single process runs the most of them. A step of 32 gloo ranks takes
    0.3 s on two cores, so the last rung is short."""
    num_band_runs: int = Field(default=8, ge=4)
    """Single-process reruns with the samples of each batch in another order; they span the band of the float32 curve."""
    num_repeated_steps: int = Field(default=4, ge=1)
    """Steps that each rung runs a second time from the start."""
    commit_step: int = Field(default=6, ge=5)
    """Step after which a rung commits; at least 5, when DDP has rebuilt its buckets."""
    num_resumed_steps: int = Field(default=4, ge=1)
    """Steps that a rollback trains on from a commit."""
    float64_tolerance: float = Field(default=1e-12, gt=0)
    """Norm-wise error of a float64 gradient, or of float64 losses after a change of world size; 2e-15 was seen, the room is for other BLAS."""
    float32_tolerance_eps: float = Field(default=64.0, gt=0)
    """Norm-wise error of a float32 gradient in units of 2**-23; 25 were seen where contributions cancel (biases before a GroupNorm)."""
    curve64_tolerance: float = Field(default=1e-9, gt=0)
    """Relative difference of float64 losses along the curve; training amplifies rounding, 1e-12 was seen after 100 steps."""
    band_widening: float = Field(default=3.0, ge=1)
    """The float32 band is the spread of the permuted reruns, widened by so many times itself: eight curves do not span every ninth."""
    sweep_caps_mb: tuple[float, ...] = (0.01, 0.05, 25.0)
    """Bucket sizes that are tried, beside DDP's default layout; MiB."""
    sweep_world_size: int = Field(default=0, ge=0)
    """Ranks of the sweep; 0 takes the largest rung that has a GPU for each rank, else the first rung."""
    num_sweep_rounds: int = Field(default=4, ge=2)
    """Times each bucket size is measured, alternating with the others; a proposal for GPUs wants eight."""
    num_sweep_steps: int = Field(default=4, ge=1)
    """Timed steps of one measurement."""
    num_pairs: int = Field(default=1, ge=1)
    """Pairs of fresh launches a rung, single process and ranks; one is a record on a CPU, a claim about GPUs wants six."""
    num_warmup_steps: int = Field(default=4, ge=0)
    """Steps before the steady window of a trial; DDP rebuilds its buckets in them."""
    num_steps: int = Field(default=6, ge=2)
    """Steps in the steady window of a trial."""

    @field_validator("ladder", "curve_steps", mode="before")
    @classmethod
    def _whole_numbers(cls, value: Any) -> Any:
        """Take a list, as notebooks and YAML give it."""
        return tuple(value) if isinstance(value, list) else value

    @field_validator("sweep_caps_mb", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        """Take a list of numbers, as notebooks and YAML give it."""
        return tuple(float(cap) for cap in value) if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse a ladder that does not rise by powers of two, and curves too short for their commit."""
        rungs = self.ladder
        if not rungs or list(rungs) != sorted(set(rungs)) or any(size < 2 or size & (size - 1) for size in rungs):
            raise ValueError(f"expected a rising ladder of powers of two from 2 on, got {rungs}")
        if len(self.curve_steps) != len(rungs):
            raise ValueError(f"expected curve_steps for each of the {len(rungs)} rungs, got {len(self.curve_steps)}")
        needed = self.commit_step + self.num_resumed_steps
        if min(self.curve_steps) < max(needed, self.num_repeated_steps):
            raise ValueError(
                f"expected curve_steps of at least {max(needed, self.num_repeated_steps)} (commit_step + num_resumed_steps, and "
                f"num_repeated_steps), got {min(self.curve_steps)}"
            )
        if any(cap <= 0 for cap in self.sweep_caps_mb):
            raise ValueError(f"expected bucket sizes above 0, got {self.sweep_caps_mb}")
        return self
