"""What every stage does before and after its own work."""

import pytest

from dualtrack.facts.errors import MigrationError, StageRefused
from dualtrack.facts.observations import ToolError, Value
from dualtrack.stages.memory_probes import probe_process_group
from dualtrack.stages.stage_run import Findings, refuse_distributed


def test_a_single_process_stage_is_refused_where_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_distributed("1_pinned_pool")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StageRefused, match="WORLD_SIZE is 2"):
        refuse_distributed("1_pinned_pool")


def test_a_single_process_stage_is_refused_inside_a_process_group() -> None:
    assert "a process group is initialised" in probe_process_group()


def test_what_breaks_while_measuring_is_a_tool_error_and_no_gap() -> None:
    findings = Findings()

    def broken() -> Value:
        raise MigrationError("the probe died")

    findings.observe("probe", "a probe", broken)
    findings.observe("count", "a count", lambda: Value(what="a count", value=3))
    assert findings.observations["probe"] == ToolError(what="a probe", error="MigrationError: the probe died")
    assert findings.observations["count"] == Value(what="a count", value=3)
