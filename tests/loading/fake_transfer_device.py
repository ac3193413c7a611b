"""A transfer device with a virtual clock: copies land late, streams are names, and any operation can fail at its n-th call."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from dualtrack.loading.transfer_device import CopyPair, Transfer, TransferDevice

UNWRITTEN = 0xEE


def join_helper_threads(before: list[threading.Thread], deadline_seconds: float = 20.0) -> None:
    """Wait until every source that was made to hang since `before` has ended: a thread that wakes up at the interpreter's exit can abort it."""
    limit = time.monotonic() + deadline_seconds
    for thread in set(threading.enumerate()) - set(before):
        thread.join(max(0.0, limit - time.monotonic()))


class FakeEvent:
    """Completes when somebody is ordered behind it or has polled it often enough; completing runs the copies."""

    def __init__(self, device: "FakeTransferDevice", seconds: float, pairs: Sequence[CopyPair] = ()) -> None:
        self.device, self.seconds, self.pairs = device, seconds, list(pairs)
        self.polls_left = device.num_polls
        self.is_done = False

    def query(self) -> bool:
        if self.device.hangs:
            return False
        if self.polls_left and not self.is_done:
            self.polls_left -= 1
            return False
        self.complete()
        return True

    def synchronize(self) -> None:
        self.complete()

    def complete(self) -> None:
        if not self.is_done:
            self.is_done = True
            for destination, source in self.pairs:
                destination.copy_(source)
            self.pairs = []


class FakeTransferDevice(TransferDevice):
    """Slow (`num_polls`, `copy_seconds`), hanging (`hangs`) or failing (`fail_at`) transfers in host memory."""

    mode = "fake"

    def __init__(
        self, num_polls: int = 0, copy_seconds: float = 0.0, fail_at: dict[tuple[str, int], BaseException] | None = None
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.num_polls, self.copy_seconds, self.fail_at = num_polls, copy_seconds, fail_at or {}
        self.hangs = False
        self.stream = "consumer"
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[Any, ...]] = []
        self.consumer_seconds = self.side_seconds = 0.0
        self.sources_are_asynchronous = True

    def compute(self, seconds: float) -> None:
        """Let the consumer's stream be busy."""
        self.consumer_seconds += seconds

    def _call(self, name: str) -> None:
        count = self.calls[name]
        self.calls[name] += 1
        if (name, count) in self.fail_at:
            raise self.fail_at[name, count]

    def current_stream(self) -> str:
        return self.stream

    def empty(self, num_bytes: int) -> torch.Tensor:
        self._call("empty")
        self.log.append(("allocate", self.stream))
        return torch.full((num_bytes,), UNWRITTEN, dtype=torch.uint8)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        self._call("empty_like")
        self.log.append(("allocate", self.stream))
        return torch.empty_like(tensor)

    def copy(self, pairs: Sequence[CopyPair]) -> Transfer:
        self._call("copy")
        self.log.append(("side waits for", self.stream))
        start_seconds = max(self.side_seconds, self.consumer_seconds)
        self.side_seconds = start_seconds + self.copy_seconds
        return Transfer(FakeEvent(self, start_seconds), FakeEvent(self, self.side_seconds, pairs))

    def deliver(self, transfer: Transfer, destinations: Sequence[torch.Tensor], allocated_for: Any) -> None:
        self._call("deliver")
        self.log.append(("waits for copy", self.stream))
        if self.stream != allocated_for:
            self.log.append(("record_stream", self.stream, len(destinations)))
        transfer.end.complete()
        self.consumer_seconds = max(self.consumer_seconds, transfer.end.seconds)

    def is_asynchronous(self, source: torch.Tensor) -> bool:
        return self.sources_are_asynchronous

    def mark(self) -> FakeEvent:
        return FakeEvent(self, self.consumer_seconds)

    def seconds_between(self, first: FakeEvent, second: FakeEvent) -> float:
        assert first.is_done and second.is_done, "a device refuses the time between events that have not completed"
        return second.seconds - first.seconds

    def beside(self, *after: Any) -> contextlib.AbstractContextManager[None]:
        for event in after:
            event.complete()
        return contextlib.nullcontext()

    def record(self) -> FakeEvent:
        return FakeEvent(self, self.consumer_seconds)
