"""Exact fallback: what must be remembered of an epoch to read the legacy loader from any position of it again, and the reading itself.

A legacy loader is a function of the global generators' states where it was built and where its epoch began (and, for one that draws in this
process, before each fetch), of its own generators, and with persistent workers of every epoch before. With these, the batches in front of the
position are read again and dropped; the next one is the batch that an undisturbed legacy run would have given, with its augmentation.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self, final

import torch

from dualtrack.facts.errors import LoaderError
from dualtrack.loading.shadow_generators import GeneratorStates, drawing_from, generators_of, restore_generators

JOURNAL_VERSION = 1


@dataclass
class EpochStart:
    """One epoch as a loader sees it."""

    states: GeneratorStates
    """Global generators before `iter(loader)`."""
    own_states: tuple[torch.Tensor, ...] = ()
    """The loader's own generators at the same moment."""
    sampler_epoch: int | None = None
    """What `set_epoch` was called with."""
    fetch_states: dict[int, GeneratorStates] = field(default_factory=dict)
    """Global generators before the fetch at a position, where the loader may draw in this process."""
    num_fetched: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "states": self.states.to_plain(),
            "own_states": [state.tolist() for state in self.own_states],
            "sampler_epoch": self.sampler_epoch,
            "fetch_states": {str(position): states.to_plain() for position, states in self.fetch_states.items()},
            "num_fetched": self.num_fetched,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "EpochStart":
        """Rebuild it from `to_plain`."""
        return cls(
            states=GeneratorStates.from_plain(plain["states"]),
            own_states=tuple(torch.tensor(state, dtype=torch.uint8) for state in plain["own_states"]),
            sampler_epoch=plain["sampler_epoch"],
            fetch_states={
                int(position): GeneratorStates.from_plain(states) for position, states in plain["fetch_states"].items()
            },
            num_fetched=plain["num_fetched"],
        )


class Journal:
    """The epoch under way, and with persistent workers all before it; each costs about 10 KB."""

    def __init__(self, construction: GeneratorStates) -> None:
        """Begin where the loaders are built."""
        self.construction = construction
        self.epochs: list[EpochStart] = []

    @property
    def current(self) -> EpochStart:
        """The epoch under way."""
        return self.epochs[-1]

    def begin_epoch(self, states: GeneratorStates, loader: Any, sampler_epoch: int | None) -> None:
        """Note the start of an epoch, before `iter(loader)`; forget the earlier ones unless the loader's workers remember them."""
        if not keeps_workers(loader):
            self.epochs.clear()
        own_states = tuple(generator.get_state() for generator in generators_of(loader))
        self.epochs.append(EpochStart(states, own_states, sampler_epoch))

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "version": JOURNAL_VERSION,
            "construction": self.construction.to_plain(),
            "epochs": [epoch.to_plain() for epoch in self.epochs],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Journal":
        """Rebuild it from `to_plain`."""
        if plain.get("version") != JOURNAL_VERSION:
            raise ValueError(
                f"expected a journal of version {JOURNAL_VERSION}, got {plain.get('version')!r}; start the epoch anew"
            )
        journal = cls(GeneratorStates.from_plain(plain["construction"]))
        journal.epochs = [EpochStart.from_plain(epoch) for epoch in plain["epochs"]]
        return journal


def keeps_workers(loader: Any) -> bool:
    """Say whether the loader's workers, and the generators in them, live on from epoch to epoch."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "num_workers", 0) > 0


def set_sampler_epoch(loader: Any, epoch: int | None) -> None:
    """Call `set_epoch` on the loader's sampler, as a training script with a `DistributedSampler` does."""
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers.append(getattr(samplers[-1], "sampler", None))
    for sampler in {id(sampler): sampler for sampler in samplers}.values():
        setter = getattr(sampler, "set_epoch", None)
        if epoch is not None and callable(setter):
            setter(epoch)


def rebuild_loader(build: Callable[[], Any], journal: Journal) -> Any:
    """Build a loader that stands where the journal's current epoch begins; the global generators stay as they are.

    With persistent workers every earlier epoch is read again, because their generators go on from epoch to epoch.
    """
    with drawing_from(journal.construction):
        loader = build()
        if keeps_workers(loader):
            for epoch in journal.epochs[:-1]:
                read_from(loader, epoch, epoch.num_fetched, iter)
    return loader


def prepare_epoch(loader: Any, epoch: EpochStart) -> None:
    """Put the loader's own generators and its sampler where the epoch began.

    Raises:
        LoaderError: The loader has other generators than the one that began the epoch.
    """
    own_generators = generators_of(loader)
    if len(own_generators) != len(epoch.own_states):
        raise LoaderError(
            f"expected a loader with {len(epoch.own_states)} generators of its own, as the epoch began with, got {len(own_generators)}; "
            "legacy and candidate must wrap the same kind of loader"
        )
    for generator, state in zip(own_generators, epoch.own_states, strict=True):
        generator.set_state(state)
    set_sampler_epoch(loader, epoch.sampler_epoch)


def read_from(
    loader: Any, epoch: EpochStart, position: int, open_iterator: Callable[[Any], Iterator[Any]]
) -> Iterator[Any]:
    """Start an epoch of a loader from `rebuild_loader`, read the batches in front of `position` and drop them.

    The epoch's draws have been made when it began, so the global generators stay as they are.

    Args:
        loader: Stands at the epoch's start.
        epoch: From the journal.
        position: The next batch to come.
        open_iterator: `iter`, or what else starts an epoch of it.

    Raises:
        LoaderError: The loader ends before the position, or it is another kind of loader.
    """
    prepare_epoch(loader, epoch)
    with drawing_from(epoch.states):
        iterator = open_iterator(loader)
        for place in range(position):
            if place in epoch.fetch_states:
                restore_generators(epoch.fetch_states[place])
            batch = next(iterator, None)
            if batch is None:
                raise LoaderError(
                    f"expected to go on at batch {position}, the loader ends after {place}; did the dataset change?"
                )
            getattr(batch, "release", _nothing)()
    return iterator


def _nothing() -> None:
    """Release what was never leased."""


@final
class WorkerDeathsAsValues:
    """Keeps torch's SIGCHLD handler from raising in the middle of anybody's code while an epoch runs.

    A dead loader worker makes that handler raise RuntimeError wherever the main thread happens to be: in the training step, or inside the
    clause that handles the first error (seen in 5 of 12 trials, torch 2.13.0). Here the text is kept instead, and the loader's own look at
    its workers (every 5 s at the latest) raises where the batch is waited for. Only the main thread can install it; others need not.
    """

    def __init__(self) -> None:
        """Install nothing yet."""
        self.seen: list[str] = []
        self._wrapped: Any = None
        self._is_active = False

    def refresh(self) -> None:
        """Wrap the handler that is installed now; torch installs its own when the first worker starts."""
        if self._is_active and threading.current_thread() is threading.main_thread():
            current = signal.getsignal(signal.SIGCHLD)
            if current != self._handle and callable(current):
                self._wrapped = current
                signal.signal(signal.SIGCHLD, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._wrapped(number, frame)
        except RuntimeError as error:
            if not self._is_active:  # somebody's handler still calls this one after the epoch
                raise
            self.seen.append(str(error))

    def __enter__(self) -> Self:
        self._is_active = True
        self.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_active = False
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == self._handle:
            signal.signal(signal.SIGCHLD, self._wrapped)
