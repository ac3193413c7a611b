"""What all loading tests share: a property-test profile without deadlines, and machines of any size."""

from collections.abc import Callable

import pytest
from hypothesis import settings

from dualtrack.loading.host_limits import HostLimits

settings.register_profile("shared-machine", deadline=None, print_blob=True)
settings.load_profile("shared-machine")


@pytest.fixture
def machine_with() -> Callable[..., HostLimits]:
    """Build the limits of a machine of a given size."""

    def build(available_bytes: int, memlock_bytes: int | None = None) -> HostLimits:
        return HostLimits(
            mem_total_bytes=2 * available_bytes,
            mem_available_bytes=available_bytes,
            cgroup_limit_bytes=None,
            cgroup_used_bytes=None,
            memlock_bytes=memlock_bytes,
            shared_memory_free_bytes=64 * 2**20,
        )

    return build
