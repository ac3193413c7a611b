"""Fakes for what the pool needs of a device, so that most faults are staged on a CPU, and a strict comparison of batches."""

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualtrack.facts.errors import PoolError


class FakeEvent:
    """A copy's event that completes when the test says so."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def complete(self) -> None:
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        assert self._done.wait(10)


class FakePageLock:
    """A driver that keeps a list, and refuses from the n-th call on or above a size."""

    def __init__(
        self, fail_at_call: int | None = None, largest_bytes: int | None = None, bound_by_memlock: bool = False
    ) -> None:
        self.bound_by_memlock = bound_by_memlock
        self.fail_at_call, self.largest_bytes = fail_at_call, largest_bytes
        self.num_calls = 0
        self.refuse_to_unlock = False
        self.locked: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> None:
        self.num_calls += 1
        if self.num_calls == self.fail_at_call or (self.largest_bytes is not None and num_bytes > self.largest_bytes):
            raise PoolError(f"the fake driver refuses {num_bytes:,} bytes")
        assert address not in self.locked
        self.locked[address] = num_bytes

    def unregister(self, address: int) -> None:
        if self.refuse_to_unlock:
            raise PoolError("the fake driver refuses to unlock")
        del self.locked[address]


def seed_all(seed: int = 7) -> None:
    """Seed the three generators as a training script does."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def same(left: Any, right: Any) -> bool:
    """Compare two batches: types of containers, their extras, dtypes, shapes, bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.layout != torch.strided:
            return left.dtype == right.dtype and torch.equal(left.to_dense(), right.to_dense())
        if (left.dtype, left.shape, left.requires_grad) != (right.dtype, right.shape, right.requires_grad):
            return False
        return to_bytes(left) == to_bytes(right)
    if isinstance(left, dict):
        return (
            list(left) == list(right) and all(same(left[key], right[key]) for key in left) and same_extras(left, right)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right)) and same_extras(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if hasattr(left, "__dict__"):
        return same(vars(left), vars(right))
    return bool(left == right)


def same_extras(left: Any, right: Any) -> bool:
    return bool(getattr(left, "__dict__", None) == getattr(right, "__dict__", None))


def to_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def num_open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
