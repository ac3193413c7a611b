"""One figure that the sum of all pools stays under, in a process and, by equal shares, on a host."""

import functools
import threading
from collections.abc import Callable

from dualtrack.facts.errors import CapacityError
from dualtrack.loading.host_limits import HostLimits, read_host_limits, refuse_over_commitment


class PinnedBudget:
    """Bytes that pools may hold together. A pool reserves its bytes before it takes them and returns them when it has let go of them.

    Ranks of one host share a figure by arithmetic, without talking: each is given `PinnedBudget(total).share(num_ranks)`.
    """

    def __init__(self, total_bytes: int, read_limits: Callable[[], HostLimits] = read_host_limits) -> None:
        """Allow `total_bytes` for all pools that are given this budget.

        Args:
            total_bytes: The figure.
            read_limits: Reads what the machine has, at each reservation.

        Raises:
            ValueError: `total_bytes` is not positive.
        """
        if total_bytes <= 0:
            raise ValueError(f"expected a budget above 0 bytes, got {total_bytes}")
        self.total_bytes = total_bytes
        self._read_limits = read_limits
        self._reserved: dict[int, tuple[str, int]] = {}
        self._next_key = 0
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """Bytes that pools hold now."""
        return sum(num_bytes for _, num_bytes in list(self._reserved.values()))  # a finalizer may give back meanwhile

    def share(self, num_ranks: int) -> "PinnedBudget":
        """Return the budget of one of `num_ranks` processes of this host, an equal part rounded down.

        Raises:
            ValueError: `num_ranks` is below 1.
        """
        if num_ranks < 1:
            raise ValueError(f"expected at least 1 rank, got {num_ranks}")
        return PinnedBudget(self.total_bytes // num_ranks, self._read_limits)

    def reserve(self, num_bytes: int, name: str, bound_by_memlock: bool = False) -> int:
        """Set bytes aside for the pool `name` and return the key to give back.

        Raises:
            CapacityError: They would break this budget or the machine's own limits; nothing was reserved or allocated.
        """
        with self._lock:
            refuse_over_commitment(num_bytes, f"pool {name!r}", self._read_limits(), bound_by_memlock)
            free_bytes = self.total_bytes - self.reserved_bytes
            if num_bytes > free_bytes:
                holders = ", ".join(f"{holder} {held:,}" for holder, held in list(self._reserved.values())) or "none"
                raise CapacityError(
                    f"pool {name!r}: expected at most {free_bytes:,} free bytes of the budget of {self.total_bytes:,}, got {num_bytes:,}; "
                    f"pools that hold the rest: {holders}; lower cap_bytes, close a pool or raise the budget"
                )
            self._next_key += 1
            self._reserved[self._next_key] = (name, num_bytes)
            return self._next_key

    def give_back(self, key: int) -> None:
        """Return the bytes of a reservation; twice is fine."""
        self._reserved.pop(key, None)


@functools.cache
def process_budget() -> PinnedBudget:
    """Return the budget of pools that are given none: all that the machine can give to this process when it is first asked."""
    return PinnedBudget(read_host_limits().headroom_bytes)
