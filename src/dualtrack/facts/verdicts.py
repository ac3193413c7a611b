"""Join what was seen with what was demanded: every verdict of the workbook is computed here, and recomputed here by `verify`.

Absence never passes: a missing observation, zero comparisons, zero trials and NaN each give their own outcome, none of them `passed`. A
gate also has to show that it can fail: `judge_stage` judges the planted faults with the same limits, and one that slips through makes the
gate a `tool error`.
"""

from collections.abc import Mapping, Sequence

from dualtrack.facts.line_judges import Judgement, judge_observation
from dualtrack.facts.observations import (
    Equality,
    GateLine,
    GateVerdict,
    Limit,
    Observation,
    State,
    ToolError,
    Unmeasured,
)
from dualtrack.facts.records import PlantedFault

COMPLETE = "complete"
WITHOUT_CUDA = "numerics and reliability; no CUDA device"
PLANTED = "planted fault: "
_WORST_FIRST = (State.TOOL_ERROR, State.FAILED, State.NOT_MEASURED, State.INCONCLUSIVE)
_CAUGHT = (State.FAILED, State.INCONCLUSIVE)


def judge(observations: Mapping[str, Observation], limits: Sequence[Limit], device: str) -> GateVerdict:
    """Judge observations against limits.

    Args:
        observations: What the stage saw, by key; a key that no limit names decides nothing.
        limits: What must hold; exactly one is primary. Advisory ones are shown and never decide.
        device: Where the stage ran, `cpu` or `cuda`; without CUDA a limit that needs it is shown as not measured and does not block.

    Raises:
        ValueError: Not exactly one limit is primary, or the primary one is advisory.
    """
    _require_one_primary(limits)
    return _conclude([_line(observations, limit, device) for limit in limits], observations, device)


def judge_stage(
    observations: Mapping[str, Observation],
    limits: Sequence[Limit],
    planted_faults: Sequence[PlantedFault],
    device: str,
) -> GateVerdict:
    """Judge a stage: its limits as `judge` does, then one line for each planted fault, which its limit has to catch.

    A gate without any planted fault is not measured: nobody has seen it fail.

    Raises:
        ValueError: Not exactly one limit is primary, or the primary one is advisory.
    """
    _require_one_primary(limits)
    lines = [_line(observations, limit, device) for limit in limits]
    lines += [_planted_line(fault, limits) for fault in planted_faults] or [_nothing_planted()]
    return _conclude(lines, observations, device)


def judge_planted(fault: PlantedFault, limits: Sequence[Limit], device: str) -> bool:
    """Return whether a limit catches the planted fault: what it gave must be judged `failed` or `inconclusive`.

    A broken or missing measurement is no catch: it would show that the tool can break, not that the gate can fail. A limit that needs CUDA
    is judged on any device here, since the arithmetic is what is on trial.
    """
    del device  # the same on every device; kept beside `judge` so that both are called alike
    return any(item.state in _CAUGHT for item in _judge_fault(fault, limits))


def plant_fault(what: str, observation: str, seen: Observation, limits: Sequence[Limit], device: str) -> PlantedFault:
    """Return the record of a planted fault, with `caught` as the limits judge it."""
    fault = PlantedFault(what=what, observation=observation, seen=seen, caught=False)
    return fault.model_copy(update={"caught": judge_planted(fault, limits, device)})


def blocks(line: GateLine, device: str) -> bool:
    """Return whether a line keeps its gate from passing."""
    exempt = line.state is State.NOT_MEASURED and _lacks(line.needs, device)
    return not line.advisory and line.state is not State.PASSED and not exempt


def _require_one_primary(limits: Sequence[Limit]) -> None:
    primary = [limit for limit in limits if limit.primary]
    if len(primary) != 1:
        named = ", ".join(limit.observation for limit in primary) or "none"
        raise ValueError(
            f"expected exactly one primary limit among {len(limits)}, got {named}; a gate is about one metric, mark one"
        )
    if primary[0].advisory:
        raise ValueError(
            f"{primary[0].observation}: expected the primary limit to decide, got an advisory one; drop one of the marks"
        )


def _lacks(needs: str | None, device: str) -> bool:
    return needs == "cuda" and not device.startswith("cuda")


