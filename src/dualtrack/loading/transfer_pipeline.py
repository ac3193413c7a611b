"""One epoch on its way to the device: pull host batches, copy them ahead on the side stream, deliver them in order.

An error takes the place of its batch in the queue and is raised there; nothing after it is pulled. Looking ahead starts with the second
batch and only after a pull has been seen to leave the global random generators alone, because a look-ahead that draws would change what the
training step draws next.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dualtrack.facts.errors import PrefetchError
from dualtrack.loading.batch_layout import PLAIN_TYPES, map_leaves, why_not_staged
from dualtrack.loading.shadow_generators import capture_generators
from dualtrack.loading.transfer_device import CopyPair, DeadlinePassed, Transfer, TransferDevice
from dualtrack.loading.transfer_source import HostPuller
from dualtrack.loading.transfer_stats import TransferClock, TransferCounts

LOOK_AHEAD_UNPROVEN = "it starts with the second batch of an epoch"
LOOK_AHEAD_DRAWS = (
    "fetching a batch draws from torch's, numpy's or random's global generator in this process, so fetching ahead would change the draws; "
    "give the loader workers (num_workers > 0) or generators of its own"
)


@dataclass
class Staged:
    """A batch whose copy is queued, or the error that took its place."""

    position: int
    host: Any = None
    """The host batch, for cutting tensors out of `buffer`; its slot is given back already."""
    buffer: torch.Tensor | None = None
    """uint8 `[num_bytes]` on the device, None for a batch that was copied leaf by leaf."""
    batch: Any = None
    """What the consumer gets; valid on the consumer's stream once it was delivered."""
    transfer: Transfer | None = None
    destinations: tuple[torch.Tensor, ...] = ()
    allocated_for: Any = None
    num_bytes: int = 0
    is_pageable: bool = False
    passed_through: dict[str, int] = field(default_factory=dict)
    error: BaseException | None = None
    companion: Any = None
    """What `beside_copy` made of the same host batch."""


