"""The three global random generators (torch, numpy, random), taken and put back as one, so that a shadow leaves no trace in them.

A shadow draws from a copy of the state that legacy drew from, and legacy's own state is put back afterwards.
"""

import base64
import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

PYTHON_STATE_WORDS = 625  # Mersenne Twister: 624 words and the position


class GeneratorStates(NamedTuple):
    """State of torch's CPU generator, of `numpy.random` and of `random` at one moment; about 10 KB."""

    torch_cpu: torch.Tensor
    numpy: tuple[str, np.ndarray[Any, np.dtype[np.uint32]], int, int, float]
    python: tuple[Any, ...]

    def equals(self, other: "GeneratorStates") -> bool:
        """Say whether all three generators would give the same draws from both states."""
        return (
            torch.equal(self.torch_cpu, other.torch_cpu)
            and self.python == other.python
            and self.numpy[0] == other.numpy[0]
            and self.numpy[2:] == other.numpy[2:]
            and bool((self.numpy[1] == other.numpy[1]).all())
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the states as JSON data, for a checkpoint."""
        version, words, gauss = self.python
        return {
            "torch_cpu": base64.b64encode(self.torch_cpu.numpy().tobytes()).decode(),
            "numpy": [self.numpy[0], base64.b64encode(self.numpy[1].astype("<u4").tobytes()).decode(), *self.numpy[2:]],
            "python": [version, base64.b64encode(np.asarray(words, dtype="<u4").tobytes()).decode(), gauss],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "GeneratorStates":
        """Rebuild states from `to_plain`."""
        kind, words, position, has_gauss, gauss = plain["numpy"]
        version, python_words, python_gauss = plain["python"]
        numpy_words = np.frombuffer(base64.b64decode(words), dtype="<u4").astype(np.uint32)
        python_state = tuple(np.frombuffer(base64.b64decode(python_words), dtype="<u4").tolist())
        if len(python_state) != PYTHON_STATE_WORDS:
            raise ValueError(
                f"expected {PYTHON_STATE_WORDS} words of `random` state, got {len(python_state)}; the checkpoint is damaged"
            )
        return cls(
            torch_cpu=torch.from_numpy(np.frombuffer(base64.b64decode(plain["torch_cpu"]), dtype=np.uint8).copy()),
            numpy=(kind, numpy_words, int(position), int(has_gauss), float(gauss)),
            python=(version, python_state, python_gauss),
        )


def capture_generators() -> GeneratorStates:
    """Return the current states of the three global generators; nothing is drawn."""
    numpy_state: Any = np.random.get_state()
    return GeneratorStates(torch.get_rng_state(), numpy_state, random.getstate())


def restore_generators(states: GeneratorStates) -> None:
    """Put the three global generators back to `states`."""
    torch.set_rng_state(states.torch_cpu)
    np.random.set_state(states.numpy)
    random.setstate(states.python)


@contextlib.contextmanager
def drawing_from(states: GeneratorStates) -> Iterator[None]:
    """Run a block whose draws start at `states`; afterwards the global generators stand where they stood before the block."""
    before = capture_generators()
    restore_generators(states)
    try:
        yield
    finally:
        restore_generators(before)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the loader's own `torch.Generator` objects, each once, in a fixed order: loader, sampler, batch sampler and what that wraps."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[-1], "sampler", None))
    found: dict[int, torch.Generator] = {}
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())
