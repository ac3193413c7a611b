"""What a stage saw, in the few shapes that a gate can judge.

An observation holds raw values and no opinion; `Limit` says what must hold of it and why; `verdicts.judge` joins the two. What was not
measured is an `Unmeasured` with a reason and what broke while measuring is a `ToolError`: neither can pass a gate.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Fact(BaseModel):
    """A frozen record with no unknown keys; NaN and infinities are written as strings, so that its JSON stays JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", use_attribute_docstrings=True)


class State(StrEnum):
    """The five outcomes of a gate or of one of its lines."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    NOT_MEASURED = "not measured"
    TOOL_ERROR = "tool error"


class Divergence(Fact):
    """The first place where candidate and legacy differ."""

    where: str
    """Epoch, step and leaf in words, for example `epoch 3, step 7, leaf [0], index [2, 0, 4, 4]`."""
    legacy: str
    candidate: str
    bundle: str | None = None
    """Folder of the reproduction bundle, relative to the run's folder; `dualtrack replay` takes it."""


class Equality(Fact):
    """A comparison of many items with the frozen baseline or the legacy path; zero comparisons can't pass."""

    kind: Literal["equality"] = "equality"
    what: str
    num_compared: int = Field(ge=0)
    num_equal: int = Field(ge=0)
    num_within_tolerance: int = Field(default=0, ge=0)
    num_mismatched: int = Field(default=0, ge=0)
    num_skipped: int = Field(default=0, ge=0)
    tolerance: float | None = None
    """None where bits must agree; else the declared tolerance, whose reason stands in the limit."""
    largest_error: float | None = None
    first_divergence: Divergence | None = None


class Pair(Fact):
    """The medians of two fresh-process runs that were run next to each other."""

    legacy: float
    candidate: float
    order: Literal["legacy first", "candidate first"]


class Ratio(Fact):
    """Paired runs of candidate and legacy; one pair is one unit of replication."""

    kind: Literal["ratio"] = "ratio"
    what: str
    unit: str
    pairs: tuple[Pair, ...]
    floor_pairs: tuple[Pair, ...] = ()
    """Legacy against legacy in the same session: the noise floor."""
    num_planned_pairs: int = Field(ge=1)


class Maximum(Fact):
    """A peak: the largest value decides, the others show the spread."""

    kind: Literal["maximum"] = "maximum"
    what: str
    unit: str
    values: tuple[float, ...]


class Failures(Fact):
    """How many independent trials (fresh processes) failed, by cause."""

    kind: Literal["failures"] = "failures"
    what: str
    num_trials: int = Field(ge=0)
    causes: dict[str, int] = {}


class Value(Fact):
    """One plain value: a count, a flag, a name."""

    kind: Literal["value"] = "value"
    what: str
    value: bool | int | float | str
    unit: str | None = None


class Unmeasured(Fact):
    """Something that was not measured, and why."""

    kind: Literal["unmeasured"] = "unmeasured"
    what: str
    reason: str


class ToolError(Fact):
    """The measurement itself broke; the system under test is neither cleared nor blamed."""

    kind: Literal["tool error"] = "tool error"
    what: str
    error: str


Observation = Annotated[
    Equality | Ratio | Maximum | Failures | Value | Unmeasured | ToolError, Field(discriminator="kind")
]


class Limit(Fact):
    """What must hold of one observation, and why this number."""

    observation: str
    """Key of the observation in the stage's record."""
    relation: Literal["equal", "at most", "at least"]
    bound: bool | int | float | str
    """Judged against: mismatches of an `Equality`, interval of a `Ratio`, largest of a `Maximum`, failed trials of `Failures`, a `Value`."""
    reason: str
    primary: bool = False
    """The one metric that the gate is about; one per gate, the others are shown beside it."""
    advisory: bool = False
    """Shown and counted among the open risks, without deciding."""
    needs: Literal["cuda"] | None = None
    """On a machine without it the line reads `not measured` and the gate's scope says so; promotion elsewhere needs the line."""


class GateLine(Fact):
    """One judged limit: statistic, limit, n and reason in one line."""

    observation: str
    what: str
    state: State
    statistic: str
    """The judged figure in words, for example `0 of 1,240 differ` or `ratio 0.31 (0.29-0.33)`."""
    value: float | None = None
    interval: tuple[float, float] | None = None
    limit: str
    num: int
    reason: str
    primary: bool = False
    advisory: bool = False
    needs: Literal["cuda"] | None = None


class GateVerdict(Fact):
    """A gate's decision, recomputable from observations and limits alone."""

    state: State
    scope: str
    """`complete`, or what the machine could not show, for example `numerics and reliability; no CUDA device`."""
    lines: tuple[GateLine, ...]
    deciding: str | None
    """Key of the first line that kept the gate from passing."""
    next_action: str
