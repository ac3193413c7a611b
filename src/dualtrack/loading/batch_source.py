"""The legacy `DataLoader` itself, with one thing replaced: its collate function. Samplers, workers, seeds and errors stay its own.

A shallow copy of the loader shares dataset, samplers and generator with the original, so the random draws are legacy's, at the moments
legacy makes them. Waiting is the second thing that is ours: while the trainer waits for a batch it also takes back finished copies, and
it stops at a deadline.
"""

import copy
import os
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader

from dualtrack.facts.errors import LoaderError, PoolError
from dualtrack.loading.pinned_pool import PinnedPool
from dualtrack.loading.slot_collate import CollatedBatch, SlotCollate
from dualtrack.loading.slot_states import SlotState

COPY_POLL_SECONDS = 1e-3  # while a copy is in flight: a worker may wait for its slot
IDLE_POLL_SECONDS = 0.2  # otherwise: how often the deadline, a close() and the workers are looked at
DEATH_NOTICE_SECONDS = 1.0
NUM_SHUTDOWN_TRIES = 3  # torch's signal handler may raise once for each dead worker in the middle of a shutdown


def refuse_unpreservable(loader: Any) -> None:
    """Refuse a loader whose behaviour a wrapper can't keep.

    Raises:
        LoaderError: With the reason.
    """
    if not isinstance(loader, DataLoader):
        raise LoaderError(
            f"expected a torch.utils.data.DataLoader to wrap, got {type(loader).__module__}.{type(loader).__qualname__}"
        )
    kind = type(loader)
    for name in ("__iter__", "_get_iterator"):
        if getattr(kind, name) is not getattr(DataLoader, name):
            raise LoaderError(
                f"{kind.__qualname__} overrides {name}, so what it does to batches on the way can't be preserved; "
                "wrap the plain DataLoader inside it, or keep the legacy path"
            )
    if not loader.in_order:
        raise LoaderError(
            "in_order=False gives batches in the order of arrival, which no two runs share; set in_order=True or keep the legacy path"
        )
    if loader.num_workers > 0 and not loader.prefetch_factor:
        raise LoaderError(
            f"expected prefetch_factor of at least 1 with workers, got {loader.prefetch_factor}; legacy fails on it, too"
        )


