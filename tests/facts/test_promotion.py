"""Promotion: refused wherever the evidence does not carry it, and by no clock."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dualtrack.facts.errors import LedgerError
from dualtrack.facts.ledger import PATH_AFTER, Ledger, Promotion, Waiver
from dualtrack.facts.observations import Equality, Limit, Observation, ToolError, Unmeasured
from dualtrack.facts.promotion import Site, check_promotion
from dualtrack.facts.records import StageRecord
from dualtrack.facts.verdicts import judge, plant_fault

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
STAGES = list(PATH_AFTER)
CLEAN = {"commit": "abc", "state": "clean"}
SITE = Site(hardware_identity="cpu-x", frozen_inputs_digest="f" * 64, code=CLEAN, now=NOW)
RULES = (
    Limit(observation="a", relation="equal", bound=0, reason="test", primary=True),
    Limit(observation="b", relation="equal", bound=0, reason="test"),
    Limit(observation="g", relation="equal", bound=0, reason="test", needs="cuda"),
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger in which stage 0 is promoted."""
    found = Ledger(tmp_path / "ledger.jsonl")
    found.append(promotion(STAGES[0]))
    return found


def promotion(stage: str) -> Promotion:
    return Promotion(at=NOW, stage=stage, active_path=PATH_AFTER[stage], who="ana", why="passed gate", run="r")


def record(stage: str = STAGES[1], num_mismatched: int = 0, code: Any = None, **seen: Observation) -> StageRecord:
    equal = Equality(what="batches", num_compared=9, num_equal=9 - num_mismatched, num_mismatched=num_mismatched)
    observations: dict[str, Observation] = {
        "a": equal,
        "b": equal,
        "g": Unmeasured(what="g", reason="no CUDA device"),
        **seen,
    }
    return StageRecord(
        stage=stage, workload="digits", device="cpu", started_at=NOW, ended_at=NOW, settings={}, settings_digest="",
        frozen_inputs_digest="f" * 64, hardware_identity="cpu-x", conditions={"before": {"code": CLEAN if code is None else code}},
        observations=observations, limits=RULES, verdict=judge(observations, RULES, "cpu"),
        planted_faults=(plant_fault("x", "a", equal, RULES, "cpu"),),
    )  # fmt: skip


def waive(ledger: Ledger, observation: str, days: int = 7) -> None:
    until = NOW + timedelta(days=days)
    ledger.append(
        Waiver(
            at=NOW - timedelta(days=1), stage=STAGES[1], observation=observation, who="ana", why="known", until=until
        )
    )


def check(ledger: Ledger, found: StageRecord, site: Site = SITE, problem: str | None = None, **more: bool) -> str:
    return check_promotion(ledger, found, site, verify_problem=problem, **more)


def test_a_passed_gate_with_sound_evidence_may_be_promoted(ledger: Ledger) -> None:
    assert check(ledger, record()) == "passed gate"


def test_a_run_that_does_not_verify_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="does not verify"):
        check(ledger, record(), problem="records/1.json was changed")


@pytest.mark.parametrize("stage", [STAGES[2], STAGES[3]])
def test_a_stage_out_of_order_is_refused(ledger: Ledger, stage: str) -> None:
    with pytest.raises(LedgerError, match=f"promote {STAGES[1]} first"):
        check(ledger, record(stage))


def test_a_stage_is_not_promoted_twice(ledger: Ledger) -> None:
    ledger.append(promotion(STAGES[1]))
    with pytest.raises(LedgerError, match="promoted already"):
        check(ledger, record())


def test_the_report_is_no_stage_to_promote(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="expected one of"):
        check(ledger, record("4_migration_report"))


@pytest.mark.parametrize("change", [{"hardware_identity": "cuda-y"}, {"frozen_inputs_digest": "e" * 64}])
def test_a_baseline_of_another_machine_or_freeze_is_refused(ledger: Ledger, change: dict[str, str]) -> None:
    with pytest.raises(LedgerError, match="not promoted: it was judged"):
        check(ledger, record(), replace(SITE, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [{"commit": "abc", "state": "dirty"}, "not collected", {}])
def test_a_dirty_or_unknown_working_tree_is_refused_by_default(ledger: Ledger, code: Any) -> None:
    with pytest.raises(LedgerError, match="working tree was"):
        check(ledger, record(code=code))
    with pytest.raises(LedgerError, match="working tree was"):
        check(ledger, record(), replace(SITE, code=code))
    assert check(ledger, record(code=code), allow_dirty=True) == "passed gate"


def test_a_failed_gate_is_refused_with_the_line_that_failed(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match=r"a \(failed: 1 of 9 differ\)"):
        check(ledger, record(num_mismatched=1))


def test_a_gate_is_waived_line_by_line_with_name_and_date(ledger: Ledger) -> None:
    waive(ledger, "a")
    with pytest.raises(LedgerError, match=r"gate is failed: b \(failed"):
        check(ledger, record(num_mismatched=1))
    waive(ledger, "b")
    assert check(ledger, record(num_mismatched=1)) == "waived: a until 2026-03-08 by ana; b until 2026-03-08 by ana"


def test_an_expired_waiver_carries_nothing(ledger: Ledger) -> None:
    waive(ledger, "a", days=0)
    waive(ledger, "b", days=0)
    with pytest.raises(LedgerError, match="gate is failed"):
        check(ledger, record(num_mismatched=1), replace(SITE, now=NOW + timedelta(hours=1)))


def test_a_broken_measurement_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="gate is tool error"):
        check(ledger, record(b=ToolError(what="b", error="ValueError")))


def test_a_limit_that_needs_cuda_does_not_hold_up_a_promotion_on_the_machine_without_it(ledger: Ledger) -> None:
    assert check(ledger, record()) == "passed gate"


def test_stage_0_changes_nothing_and_need_not_be_promoted(tmp_path: Path) -> None:
    assert check(Ledger(tmp_path / "empty.jsonl"), record()) == "passed gate"
    with pytest.raises(LedgerError, match="expected one of"):
        check(Ledger(tmp_path / "empty.jsonl"), record(STAGES[0]))