def _line(observations: Mapping[str, Observation], limit: Limit, device: str) -> GateLine:
    seen = observations.get(limit.observation)
    if seen is None:
        seen = Unmeasured(what=limit.observation, reason="the stage recorded no such observation")
    judged = judge_observation(seen, limit)
    if _lacks(limit.needs, device) and not isinstance(seen, ToolError):
        reason = (
            "no CUDA device"
            if isinstance(seen, Unmeasured)
            else f"no CUDA device; on {device}, which is no evidence for it: {judged.statistic}"
        )
        judged = Judgement(state=State.NOT_MEASURED, statistic=f"not measured: {reason}")
    return GateLine(
        observation=limit.observation, what=seen.what, state=judged.state, statistic=judged.statistic, value=judged.value,
        interval=judged.interval, limit=limit_text(limit), num=judged.num, reason=limit.reason, primary=limit.primary,
        advisory=limit.advisory, needs=limit.needs,
    )  # fmt: skip


def limit_text(limit: Limit) -> str:
    """Return a limit in words, for example `at most 1.05`."""
    return f"equal to {limit.bound}" if limit.relation == "equal" else f"{limit.relation} {limit.bound}"


def _judge_fault(fault: PlantedFault, limits: Sequence[Limit]) -> list[Judgement]:
    return [judge_observation(fault.seen, limit) for limit in limits if limit.observation == fault.observation]


def _planted_line(fault: PlantedFault, limits: Sequence[Limit]) -> GateLine:
    judged = _judge_fault(fault, limits)
    catching = [item for item in judged if item.state in _CAUGHT]
    if not judged:
        state, statistic = State.TOOL_ERROR, f"no limit on {fault.observation} could catch it"
    elif not catching:
        state, statistic = State.TOOL_ERROR, f"not caught: judged {judged[0].state}, {judged[0].statistic}"
    elif not fault.caught:
        state, statistic = State.TOOL_ERROR, "recorded as not caught, though the limit catches it"
    else:
        state, statistic = State.PASSED, f"caught: judged {catching[0].state}, {catching[0].statistic}"
    return GateLine(
        observation=PLANTED + fault.observation, what=f"planted fault caught: {fault.what}", state=state, statistic=statistic,
        limit="must not pass", num=1, reason="a gate that can't fail proves nothing",
    )  # fmt: skip


def _nothing_planted() -> GateLine:
    return GateLine(
        observation=f"{PLANTED}any", what="planted fault caught", state=State.NOT_MEASURED, statistic="not measured: no fault was planted",
        limit="must not pass", num=0, reason="a gate that can't fail proves nothing",
    )  # fmt: skip


def _conclude(lines: list[GateLine], observations: Mapping[str, Observation], device: str) -> GateVerdict:
    """Form the gate's state: the worst of the lines that decide; without a single one that passed, nothing was shown."""
    exempt = [
        line for line in lines if not line.advisory and line.state is State.NOT_MEASURED and _lacks(line.needs, device)
    ]
    blocking = sorted((line for line in lines if blocks(line, device)), key=lambda line: _WORST_FIRST.index(line.state))
    shown = any(
        line.state is State.PASSED and not line.advisory and not line.observation.startswith(PLANTED) for line in lines
    )
    if not blocking and not shown:
        blocking = exempt
    return GateVerdict(
        state=blocking[0].state if blocking else State.PASSED, scope=WITHOUT_CUDA if exempt else COMPLETE, lines=tuple(lines),
        deciding=blocking[0].observation if blocking else None,
        next_action=_next_action(blocking[0], observations) if blocking else _promote_action(exempt),
    )  # fmt: skip


def _promote_action(exempt: Sequence[GateLine]) -> str:
    missing = ", ".join(line.observation for line in exempt)
    elsewhere = f" Run the stage on a CUDA device for {missing}." if missing else ""
    return f"Nothing is open here; `dualtrack promote` may go on from this stage.{elsewhere}"


def _next_action(line: GateLine, observations: Mapping[str, Observation]) -> str:
    """Say in one sentence what to do about the line that blocks."""
    if line.observation.startswith(PLANTED) and line.state is not State.PASSED:
        return f"Repair the gate before you trust it: {line.what}, {line.statistic}."
    if line.state is State.TOOL_ERROR:
        return f"Repair the measurement of {line.what}, then run the stage again; it says nothing about the system yet."
    if line.state is State.NOT_MEASURED:
        where = " on a CUDA device" if line.needs == "cuda" else ""
        return f"Measure {line.what}{where}: {line.statistic.removeprefix('not measured: ')}."
    if line.state is State.INCONCLUSIVE:
        return f"Collect more for {line.what} in a new run ({line.statistic.rpartition('; ')[2]}), or state a waiver."
    seen = observations.get(line.observation)
    divergence = seen.first_divergence if isinstance(seen, Equality) else None
    if divergence is not None and divergence.bundle is not None:
        return f"Reproduce the first difference with `dualtrack replay {divergence.bundle}`; keep the previous path active."
    return f"Keep the previous path active and look into {line.what}: {line.statistic}, limit {line.limit}."
