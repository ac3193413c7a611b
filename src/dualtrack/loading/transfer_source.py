"""Where host batches come from: a pooled loader's leased slots, or any iterable, asked for one at a time with a deadline.

The source runs on a helper thread, but in lock-step: the thread works only while the consumer waits for it. So draws from the global random
generators keep legacy's order, and yet no fetch can hang the consumer. An error of the source is a value until the consumer takes it.
"""

import contextlib
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from dualtrack.facts.errors import PrefetchError
from dualtrack.loading.transfer_device import DeadlinePassed

LIVENESS_CHECK_SECONDS = 1.0
CLOSE_SECONDS = 5.0  # joining the workers of an abandoned epoch
HUNG_CLOSE_SECONDS = 0.5  # a source that still owes an answer is given this long before it is left to its daemon thread


class PlainHostBatch:
    """A batch of any loader, with the interface of a leased one: nothing is packed and nothing is given back."""

    packed: None = None
    num_bytes = 0
    is_pageable = False  # not known: each leaf is looked at when it is copied

    def __init__(self, index: int, batch: Any) -> None:
        """Hold the batch at its position in the epoch."""
        self.index = index
        self._batch = batch

    def views(self) -> Any:
        """Return the batch itself."""
        return self._batch

    def release(self) -> None:
        """Do nothing."""

    def release_after(self, event: Any) -> None:
        """Do nothing; who copies from page-locked memory without a pool keeps the batch until the copy is done."""


def host_batches(loader: Any) -> Iterator[Any]:
    """Start an epoch of `loader` and return its host batches: leased ones when it offers them, else its own, wrapped."""
    if hasattr(loader, "host_batches"):
        leased: Iterator[Any] = loader.host_batches()
        return leased
    return map(PlainHostBatch, itertools.count(), iter(loader))


class Reply(NamedTuple):
    """What the source answered."""

    kind: Literal["batch", "error", "end"]
    content: Any = None


class HostPuller:
    """One epoch of one source behind a helper thread. The thread ends with the epoch, on `close`, or when the puller is dropped."""

    def __init__(self, open_source: Callable[[], Iterator[Any]], deadline_seconds: float, device: torch.device) -> None:
        """Start the thread; the source is opened at the first pull.

        Args:
            open_source: Starts the epoch, on the helper thread, which holds it: it must not refer to the puller's owner.
            deadline_seconds: The longest wait for one batch, the first one with its worker start included.
            device: Made current on the helper thread, so that a loader's pin thread does not open a context on GPU 0.
        """
        self._deadline_seconds = deadline_seconds
        self._requests: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._is_asked = False
        self._thread = threading.Thread(
            target=_serve, args=(open_source, device, self._requests, self._replies), name="dualtrack-host-batches", daemon=True
        )  # fmt: skip
        self._thread.start()
        # the thread must not keep the puller alive, else a dropped epoch would leave thread, workers and descriptors behind
        weakref.finalize(self, self._requests.put, None).atexit = False

    def pull(self) -> Reply:
        """Return the next batch, the error that took its place, or the end. An interrupt of the wait loses nothing: the next call goes on.

        Raises:
            DeadlinePassed: Nothing came in time.
            PrefetchError: The helper thread is gone.
        """
        if not self._is_asked:
            self._is_asked = True
            self._requests.put(torch.is_grad_enabled())
        limit = time.monotonic() + self._deadline_seconds
        while True:
            left = limit - time.monotonic()
            if left <= 0:
                raise DeadlinePassed(
                    f"no host batch came within {self._deadline_seconds:g} s; a loader that needs longer needs a larger deadline_seconds"
                )
            try:
                reply = self._replies.get(timeout=min(left, LIVENESS_CHECK_SECONDS))
            except queue.Empty:
                if not self._thread.is_alive() and self._replies.empty():
                    raise PrefetchError(
                        "expected a living thread to wait for, it ended without an answer; was the loader closed elsewhere?"
                    ) from None
                continue
            self._is_asked = False
            return reply

    def close(self) -> bool:
        """End the epoch; the thread closes the source. Twice is fine.

        Returns:
            False when the source hangs and its daemon thread was left behind.
        """
        self._requests.put(None)
        self._thread.join(timeout=HUNG_CLOSE_SECONDS if self._is_asked else CLOSE_SECONDS)
        return not self._thread.is_alive()


def _serve(
    open_source: Callable[[], Iterator[Any]],
    device: torch.device,
    requests: "queue.SimpleQueue[bool | None]",
    replies: "queue.SimpleQueue[Reply]",
) -> None:
    """Answer requests until the epoch ends or None comes; each carries the consumer's grad mode, which is a setting of the thread."""
    iterator: Iterator[Any] | None = None
    is_over = False
    while not is_over and (grad_enabled := requests.get()) is not None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with torch.set_grad_enabled(grad_enabled):
                if iterator is None:
                    iterator = open_source()
                replies.put(Reply("batch", next(iterator)))
        except StopIteration:
            is_over = True
            replies.put(Reply("end"))
        except BaseException as error:  # noqa: BLE001 (whatever ended the fetch is raised at its batch, in the consumer's thread)
            is_over = True
            replies.put(Reply("error", error))
    close = getattr(iterator, "close", None)
    with contextlib.suppress(
        Exception
    ):  # the epoch is over for everybody; an error of closing its leftovers has no batch to belong to
        if close is not None:
            close()
    del iterator
