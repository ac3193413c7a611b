"""Whom the journals name, in situations seen on gloo and NCCL."""

import signal

from dualtrack.training.rank_blame import RankState, find_guilty
from dualtrack.training.rank_journal import JournalEntry, RankFailure

CLOSED = "RuntimeError: Connection closed by peer"


def state(
    rank: int, phase: str = "reduce", step: int = 5, *, entered: float = 10.0, error: str | None = None, own: bool = False, asked: bool = False,
    at: float = 20.0, alive: bool = False, exit_code: int | None = None, stopped: bool = False,
) -> RankState:  # fmt: skip
    entry = JournalEntry(rank=rank, pid=1, section=1, step=step, phase=phase, entered_seconds=entered)
    failure = None
    if error is not None:
        failure = RankFailure(
            rank=rank, error=error, traceback="trace", is_communication=not own, by_request=asked, at_seconds=at
        )
    return RankState(rank=rank, entry=entry, failure=failure, is_alive=alive, exit_code=exit_code, is_stopped=stopped)


def test_a_rank_gone_without_a_word_is_named_before_those_who_complain() -> None:
    blame = find_guilty([state(0, error=CLOSED), state(1, exit_code=-9), state(2, error=CLOSED)], "gloo")
    assert (blame.rank, "SIGKILL" in blame.cause, "step 5, phase reduce" in blame.cause) == (1, True, True)


def test_a_rank_that_left_with_exit_code_0_before_its_done_mark_is_named() -> None:
    assert find_guilty([state(0, error=CLOSED), state(1, "data", exit_code=0)], "gloo").rank == 1


def test_the_first_error_of_a_rank_itself_is_named_with_its_traceback() -> None:
    states = [
        state(0, error=CLOSED, at=1),
        state(1, error="ValueError: b", own=True, at=3),
        state(2, error="ValueError: a", own=True, at=2),
    ]
    blame = find_guilty(states, "gloo")
    assert (blame.rank, blame.traceback) == (2, "trace")


def test_a_late_rank_that_blames_the_innocent_is_named() -> None:
    states = [state(0, error=CLOSED, at=20), state(1, error=CLOSED, at=24), state(2, error=CLOSED, at=20.1)]
    assert find_guilty(states, "gloo").rank == 1


def test_a_sleeping_rank_without_a_complaint_is_named() -> None:
    assert find_guilty([state(0, error=CLOSED), state(1, alive=True), state(2, error=CLOSED)], "gloo").rank == 1
    assert (
        find_guilty(
            [state(0, error=CLOSED), state(1, error="told to end", asked=True), state(2, error=CLOSED)], "gloo"
        ).rank
        == 1
    )


def test_a_stopped_rank_is_named_as_stopped() -> None:
    blame = find_guilty([state(0, error=CLOSED), state(1, "forward", alive=True, stopped=True)], "gloo")
    assert (blame.rank, "SIGSTOP" in blame.cause) == (1, True)


def test_on_nccl_the_ranks_that_the_watchdog_aborts_are_victims() -> None:
    aborted = {"exit_code": -signal.SIGABRT}
    states = [state(0, **aborted), state(1, "forward", alive=True), state(2, **aborted)]  # type: ignore[arg-type]
    assert find_guilty(states, "nccl").rank == 1
    assert find_guilty(states, "gloo").rank == 0


def test_the_rank_furthest_behind_is_named_when_nobody_says_a_word() -> None:
    assert find_guilty([state(0, alive=True), state(1, "data", alive=True), state(2, alive=True)], "nccl").rank == 1


def test_ranks_that_never_came_up_are_named() -> None:
    missing = RankState(rank=1, entry=None, failure=None, is_alive=False)
    blame = find_guilty([state(0, "init", error="DistStoreError: wait timeout"), missing], "gloo")
    assert (blame.rank, "never came up" in blame.cause) == (1, True)


def test_a_rank_that_is_done_and_does_not_exit_is_named() -> None:
    blame = find_guilty([state(0, "done"), state(1, "done", alive=True)], "gloo")
    assert (blame.rank, "does not exit" in blame.cause) == (1, True)


def test_nobody_is_named_when_none_can_be_told_from_the_others() -> None:
    blame = find_guilty([state(rank, error=CLOSED) for rank in range(3)], "gloo")
    assert (blame.rank, "none can be told" in blame.cause) == (None, True)


def test_healthy_ranks_that_are_a_little_behind_a_dead_one_are_not_named() -> None:
    assert find_guilty([state(0, "optimizer", alive=True), state(1, "teardown", exit_code=-9)], "gloo").rank == 1