class TransferPipeline:
    """Owns the epoch's puller and what is in flight until `close`."""

    def __init__(
        self,
        puller: HostPuller,
        device: TransferDevice,
        depth: int,
        clock: TransferClock,
        counts: TransferCounts,
        beside_copy: Callable[[Any, Callable[[], None]], Any] | None = None,
    ) -> None:
        """Begin an epoch; nothing is pulled yet.

        Args:
            puller: The epoch's source.
            device: Copies and orders.
            depth: Batches in flight while a step computes.
            clock: Takes the events of delivered batches.
            counts: Sums that outlive the epoch.
            beside_copy: Called with the host batch and a function that queues its copy; it must call that function once, and what it returns
                stays with the batch as its `companion`. This is how a host batch that is fetched once reaches a second copy path.
        """
        self._puller, self._device, self._depth, self._clock, self._counts = puller, device, depth, clock, counts
        self._beside_copy = beside_copy
        self._queue: deque[Staged] = deque()
        self._draining: deque[tuple[Any, Any]] = deque()
        self._num_pulled = 0
        self._is_over = False
        self.look_ahead_note: str | None = LOOK_AHEAD_UNPROVEN
        counts.num_epochs += 1

    @property
    def num_in_flight(self) -> int:
        """Batches in the queue."""
        return len(self._queue)

    @property
    def look_ahead(self) -> int:
        """Batches that may be in flight while a step computes."""
        return self._depth if self.look_ahead_note is None else 0

    def next(self) -> Staged | None:
        """Return the next batch, ordered before the consumer's current stream, or None at the end of the epoch.

        Raises:
            PrefetchError: The batch's copy failed, or no host batch came in time.
            BaseException: What the source raised for this batch, with its traceback.
        """
        ready = self._clock.before_wait()
        self._counts.num_asked += 1
        self._counts.queue_depths += len(self._queue)
        self.fill(1)
        self.fill(self.look_ahead + 1)
        if not self._queue:
            return None
        staged = self._queue[0]
        if staged.error is not None:  # it stays at the head: asking again never gives an older or a younger batch
            raise staged.error
        self._arrive(staged, ready)
        self._queue.popleft()
        return staged

    def _arrive(self, staged: Staged, ready: Any) -> None:
        """Order the batch before the consumer's stream; small leaves get a storage of their own there, behind the copy."""
        if staged.transfer is not None:
            self._device.deliver(staged.transfer, staged.destinations, staged.allocated_for)
            self._clock.after_wait(staged.transfer, ready)
        if staged.buffer is not None:
            staged.batch = self._cut(staged, staged.buffer, "small")
        self._counts.note_delivered(staged.num_bytes, staged.is_pageable, staged.passed_through)

    def raw(self, staged: Staged) -> Any:
        """Return a delivered batch as views of what was copied, valid behind `staged.transfer.end` on any stream: for comparisons."""
        return staged.batch if staged.buffer is None else self._cut(staged, staged.buffer, "none")

    def _cut(self, staged: Staged, buffer: torch.Tensor, own: Literal["none", "small"]) -> Any:
        batch = staged.host.unpack(buffer, own=own)
        return map_leaves(self._follow, batch) if staged.passed_through else batch

    def fill(self, num_batches: int) -> None:
        """Pull and queue copies until `num_batches` are in flight or the epoch has no more."""
        while len(self._queue) < num_batches and not self._is_over:
            self._pull_one()
        while self._draining and self._draining[0][0].query():
            self._draining.popleft()

    def _pull_one(self) -> None:
        position = self._num_pulled
        before = capture_generators()
        started = time.monotonic()
        try:
            reply = self._puller.pull()
        except PrefetchError as error:
            self._fail(position, error)
            return
        finally:
            self._counts.stall_seconds += time.monotonic() - started
        self._num_pulled += 1
        if reply.kind == "end":
            self._is_over = True
        elif reply.kind == "error":
            self._fail(position, reply.content)
        else:
            if not before.equals(capture_generators()):
                self.look_ahead_note = LOOK_AHEAD_DRAWS if position else LOOK_AHEAD_UNPROVEN
            elif self.look_ahead_note == LOOK_AHEAD_UNPROVEN and position:
                self.look_ahead_note = None
            self._queue.append(self._stage(position, reply.content))

    def _fail(self, position: int, error: BaseException) -> None:
        error.add_note(
            f"batch {position} of epoch {self._counts.num_epochs - 1} took this error's place in the prefetcher"
        )
        self._counts.num_errors += 1
        self._is_over = True
        self._queue.append(Staged(position, error=error))

    def _stage(self, position: int, host: Any) -> Staged:
        """Queue one batch's copies; a failure takes the batch's place."""
        staged = Staged(position, allocated_for=self._device.current_stream())
        try:
            if self._beside_copy is None:
                self._copy(staged, host)
            else:
                staged.companion = self._beside_copy(host, lambda: self._copy(staged, host))
        except Exception as error:  # noqa: BLE001 (it becomes the batch's error)
            self._is_over = True
            self._counts.num_errors += 1
            kind = DeadlinePassed if isinstance(error, TimeoutError) else PrefetchError
            failed = kind(f"the copy of batch {position} failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            if (
                staged.transfer is not None
            ):  # the copy is queued, what failed came after it: its memory goes back behind it
                self._device.deliver(staged.transfer, staged.destinations, staged.allocated_for)
            return Staged(position, error=failed)
        finally:
            # whatever happened, the slot returns only when no copy can read it any more
            host.release_after(staged.transfer.end if staged.transfer is not None else self._device.record())
        return staged

    def _copy(self, staged: Staged, host: Any) -> None:
        """Copy the packed bytes at once and cut the batch out of them, or copy leaf by leaf what is not packed."""
        if host.packed is None:
            self._copy_leaves(staged, host)
            return
        staged.host, staged.num_bytes = host, host.num_bytes
        staged.is_pageable = host.num_bytes > 0 and not self._device.is_asynchronous(host.packed)
        staged.buffer = self._device.empty(host.num_bytes)
        staged.destinations = (staged.buffer,)
        staged.transfer = self._device.copy([CopyPair(staged.buffer, host.packed)] if host.num_bytes else [])
        staged.passed_through = dict(host.passed_through)

    def _copy_leaves(self, staged: Staged, host: Any) -> None:
        pairs: list[CopyPair] = []
        passed_through: Counter[str] = Counter()

        def copy_leaf(leaf: Any) -> Any:
            if type(leaf) in PLAIN_TYPES:
                return leaf
            reason = why_not_staged(leaf)
            if reason is not None or leaf.requires_grad:
                passed_through[reason or "tensor with requires_grad"] += 1
                return self._follow(leaf)
            pair = CopyPair(self._device.empty_like(leaf), leaf)
            pairs.append(pair)
            return pair.destination

        batch = map_leaves(copy_leaf, host.views())
        staged.is_pageable = host.is_pageable or not all(self._device.is_asynchronous(pair.source) for pair in pairs)
        staged.destinations = tuple(pair.destination for pair in pairs)
        staged.transfer = self._device.copy(pairs)
        staged.num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in staged.destinations)
        staged.passed_through = dict(passed_through)
        staged.batch = batch
        self._draining.append((staged.transfer.end, host))  # page-locked sources stay alive until their copies are done

    def _follow(self, leaf: Any) -> Any:
        """Move a tensor that the side stream can't carry, as `.to(device)` does in the legacy path."""
        return leaf.to(self._device.device) if isinstance(leaf, torch.Tensor) else leaf

    def close(self) -> bool:
        """End the epoch: what was not delivered is dropped behind its copies. Twice is fine.

        Returns:
            False when the source hangs and its thread was left behind.
        """
        self._is_over = True
        while self._queue:
            staged = self._queue.popleft()
            if (
                staged.transfer is not None
            ):  # else the block could be handed out again while the copy still writes into it
                self._device.deliver(staged.transfer, staged.destinations, staged.allocated_for)
        return self._puller.close()
