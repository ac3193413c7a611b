"""State of the GPU as its driver tells it, through nvidia-ml-py; nothing here changes a setting of the device."""

import functools
from collections.abc import Callable
from typing import Any

import pynvml
import torch

_FIELDS = (
    "name", "num_devices", "driver", "compute_capability", "total_bytes", "used_bytes", "sm_clock_mhz", "memory_clock_mhz", "max_sm_clock_mhz",
    "power_limit_watts", "temperature_celsius", "throttle_reasons", "utilisation_percent", "pcie_generation", "pcie_width", "mig", "ecc",
)  # fmt: skip


def describe_gpu(device: str) -> dict[str, Callable[[], Any]]:
    """Return a reader for each field; on a CPU device each raises, so that the fields read `not collected`."""
    state = _GpuState(device)
    return {name: getattr(state, name) for name in _FIELDS}


class _GpuState:
    """Reads one field a method; the handle is looked up by the device's UUID, since CUDA_VISIBLE_DEVICES renumbers devices."""

    def __init__(self, device: str) -> None:
        self.device = device

    @functools.cached_property
    def index(self) -> int:
        where = torch.device(self.device)
        if where.type != "cuda":
            raise LookupError("no CUDA device")
        return torch.cuda.current_device() if where.index is None else where.index

    @functools.cached_property
    def handle(self) -> tuple[Any, Any]:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(self.index).uuid)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")

    def name(self) -> str:
        return torch.cuda.get_device_name(self.index)

    def num_devices(self) -> int:
        return torch.cuda.device_count() if self.index >= 0 else 0

    def driver(self) -> str:
        library, _ = self.handle
        return str(library.nvmlSystemGetDriverVersion())

    def compute_capability(self) -> str:
        major, minor = torch.cuda.get_device_capability(self.index)
        return f"{major}.{minor}"

    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.index).total_memory

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.index)
        return total - free

    def sm_clock_mhz(self) -> int:
        library, handle = self.handle
        return int(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM))

    def memory_clock_mhz(self) -> int:
        library, handle = self.handle
        return int(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_MEM))

    def max_sm_clock_mhz(self) -> int:
        library, handle = self.handle
        return int(library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM))

    def power_limit_watts(self) -> float:
        library, handle = self.handle
        return float(library.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000

    def temperature_celsius(self) -> int:
        library, handle = self.handle
        return int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))

    def throttle_reasons(self) -> str:
        library, handle = self.handle
        return hex(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))

    def utilisation_percent(self) -> int:
        library, handle = self.handle
        return int(library.nvmlDeviceGetUtilizationRates(handle).gpu)

    def pcie_generation(self) -> int:
        library, handle = self.handle
        return int(library.nvmlDeviceGetCurrPcieLinkGeneration(handle))

    def pcie_width(self) -> int:
        library, handle = self.handle
        return int(library.nvmlDeviceGetCurrPcieLinkWidth(handle))

    def mig(self) -> str:
        library, handle = self.handle
        current, _ = library.nvmlDeviceGetMigMode(handle)
        return "on" if current else "off"

    def ecc(self) -> str:
        library, handle = self.handle
        current, _ = library.nvmlDeviceGetEccMode(handle)
        return "on" if current else "off"
