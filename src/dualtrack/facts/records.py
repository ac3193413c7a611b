"""The record that a stage leaves behind: settings, conditions, raw trials, observations, limits and verdict.

Everything on the report page is computed from these files. Names of keys are fixed here once: `stage`, `world_size`,
`data_fraction`, `num_steps`, and quantities end in their unit.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, Field

from dualtrack.facts.digests import sha256_json
from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.observations import Fact, Failures, GateVerdict, Limit, Maximum, Observation, Ratio

SCHEMA_VERSION: Literal[1] = 1
UNSTABLE_FIELDS = {
    "first_divergence",
    "largest_error",
    "error",
    "reason",
}  # figures and messages, which change from run to run
STAGES = ("0_freeze_baseline", "1_pinned_pool", "2_stream_prefetcher", "3_ddp_expansion", "4_migration_report")
CORE_CHANGE = {
    "0_freeze_baseline": "none: legacy pipeline recorded",
    "1_pinned_pool": "bounded page-locked pool, one packed copy",
    "2_stream_prefetcher": "copy of batch t+1 on its own CUDA stream",
    "3_ddp_expansion": "gradient buckets over many ranks",
}


class Measured(Fact):
    """A number, or the reason why there is none; never a sentinel."""

    value: float | None
    unit: str
    reason: str | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a missing value without a reason, and a reason beside a value."""
        if (self.value is None) == (self.reason is None):
            raise ValueError(
                f"expected a value or a reason why there is none, got value={self.value!r} reason={self.reason!r}"
            )


class Outcome(Fact):
    """How a fresh process ended."""

    state: Literal["completed", "failed"]
    cause: str | None = None
    """One of the named causes: `exception`, `out of memory`, `killed by signal`, `deadline passed`, `loader error`, `non-finite loss`."""
    detail: str | None = None
    exit_code: int | None = None
    seconds: float


class MemorySamples(Fact):
    """Bytes over time in one trial; every list is as long as `seconds`."""

    seconds: tuple[float, ...]
    pss_bytes: tuple[int, ...]
    """Proportional set size of the trainer and its loader workers."""
    pool_bytes: tuple[int, ...] | None = None
    """Bytes of pool slots in use (None where the path has no pool)."""
    device_bytes: tuple[int, ...] | None = None
    """Device memory allocated by torch (None without CUDA)."""


class Trial(Fact):
    """One fresh process: the unit of replication."""

    name: str
    block: Literal["paired", "noise floor", "headroom", "extra"]
    """`paired` trials decide; `noise floor` is legacy against legacy; `headroom` uses a cached batch."""
    track: str
    """`legacy`, `pinned`, `pooled`, `prefetched`, `cached`, `single` or `ddp`."""
    pair: int
    position: int
    """Place in the order of execution of its stage, from 0."""
    started_at: AwareDatetime
    outcome: Outcome
    world_size: int = 1
    data_fraction: float = 1.0
    batch_size: int | None = None
    num_warmup_steps: int = 0
    num_steps: int = 0
    """Steps in the steady window, after the warm-up."""
    step_seconds: tuple[float, ...] = ()
    data_wait_seconds: tuple[float, ...] = ()
    samples_per_second: float | None = None
    flops_per_step: Measured | None = None
    mfu: Measured | None = None
    peaks: dict[str, Measured] = {}
    """`pinned_peak_bytes`, `pool_peak_bytes`, `pss_peak_bytes`, `torch_pinned_peak_bytes`, `device_peak_bytes`."""
    memory: MemorySamples | None = None
    loader_stats: dict[str, Any] = {}
    load_average: float | None = None
    """One-minute load average when the trial began."""


class PlantedFault(Fact):
    """A negative control: a fault put in on purpose, the observation it gave, and whether the limit caught it."""

    what: str
    observation: str
    """Key of the limit that has to catch it."""
    seen: Observation
    caught: bool


class Rollback(Fact):
    """A rollback that was executed and checked."""

    from_path: str
    to_path: str
    active_path_read_back: str
    num_steps_compared: int
    num_steps_equal: int
    seconds: float
    detail: str = ""

    @property
    def verified(self) -> bool:
        """True when the old path is active again and every compared step equals the baseline bit for bit."""
        return self.active_path_read_back == self.to_path and 0 < self.num_steps_compared == self.num_steps_equal


class Series(Fact):
    """The data behind one figure; the figure is drawn from this alone."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, tuple[tuple[float, float], ...]]
    bounds: dict[str, float] = {}
    """Horizontal lines, for example the cap."""


class StageRecord(Fact):
    """All that one stage leaves behind."""

    schema_version: Literal[1] = SCHEMA_VERSION
    stage: str
    workload: str
    device: str
    started_at: AwareDatetime
    ended_at: AwareDatetime
    settings: dict[str, Any]
    settings_digest: str
    """Digest of `settings`, taken before the first measurement; a changed margin is another run."""
    frozen_inputs_digest: str
    hardware_identity: str
    conditions: dict[str, Any]
    """Versions, hardware, limits, load and state of the code, as `provenance.collect` found them."""
    observations: dict[str, Observation]
    limits: tuple[Limit, ...]
    planted_faults: tuple[PlantedFault, ...] = ()
    rollback: Rollback | None = None
    trials: tuple[Trial, ...] = ()
    figures: dict[str, Series] = {}
    notes: tuple[str, ...] = ()
    stable_keys: tuple[str, ...] = ()
    """Keys of the `Equality` and `Value` observations that must repeat from run to run; only these enter `stable_digest`."""
    stable_digest: str = ""
    verdict: GateVerdict
    code_cells_expected: int | None = None

    def compute_stable_digest(self) -> str:
        """Return the digest of what must repeat from run to run: inputs, settings, counts, equality, numeric verdict words."""
        states = {line.observation: line.state for line in self.verdict.lines}
        counts: dict[str, Any] = {}
        for key in sorted(self.stable_keys):
            seen = self.observations.get(key)
            if isinstance(seen, Ratio | Maximum | Failures):
                raise ValueError(f"{key}: expected an equality or a value among the stable keys, got {seen.kind}")
            plain = seen.model_dump(mode="json", exclude=UNSTABLE_FIELDS) if seen is not None else None
            counts[key] = [plain, states.get(key)]
        return sha256_json([self.stage, self.workload, self.frozen_inputs_digest, self.settings_digest, counts])

    def save(self, path: Path) -> None:
        """Write the record atomically as JSON; an existing file is never replaced.

        Raises:
            FileExistsError: A record of this stage is there already.
        """
        write_atomically(path, self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> "StageRecord":
        """Read and validate a record.

        Raises:
            EvidenceError: The file is missing, is no record of this schema, or its stable digest does not follow from it.
        """
        try:
            record = cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise EvidenceError(f"expected the record {path.name}, found none; run its stage first") from error
        except ValueError as error:
            raise EvidenceError(f"{path.name} is not a record of schema {SCHEMA_VERSION}: {error}") from error
        if record.stable_digest != record.compute_stable_digest():
            raise EvidenceError(
                f"{path.name}: stable_digest does not follow from the record; it was edited after it was written"
            )
        return record


class RunSummary(Fact):
    """`run.json`: what a run was asked for and how far it came; written last by the runner."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: str
    workload: str
    started_at: AwareDatetime
    ended_at: AwareDatetime
    stages: dict[str, str]
    """Stage -> `passed`, `failed`, `inconclusive`, `not measured`, `tool error`, `crashed at cell k: signal n`, `not run`."""
    seconds: dict[str, float]
    complete: bool
    exit_code: int
    stable_digest: str
    parameters: dict[str, dict[str, Any]] = Field(default={})
