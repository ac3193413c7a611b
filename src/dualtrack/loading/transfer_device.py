"""The few device operations that moving a batch needs, behind one interface, so that most faults can be staged without a GPU.

Discipline: the destination is allocated for the consumer's current stream, the copy runs on one long-lived side stream, and events order the
two in both directions. Nothing is allocated under the side stream (such memory would be stranded there).
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import torch

from dualtrack.facts.errors import PrefetchError
from dualtrack.loading.page_locking import CopyEvent

FIRST_POLL_SECONDS = 2e-5
LONGEST_POLL_SECONDS = 1e-3


class DeadlinePassed(PrefetchError, TimeoutError):
    """A wait came to its deadline; what was waited for may still be hanging."""


class Transfer(NamedTuple):
    """One batch on its way: events on the side stream before and after its copies; `start` is None where time is not measured."""

    start: Any
    end: Any


class CopyPair(NamedTuple):
    """One copy."""

    destination: torch.Tensor
    source: torch.Tensor


class TransferDevice(ABC):
    """Allocates, copies and orders; owns its side streams."""

    mode: str
    """What kind of transfer this is, in the words that `stats()` shows."""

    def __init__(self, device: torch.device) -> None:
        """Belong to `device`."""
        self.device = device

    @abstractmethod
    def current_stream(self) -> Any:
        """Return the consumer's stream, as it is at this moment in the calling thread."""

    @abstractmethod
    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 `[num_bytes]` buffer that belongs to the consumer's current stream."""

    @abstractmethod
    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor of the same dtype, shape and dense strides, belonging to the consumer's current stream."""

    @abstractmethod
    def copy(self, pairs: Sequence[CopyPair]) -> Transfer:
        """Queue copies on the side stream, after all that is queued on the consumer's current stream, and return without waiting.

        The destinations may reuse blocks that kernels queued before still read; hence the order.
        """

    @abstractmethod
    def deliver(self, transfer: Transfer, destinations: Sequence[torch.Tensor], allocated_for: Any) -> None:
        """Order the consumer's current stream after a transfer.

        Args:
            transfer: From `copy`.
            destinations: Its destinations, in case the consumer has changed its stream since they were allocated.
            allocated_for: What `current_stream` returned then.
        """

    @abstractmethod
    def is_asynchronous(self, source: torch.Tensor) -> bool:
        """Say whether a copy from `source` runs behind the host's back: page-locked and dense."""

    @abstractmethod
    def mark(self) -> Any:
        """Record a timing event on the consumer's current stream; None where time is not measured."""

    @abstractmethod
    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the time from one completed timing event to another; negative when `second` came first."""

    @abstractmethod
    def beside(self, *after: Any) -> contextlib.AbstractContextManager[None]:
        """Run a block on another long-lived stream, ordered after `after`: work for comparison, which the training step need not wait for."""

    @abstractmethod
    def record(self) -> CopyEvent:
        """Record an event on the stream that is current in the calling thread."""

    def wait(self, event: CopyEvent, deadline_seconds: float, what: str) -> None:
        """Let the host wait for an event.

        Raises:
            DeadlinePassed: It did not complete in time; `what` is named.
        """
        limit = time.monotonic() + deadline_seconds
        pause = FIRST_POLL_SECONDS
        while not event.query():
            if time.monotonic() > limit:
                raise DeadlinePassed(
                    f"expected {what} to finish within {deadline_seconds:g} s, it did not; the device may hang"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)


@final
class CudaTransferDevice(TransferDevice):
    """CUDA: two side streams for the life of this object, one for copies and one for comparisons."""

    mode = "CUDA side stream"

    def __init__(self, device: torch.device, timing: bool = True) -> None:
        """Make the streams.

        Args:
            device: `cuda` or `cuda:n`; without an index the current one is taken for good.
            timing: Record timing events.
        """
        super().__init__(
            torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        )
        self._timing = timing
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._beside: torch.cuda.Stream | None = None

    def current_stream(self) -> torch.cuda.Stream:
        """See `TransferDevice`."""
        return torch.cuda.current_stream(self.device)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """See `TransferDevice`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `TransferDevice`."""
        return torch.empty_like(tensor, device=self.device)

    def copy(self, pairs: Sequence[CopyPair]) -> Transfer:
        """See `TransferDevice`."""
        consumer = self.current_stream()
        self._side.wait_stream(consumer)
        try:
            with torch.cuda.stream(self._side):
                start = self._event() if self._timing else None
                for destination, source in pairs:
                    destination.copy_(source, non_blocking=True)
                return Transfer(start, self._event())
        except BaseException:
            # copies before the failing one may run; their destinations go back to the consumer's stream only behind them
            consumer.wait_stream(self._side)
            raise

    def deliver(self, transfer: Transfer, destinations: Sequence[torch.Tensor], allocated_for: Any) -> None:
        """See `TransferDevice`."""
        consumer = self.current_stream()
        consumer.wait_event(transfer.end)
        if consumer != allocated_for:
            # a block freed by this consumer goes back to the stream it was allocated for; only the allocator can hold it until both are done
            for destination in destinations:
                destination.record_stream(consumer)

    def is_asynchronous(self, source: torch.Tensor) -> bool:
        """See `TransferDevice`."""
        return source.is_pinned() and torch.empty_like(source, device="meta").stride() == source.stride()

    def mark(self) -> Any:
        """See `TransferDevice`."""
        if not self._timing:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.current_stream())
        return event

    def seconds_between(self, first: Any, second: Any) -> float:
        """See `TransferDevice`."""
        return float(first.elapsed_time(second)) / 1e3

    @contextlib.contextmanager
    def beside(self, *after: Any) -> Iterator[None]:
        """See `TransferDevice`."""
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        for event in after:
            self._beside.wait_event(event)
        with torch.cuda.stream(self._beside):
            yield

    def record(self) -> CopyEvent:
        """See `TransferDevice`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.current_stream())
        return event

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=self._timing)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class CompletedEvent:
    """The event of work that was done before it was asked for."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


@final
class HostTransferDevice(TransferDevice):
    """No device: a copy is a copy in host memory, done when `copy` returns. It shows that bytes are right and says nothing of speed."""

    mode = "host copies: no CUDA device"

    def current_stream(self) -> None:
        """Return None: there is one order of work."""
        return

    def empty(self, num_bytes: int) -> torch.Tensor:
        """See `TransferDevice`."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `TransferDevice`."""
        return torch.empty_like(tensor, device="cpu")

    def copy(self, pairs: Sequence[CopyPair]) -> Transfer:
        """See `TransferDevice`."""
        for destination, source in pairs:
            destination.copy_(source)
        return Transfer(None, CompletedEvent())

    def deliver(self, transfer: Transfer, destinations: Sequence[torch.Tensor], allocated_for: Any) -> None:
        """See `TransferDevice`."""

    def is_asynchronous(self, source: torch.Tensor) -> bool:
        """Return True: no copy here waits for a device."""
        return True

    def mark(self) -> None:
        """Return None: time is not measured here."""
        return

    def seconds_between(self, first: Any, second: Any) -> float:
        """Refuse: there are no timing events."""
        raise PrefetchError("expected timing events of a CUDA device, host copies have none; read None as not measured")

    def beside(self, *after: Any) -> contextlib.AbstractContextManager[None]:
        """See `TransferDevice`."""
        return contextlib.nullcontext()

    def record(self) -> CopyEvent:
        """See `TransferDevice`."""
        return CompletedEvent()


def open_transfer_device(device: torch.device | str, timing: bool = True) -> TransferDevice:
    """Return the transfers of `device`.

    Raises:
        ValueError: The device is neither a CPU nor a CUDA device that is there.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return HostTransferDevice(device)
    if device.type != "cuda":
        raise ValueError(f"expected a cuda or cpu device, got {str(device)!r}")
    if not torch.cuda.is_available():
        raise ValueError(f"expected a CUDA device for device={str(device)!r}, torch sees none; pass device='cpu'")
    return CudaTransferDevice(device, timing)
