"""The conditions of a measurement: code, packages, machine, limits and load, collected before a result is interpreted.

What can't be read is `not collected`, never blank and never a crash. No absolute path, user name, host name or secret is kept, so that a
report may be handed on.
"""

import os
import platform
import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from dualtrack.measuring.code_state import (
    describe_code,
    digest_imported_sources,
    digest_own_sources,
    list_imported_packages,
)
from dualtrack.measuring.gpu_state import describe_gpu

NOT_COLLECTED = "not collected"
WITHHELD = "set, value not recorded"
_ENVIRONMENT = re.compile(
    r"(OMP|MKL|KMP|OPENBLAS|DNNL|ONEDNN|CUBLAS|CUBLASLT|CUDNN|CUDA|NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH|ATEN|MALLOC|DUALTRACK)_\w+"
    r"|(LOCAL_|GROUP_)?(WORLD_SIZE|RANK)|PYTHONHASHSEED|PYTHONOPTIMIZE|PYTHONMALLOC|NVIDIA_TF32_OVERRIDE|LD_PRELOAD|MASTER_ADDR|MASTER_PORT"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_PLAIN_VALUE = re.compile(r"[\w.,:=+-]{0,120}")
_PLACES = re.compile(r"ADDR|HOST|PATH|FILE|DIR|HOME|CACHE|PRELOAD", re.IGNORECASE)


def collect(device: str) -> dict[str, Any]:
    """Collect everything that may explain a figure, grouped and ready for JSON.

    Args:
        device: `cpu`, `cuda` or `cuda:n`; the groups `gpu` and `torch` say what can be said of it. CUDA is touched only for `cuda`.

    Returns:
        Groups `code`, `sources`, `own_sources`, `packages`, `python`, `platform`, `cpu`, `memory`, `cgroup`, `gpu`, `torch`, `threads`, `load`,
        `environment`.
    """
    readers: dict[str, Callable[[], Any]] = {
        "code": describe_code,
        "sources": digest_imported_sources,
        "own_sources": digest_own_sources,
        "packages": list_imported_packages,
        "python": lambda: read_fields(
            {"version": platform.python_version, "implementation": platform.python_implementation}
        ),
        "platform": lambda: read_fields(_PLATFORM),
        "cpu": lambda: read_fields(_CPU),
        "memory": lambda: read_fields(_MEMORY),
        "cgroup": lambda: read_fields({"memory_bytes": _cgroup_memory, "cpu_quota": _cgroup_cpus}),
        "gpu": lambda: read_fields(describe_gpu(device)),
        "torch": lambda: read_fields(_TORCH),
        "threads": lambda: read_fields(_THREADS),
        "load": lambda: read_fields(_LOAD),
        "environment": lambda: describe_environment(os.environ),
    }
    return read_fields(readers)


def read_fields(readers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Call each reader; what raises or gives nothing becomes `not collected`."""
    return {name: _read(reader) for name, reader in readers.items()}


def hardware_identity(device: str) -> str:
    """Return for which hardware and torch a baseline of numbers is valid, fit for a file name.

    CPU results depend on the instruction set and on the number of threads (pytorch/pytorch#88718), GPU results on the device and on CUDA.

    Args:
        device: `cpu`, `cuda` or `cuda:n`.

    Returns:
        For example `cpu-amd-epyc-avx512-2threads-torch2.13.0` or `cuda-nvidia-h200-cuda12.8-torch2.11.0`.
    """
    version = str(torch.__version__).partition("+")[0]
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(torch.device(device))
        parts = ["cuda", name, f"cuda{torch.version.cuda}", f"torch{version}"]
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        parts = [
            "cpu",
            _cpu_model() or platform.machine(),
            capability,
            f"{torch.get_num_threads()}threads",
            f"torch{version}",
        ]
    return "-".join(_slug(part) for part in parts)


def describe_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change results or speed; a value that may name a place or hold a secret is withheld."""
    found = {}
    for name in sorted(variables):
        if _ENVIRONMENT.fullmatch(name):
            plain = _PLAIN_VALUE.fullmatch(variables[name]) and not _SECRET.search(name) and not _PLACES.search(name)
            found[name] = variables[name] if plain else WITHHELD
    return found


def _read(reader: Callable[[], Any]) -> Any:
    try:
        value = reader()
    except Exception:  # noqa: BLE001 (a missing figure must never stop a measurement, whatever its driver raises)
        return NOT_COLLECTED
    return NOT_COLLECTED if value is None or value == "" else value


def _cpu_model() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.processor() or None


def _slug(text: str) -> str:
    text = re.sub(r"\((R|TM|tm|r)\)|\bCPU\b|\bProcessor\b|@.*", " ", text)
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _governor() -> str:
    return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()


def _kernel() -> str:
    # a distribution may build the host's name into the release; everything after the version is of no use here
    found = re.match(r"[\d.]+", platform.release())
    return "" if found is None else found.group()


def _cgroup_value(controller: str, version_2: str, version_1: str) -> list[str]:
    """Return the contents of a limit file from this process's group up to the root, in either layout of the cgroup file system."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, file = Path("/sys/fs/cgroup"), version_2
        elif controller in controllers.split(","):
            base, file = Path("/sys/fs/cgroup") / controllers, version_1
        else:
            continue
        folder = base / group.lstrip("/")
        for level in (folder, *folder.parents):
            if level.is_relative_to(base) and (level / file).is_file():
                found.append((level / file).read_text().strip())
    return found


def _cgroup_memory() -> int | str | None:
    texts = _cgroup_value("memory", "memory.max", "memory.limit_in_bytes")
    limits = [int(text) for text in texts if text != "max" and int(text) < 2**60]
    return min(limits) if limits else "unlimited" if texts else None


def _cgroup_cpus() -> float | str | None:
    """Return the quota in CPUs, the smallest from here up to the root."""
    quotas = []
    texts = _cgroup_value("cpu", "cpu.max", "cpu.cfs_quota_us")
    for text in texts:
        quota, _, period = text.partition(" ")
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period or 100_000))
    return min(quotas) if quotas else "unlimited" if texts else None


def _soft_limit(kind: int) -> int | str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _load(place: int) -> Callable[[], float]:
    return lambda: os.getloadavg()[place]


_PLATFORM: dict[str, Callable[[], Any]] = {
    "system": platform.system, "kernel": _kernel, "machine": platform.machine, "libc": lambda: " ".join(platform.libc_ver()).strip(),
}  # fmt: skip
_CPU: dict[str, Callable[[], Any]] = {
    "model": _cpu_model, "num_logical": lambda: psutil.cpu_count(), "num_physical": lambda: psutil.cpu_count(logical=False),
    "num_allowed": lambda: len(os.sched_getaffinity(0)), "capability": torch.backends.cpu.get_cpu_capability, "governor": _governor,
    "frequency_mhz": lambda: psutil.cpu_freq().current,
}  # fmt: skip
_MEMORY: dict[str, Callable[[], Any]] = {
    "total_bytes": lambda: psutil.virtual_memory().total, "available_bytes": lambda: psutil.virtual_memory().available,
    "swap_used_bytes": lambda: psutil.swap_memory().used, "shm_bytes": lambda: psutil.disk_usage("/dev/shm").total,
    "memlock_bytes": lambda: _soft_limit(resource.RLIMIT_MEMLOCK), "num_open_files": lambda: _soft_limit(resource.RLIMIT_NOFILE),
}  # fmt: skip
_TORCH: dict[str, Callable[[], Any]] = {
    "version": lambda: str(torch.__version__), "cuda": lambda: torch.version.cuda, "cudnn": torch.backends.cudnn.version,
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled, "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "float32_matmul_precision": torch.get_float32_matmul_precision, "default_dtype": lambda: str(torch.get_default_dtype()),
}  # fmt: skip
_THREADS: dict[str, Callable[[], Any]] = {
    "torch": torch.get_num_threads,
    "torch_interop": torch.get_num_interop_threads,
}
_LOAD: dict[str, Callable[[], Any]] = {
    "load_average_1": _load(0), "load_average_5": _load(1), "load_average_15": _load(2), "num_processes": lambda: len(psutil.pids()),
}  # fmt: skip
