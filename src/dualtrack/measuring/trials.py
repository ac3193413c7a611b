"""Fresh processes: one process is one trial, the unit of replication.

A trial is forked from a forkserver that has imported torch and never touched CUDA, so it starts in a fraction of a second and owes
nothing to the trial before it. The parent owns the deadline; a trial that passes it is killed with all its loader workers.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from dualtrack.facts.errors import TrialError
from dualtrack.facts.records import Outcome

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.utils.flop_counter",
    "numpy",
    "psutil",
    "pydantic",
    "safetensors.torch",
)
MAX_DETAIL_CHARACTERS = 4000

Order = Literal["legacy first", "candidate first"]


def abba_order(num_pairs: int) -> list[Order]:
    """Return who runs first in each pair: A B B A A B ..., so that a linear drift cancels over two pairs.

    Source: counterbalanced (ABBA) order; in simulation a 5 % drift showed 0.02 % instead of 2.5 % for all-old-then-all-new.
    """
    return ["legacy first" if pair % 2 == 0 else "candidate first" for pair in range(num_pairs)]


def run_in_fresh_process(target: str, arguments: dict[str, Any], deadline_seconds: float) -> tuple[Any, Outcome]:
    """Call `module:function` with keyword arguments in a fresh process and return its result and how it ended.

    Args:
        target: `package.module:function`; arguments and result cross by pickle, so keep them plain.
        arguments: Keyword arguments.
        deadline_seconds: After this long the process and everything it started are killed.

    Returns:
        The result (None unless the outcome's state is `completed`) and the `Outcome`, with a named cause on failure. This function does
        not raise for anything that happens in the trial: a crash is data.
    """
    # a waiting OpenMP thread must not spin: where loader workers share the cores with the trainer, 64 small steps took 6.6 s of CPU instead of 0.7
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = multiprocessing.get_context("forkserver")
    start_method = multiprocessing.get_start_method(allow_none=True)
    context.set_forkserver_preload(list(PRELOAD))
    receiver, sender = context.Pipe(duplex=False)
    alive_reader, alive_writer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="dualtrack-trial-") as scratch:
        stderr_path = Path(scratch) / "stderr"
        started = time.monotonic()
        process = context.Process(
            target=_run, args=(target, arguments, sender, alive_reader, (str(stderr_path), start_method))
        )
        with _main_module_left_alone():
            process.start()
        sender.close()
        alive_reader.close()
        try:
            message = _receive(receiver, deadline_seconds)
            process.join(timeout=max(1.0, min(30.0, deadline_seconds)) if message is not None else 5.0)
            late = process.is_alive()
        finally:
            if process.pid is not None:
                _kill_group(process.pid)
            process.join(timeout=10.0)
            alive_writer.close()
            receiver.close()
        seconds = time.monotonic() - started
        stderr = stderr_path.read_text(errors="replace")[-MAX_DETAIL_CHARACTERS:] if stderr_path.exists() else ""
    return _judge_end(message, process.exitcode, late, seconds, stderr)


def run_or_raise(target: str, arguments: dict[str, Any], deadline_seconds: float) -> Any:
    """Do the same for work that has to succeed, and return its result.

    Raises:
        TrialError: The process failed; the message carries cause and traceback.
    """
    result, outcome = run_in_fresh_process(target, arguments, deadline_seconds)
    if outcome.state != "completed":
        raise TrialError(
            f"{target} failed in its process ({outcome.cause}, after {outcome.seconds:.1f} s):\n{outcome.detail}"
        )
    return result


@contextlib.contextmanager
def _main_module_left_alone() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in the trial: targets are importable modules, the script is not needed."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def _receive(receiver: Connection, deadline_seconds: float) -> tuple[str, Any] | None:
    """Wait for the trial's one message; None when it died without one or the deadline passed."""
    if not receiver.poll(deadline_seconds):
        return ("deadline", None)
    try:
        message: tuple[str, Any] = receiver.recv()
    except EOFError:
        return None
    return message


def _judge_end(
    message: tuple[str, Any] | None, exit_code: int | None, late: bool, seconds: float, stderr: str
) -> tuple[Any, Outcome]:
    kind, content = message if message is not None else ("died", None)
    if kind == "result" and not late and exit_code == 0:
        return content, Outcome(state="completed", exit_code=0, seconds=seconds)
    if kind == "deadline":
        cause, detail = "deadline passed", stderr
    elif kind == "error":
        cause, detail = content if content is not None else ("exception", stderr)
    elif kind == "result":
        cause, detail = (
            "unclean exit",
            f"the result was delivered, then the process {'hung' if late else 'failed'} at its end\n{stderr}",
        )
    elif exit_code is not None and exit_code < 0:
        cause, detail = f"killed by signal {signal.Signals(-exit_code).name}", stderr
    else:
        cause, detail = "ended without a result", stderr
    return None, Outcome(
        state="failed", cause=cause, detail=detail[-MAX_DETAIL_CHARACTERS:], exit_code=exit_code, seconds=seconds
    )


def _kill_group(pid: int) -> None:
    """Kill what is left of the trial's process group; the group is gone after a clean end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _run(
    target: str,
    arguments: dict[str, Any],
    sender: Connection,
    alive_reader: Connection,
    parent: tuple[str, str | None],
) -> None:
    """Run in the fresh process: own process group, stderr to a file, one message back.

    multiprocessing hands its own start method on to its children; the caller's is put back, or the legacy loader would start its workers in
    another way than it does in the trainer (and seconds slower).
    """
    stderr_path, start_method = parent
    multiprocessing.set_start_method(start_method, force=True)  # type: ignore[arg-type, unused-ignore] # None puts the platform's default back
    os.setpgrp()
    descriptor = os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    threading.Thread(target=_end_with_parent, args=(alive_reader,), daemon=True).start()
    try:
        module_name, _, function_name = target.partition(":")
        result = getattr(importlib.import_module(module_name), function_name)(**arguments)
    except BaseException as error:  # noqa: BLE001 (whatever ended the trial is its result)
        sender.send(("error", (_name_cause(error), traceback.format_exc())))
    else:
        sender.send(("result", result))
    finally:
        sender.close()


def _end_with_parent(alive_reader: Connection) -> None:
    """End the whole group when the parent is gone: its end of the pipe closes even on kill -9."""
    with contextlib.suppress(OSError):
        alive_reader.poll(None)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _name_cause(error: BaseException) -> str:
    names: Sequence[str] = [kind.__name__ for kind in type(error).__mro__]
    if "OutOfMemoryError" in names or "MemoryError" in names:
        return "out of memory"
    if "NonFiniteLoss" in names:
        return "non-finite loss"
    if "LoaderError" in names or "DataLoader worker" in str(error):
        return "loader error"
    return "exception"
