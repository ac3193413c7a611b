"""Fresh processes: results come back, deaths get a name, nothing outlives its deadline."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dualtrack.facts.errors import TrialError
from dualtrack.measuring.trials import abba_order, run_in_fresh_process, run_or_raise

HERE = "tests.measuring.trial_targets"


def test_abba_order_is_counterbalanced() -> None:
    assert abba_order(4) == ["legacy first", "candidate first", "legacy first", "candidate first"]


def test_each_trial_is_a_process_of_its_own_that_has_not_touched_cuda() -> None:
    facts = [run_or_raise(f"{HERE}:describe_process", {}, 60.0) for _ in range(2)]
    assert facts[0]["pid"] != facts[1]["pid"]
    assert os.getpid() not in {fact["pid"] for fact in facts}
    assert not any(fact["cuda_initialised"] for fact in facts)
    assert all(fact["torch_was_preloaded"] for fact in facts)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("raise_value_error", "exception"),
        ("raise_memory_error", "out of memory"),
        ("raise_non_finite_loss", "non-finite loss"),
        ("kill_itself", "killed by signal SIGKILL"),
        ("leave_early", "ended without a result"),
    ],
)
def test_a_failed_trial_names_its_cause(function: str, cause: str) -> None:
    result, outcome = run_in_fresh_process(f"{HERE}:{function}", {}, 60.0)
    assert result is None
    assert (outcome.state, outcome.cause) == ("failed", cause)


def test_a_failed_trial_keeps_its_traceback() -> None:
    with pytest.raises(TrialError, match="expected the planted fault"):
        run_or_raise(f"{HERE}:raise_value_error", {}, 60.0)


def test_a_trial_past_its_deadline_is_killed_with_its_children() -> None:
    started = time.monotonic()
    _, outcome = run_in_fresh_process(f"{HERE}:sleep_with_child", {"marker": "dualtrack-sleeper-1"}, 3.0)
    assert outcome.cause == "deadline passed"
    assert time.monotonic() - started < 30
    assert not any(
        "dualtrack-sleeper-1" in " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    )


def test_a_trial_ends_when_its_parent_is_killed() -> None:
    script = f"from dualtrack.measuring.trials import run_in_fresh_process as r; r('{HERE}:sleep_with_child', {{'marker': 'dualtrack-sleeper-2'}}, 120.0)"
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        _wait_until(lambda: _sleepers("dualtrack-sleeper-2") > 1, 60.0)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(timeout=10)
    _wait_until(lambda: _sleepers("dualtrack-sleeper-2") == 0, 10.0)
    assert _sleepers("dualtrack-sleeper-2") == 0


def _sleepers(marker: str) -> int:
    return sum(marker in " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))


def _wait_until(holds: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)


def test_loader_workers_start_in_a_trial_as_they_do_in_the_trainer() -> None:
    """In an interpreter of its own: a forkserver that another test started keeps the environment of its start."""
    script = (
        f"from dualtrack.measuring.trials import run_or_raise as r; print(r('{HERE}:describe_workers', {{}}, 60.0))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'start_method': None, 'wait_policy': 'PASSIVE'}"
