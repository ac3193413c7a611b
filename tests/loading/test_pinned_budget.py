"""Budget and machine limits: over-commitment is refused before anything is taken, with every figure."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pool_fakes import FakePageLock

from dualtrack.facts.errors import CapacityError
from dualtrack.loading.host_limits import HostLimits, read_host_limits
from dualtrack.loading.pinned_budget import PinnedBudget, process_budget
from dualtrack.loading.pinned_pool import PinnedPool, PoolSettings

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    800 kB\nHugePages_Total:       0\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_a_machine_without_cgroup_limits_gives_what_is_available(tmp_path: Path) -> None:
    limits = read_host_limits(write(tmp_path, {"proc/self/cgroup": "0::/\n"}))
    assert limits.headroom_bytes == 800 * 1024
    assert limits.cgroup_limit_bytes is None


def test_the_tightest_group_on_the_path_to_the_top_counts_in_version_two(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/task\n",
        "sys/fs/cgroup/job/task/memory.max": "max\n",
        "sys/fs/cgroup/job/task/memory.current": "1\n",
        "sys/fs/cgroup/job/memory.max": "500000\n",
        "sys/fs/cgroup/job/memory.current": "300000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 40000\nactive_file 10000\n",
        "sys/fs/cgroup/memory.max": "max\n",
    }
    limits = read_host_limits(write(tmp_path, files))
    assert (limits.cgroup_limit_bytes, limits.cgroup_used_bytes) == (500_000, 250_000)
    assert limits.headroom_bytes == 250_000


def test_version_one_is_read_too_even_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "400000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000\n",
    }
    assert read_host_limits(write(tmp_path, files)).headroom_bytes == 300_000


def test_an_unlimited_group_of_version_one_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000\n",
    }
    assert read_host_limits(write(tmp_path, files)).cgroup_limit_bytes is None


def test_this_machine_has_limits() -> None:
    limits = read_host_limits()
    assert 0 < limits.headroom_bytes <= limits.mem_available_bytes <= limits.mem_total_bytes
    assert str(limits.mem_total_bytes) in str(limits).replace(",", "")


def test_memlock_binds_only_a_lock_that_it_binds(machine_with: Callable[..., HostLimits]) -> None:
    budget = PinnedBudget(1 << 20, read_limits=lambda: machine_with(1 << 30, memlock_bytes=8192))
    with PinnedPool(65_536, 4096, settings=PoolSettings(budget=budget, page_lock=FakePageLock())) as pool:
        assert pool.pinned_bytes == 65_536
    bound = FakePageLock(bound_by_memlock=True)
    with pytest.raises(CapacityError, match=r"at most `ulimit -l`, got 65,536 bytes; .* memlock 8,192"):
        PinnedPool(65_536, 4096, settings=PoolSettings(budget=budget, page_lock=bound))
    assert bound.num_calls == 0


def test_the_sum_over_pools_stays_under_the_budget() -> None:
    budget = PinnedBudget(10 * 4096)
    settings = [PoolSettings(budget=budget, name=name) for name in ("train", "eval")]
    with PinnedPool(6 * 4096, 4096, settings=settings[0]):
        with pytest.raises(
            CapacityError, match=r"pool 'eval': expected at most 16,384 free .* got 24,576; .* train 24,576"
        ):
            PinnedPool(6 * 4096, 4096, settings=settings[1])
        with PinnedPool(4 * 4096, 4096, settings=settings[1]):
            assert budget.reserved_bytes == 10 * 4096
    assert budget.reserved_bytes == 0


def test_the_shares_of_ranks_never_add_up_to_more_than_the_host_allows() -> None:
    for num_ranks in (1, 3, 4, 32):
        assert sum(PinnedBudget(1000).share(num_ranks).total_bytes for _ in range(num_ranks)) <= 1000
    with pytest.raises(ValueError, match="at least 1 rank"):
        PinnedBudget(1000).share(0)
    with pytest.raises(ValueError, match="above 0 bytes"):
        PinnedBudget(0)


def test_a_process_has_one_budget_by_default() -> None:
    assert process_budget() is process_budget()
    with PinnedPool(4096, 4096) as pool:
        assert process_budget().reserved_bytes >= pool.slab_bytes
