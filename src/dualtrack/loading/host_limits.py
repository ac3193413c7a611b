"""What this machine and this process's cgroup can give: asked before memory is taken, quoted when it is refused."""

import os
import resource
from pathlib import Path

from dualtrack.facts.errors import CapacityError
from dualtrack.facts.observations import Fact

NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


class HostLimits(Fact):
    """Memory figures at one moment; None where the system does not say."""

    mem_total_bytes: int
    mem_available_bytes: int
    cgroup_limit_bytes: int | None
    cgroup_used_bytes: int | None
    """Without the page cache that the kernel would drop."""
    memlock_bytes: int | None
    """`ulimit -l`; None is unlimited. It does not bind `cudaHostRegister`."""
    shared_memory_free_bytes: int | None
    """Free space in `/dev/shm`; the pool does not live there, batches on the pageable path do."""

    @property
    def headroom_bytes(self) -> int:
        """Bytes that can still be taken without swapping or being killed."""
        if self.cgroup_limit_bytes is None:
            return self.mem_available_bytes
        return min(self.mem_available_bytes, max(0, self.cgroup_limit_bytes - (self.cgroup_used_bytes or 0)))

    def __str__(self) -> str:
        def show(value: int | None) -> str:
            return "unlimited" if value is None else f"{value:,}"

        return (
            f"headroom {self.headroom_bytes:,} bytes (available {self.mem_available_bytes:,} of {self.mem_total_bytes:,}; "
            f"cgroup uses {show(self.cgroup_used_bytes)} of {show(self.cgroup_limit_bytes)}; memlock {show(self.memlock_bytes)}; "
            f"/dev/shm free {show(self.shared_memory_free_bytes)})"
        )


def read_host_limits(root: Path = Path("/")) -> HostLimits:
    """Read the figures of this machine.

    Args:
        root: Where `proc` and `sys` are found; a test puts its own files there.
    """
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    kilobytes = {name: int(value.split()[0]) for name, value in meminfo.items() if value.split()[1:] == ["kB"]}
    limit, used = _read_cgroup(root)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return HostLimits(
        mem_total_bytes=kilobytes["MemTotal"] * 1024,
        mem_available_bytes=kilobytes["MemAvailable"] * 1024,
        cgroup_limit_bytes=limit,
        cgroup_used_bytes=used,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        shared_memory_free_bytes=_free_bytes(root / "dev/shm"),
    )


def _free_bytes(folder: Path) -> int | None:
    try:
        figures = os.statvfs(folder)
    except OSError:
        return None
    return figures.f_bavail * figures.f_frsize


def _read_cgroup(root: Path) -> tuple[int | None, int | None]:
    """Return the tightest limit on the path from this process's group to the top, and what that group uses; versions 1 and 2."""
    tightest: tuple[int | None, int | None] = (None, None)
    for folder in _cgroup_folders(root):
        limit = _read_number(folder, "memory.max", "memory.limit_in_bytes")
        used = _read_number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None or limit >= NO_LIMIT_BYTES:
            continue
        used = max(0, used - _reclaimable_bytes(folder))
        if tightest[0] is None or limit - used < tightest[0] - (tightest[1] or 0):
            tightest = (limit, used)
    return tightest


def _cgroup_folders(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        inside = top / group.lstrip("/")
        # Inside a container the path may name a group of the host, which is not mounted here; the top then is the container's own.
        folders += [folder for folder in (inside, *inside.parents) if folder == top or top in folder.parents]
    return folders


def _read_number(folder: Path, *names: str) -> int | None:
    for name in names:
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _reclaimable_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    figures = dict(line.split() for line in lines)
    return int(figures.get("inactive_file", 0)) + int(figures.get("active_file", 0))


def refuse_over_commitment(num_bytes: int, what: str, limits: HostLimits, bound_by_memlock: bool) -> None:
    """Refuse a size that the machine can't give.

    Raises:
        CapacityError: `num_bytes` is above the headroom, or above `ulimit -l` where that binds; the message has every figure.
    """
    if num_bytes > limits.headroom_bytes:
        raise CapacityError(
            f"{what}: expected at most the machine's headroom, got {num_bytes:,} bytes; {limits}; lower cap_bytes"
        )
    if bound_by_memlock and limits.memlock_bytes is not None and num_bytes > limits.memlock_bytes:
        raise CapacityError(
            f"{what}: expected at most `ulimit -l`, got {num_bytes:,} bytes; {limits}; raise the limit or lower cap_bytes"
        )