class BatchSource:
    """Workers and iterator of one pooled loader; at most one iteration at a time."""

    def __init__(self, loader: "DataLoader[Any]", pool: PinnedPool, collate: SlotCollate) -> None:
        """Copy `loader` around `collate`; nothing is started."""
        self._loader = copy.copy(loader)
        self._loader.collate_fn = collate
        self._loader.pin_memory = False  # the slots are page-locked already
        self._loader._iterator = None  # persistent workers of the original stay the original's
        self._pool = pool
        self._collate = collate
        self._iterator: Any = None
        self._owner = os.getpid()
        self._arrived: set[int] = set()
        self._is_restarting = False
        self._wait_started: float | None = None
        self.consumer_wait_seconds = 0.0

    @property
    def keeps_workers(self) -> bool:
        """True when workers live on from epoch to epoch."""
        return self._loader.persistent_workers and self._loader.num_workers > 0

    def start(self) -> None:
        """Begin an epoch, as `iter(loader)` does: draws the base seed, starts or resets the workers, and primes them."""
        if self._iterator is not None and not self.keeps_workers:
            self.stop()
        self._collate.generation = self._pool.states.generation
        is_restart = self._iterator is not None
        self._is_restarting = is_restart
        self._drop_arrived()
        try:
            self._wait_started = time.monotonic()
            self._iterator = iter(self._loader)
        except Exception as error:
            named = self._name_death(error)
            self.stop()
            if named is None:
                raise
            raise named from error
        except BaseException:
            self.stop()
            raise
        finally:
            self._is_restarting = False
            self._wait_started = None
        if not is_restart and self._loader.num_workers > 0:
            self._watch(self._iterator)

    def _watch(self, iterator: Any) -> None:
        """Put our wait around the only place where the iterator waits for its workers."""
        receive = type(iterator)._try_get_data
        this, its = weakref.ref(self), weakref.ref(iterator)  # weak, since a cycle would put off the end of both

        def watched(timeout: float = IDLE_POLL_SECONDS) -> tuple[bool, Any]:
            source = this()
            if source is None:
                raise PoolError("the pooled loader is gone; open a new one to go on")
            return source._receive(lambda step_seconds: receive(its(), step_seconds), timeout)

        iterator._try_get_data = watched

    def next(self) -> CollatedBatch:
        """Return the next batch of the epoch.

        Raises:
            StopIteration: The epoch is over.
            LoaderError: A worker died, or no batch came within the deadline.
            Exception: What dataset or collate raised, with the original traceback; the iteration may go on behind it.
        """
        started = self._wait_started = time.monotonic()
        try:
            batch: CollatedBatch = next(self._iterator)
        except StopIteration:
            if not self.keeps_workers:
                self.stop()
            raise
        except Exception as error:
            named = self._name_death(error)
            if named is None:
                raise
            raise named from error
        finally:
            self._wait_started = None
            self.consumer_wait_seconds += time.monotonic() - started
        if batch.slot is not None:
            self._arrived.discard(batch.slot)
        return batch

    def _receive(self, receive: Callable[[float], tuple[bool, Any]], timeout: float) -> tuple[bool, Any]:
        """Wait for one message of the workers in short steps; `receive` looks after dead workers at the end of each."""
        legacy_deadline = time.monotonic() + timeout
        while True:
            self._pool.check_open()
            self._pool.reap()
            self._check_deadline()
            left = max(legacy_deadline - time.monotonic(), 0.0)
            step = COPY_POLL_SECONDS if self._pool.has_copies_in_flight else IDLE_POLL_SECONDS
            succeeded, message = receive(min(step, left))
            if succeeded:
                self._note_arrival(message)
            if succeeded or step >= left:
                return succeeded, message

    def _note_arrival(self, message: Any) -> None:
        batch = message[1]
        if isinstance(batch, CollatedBatch) and batch.slot is not None:
            if self._is_restarting:  # the loader drops it, as legacy drops what an abandoned epoch had fetched
                self._pool.states.move(batch.slot, (SlotState.READY,), SlotState.FREE)
            else:
                self._arrived.add(batch.slot)

    def _drop_arrived(self) -> None:
        for slot in self._arrived:
            self._pool.states.move(slot, (SlotState.READY,), SlotState.FREE)
        self._arrived.clear()

    def _check_deadline(self) -> None:
        limit_seconds = self._pool.settings.wait_seconds
        if self._wait_started is not None and time.monotonic() - self._wait_started > limit_seconds:
            raise LoaderError(
                f"no batch came within {limit_seconds:g} s although {self._loader.num_workers} workers are alive; "
                f"a dataset that needs longer needs a larger wait_seconds; {self._pool.describe()}"
            )

    def _name_death(self, error: Exception) -> LoaderError | None:
        """Return the error that names dead workers, the iteration being stopped then; None when all are well."""
        dead: list[str] = []
        for _ in range(NUM_SHUTDOWN_TRIES):
            try:
                dead = self._find_dead_workers(error)
                if not dead and "DataLoader worker (pid" not in str(error):
                    return None
                self.stop()
                break
            except RuntimeError:
                continue  # torch's signal handler reports a dead worker wherever the trainer happens to be, also here
        return LoaderError(
            f"expected {self._loader.num_workers} living workers, {len(dead)} died ({', '.join(dead) or error}); look for the system's "
            "out-of-memory killer or a crash in native code, then iterate again"
        )

    def _find_dead_workers(self, error: Exception) -> list[str]:
        workers = list(getattr(self._iterator, "_workers", ()))
        if workers and isinstance(error, OSError | EOFError) and "DataLoader worker process" not in str(error):
            ending = wait([worker.sentinel for worker in workers], DEATH_NOTICE_SECONDS)
            for worker in workers:
                if worker.sentinel in ending:
                    worker.join(DEATH_NOTICE_SECONDS)  # its pipes close a moment before it has an exit code
        ends = [(worker.pid, worker.exitcode) for worker in workers]
        return [f"pid {pid} with exit code {code}" for pid, code in ends if code not in (None, 0)]

    def stop(self) -> None:
        """End the iteration: workers leave, their slots are free again. Leased slots stay with the consumer. Twice is fine."""
        for _ in range(NUM_SHUTDOWN_TRIES - 1):
            try:
                return self._stop_once()
            except RuntimeError:
                continue  # torch's signal handler reports a dead worker wherever the trainer happens to be, also here
        return self._stop_once()

    def _stop_once(self) -> None:
        if self._iterator is None or os.getpid() != self._owner:
            return
        if self._pool.is_open:
            self._pool.states.abandon_waits()
        if self._loader.num_workers > 0:
            _shut_down(self._iterator)
        self._iterator = self._loader._iterator = None
        self._arrived.clear()
        if self._pool.is_open:
            self._pool.reclaim()


def _shut_down(iterator: Any) -> None:
    """Join or end the workers now. Dropping the iterator is not enough: a traceback that somebody keeps would keep the workers."""
    workers = list(iterator._workers)
    iterator._shutdown_workers()
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()
