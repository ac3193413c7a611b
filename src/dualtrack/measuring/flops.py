"""Model FLOPs utilisation: FLOPs of a step as torch counts them, over the device's peak.

MFU = FLOPs per step / step seconds / peak FLOP/s, after Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B;
here FLOPs are counted for the operators that really ran forward and backward, not estimated from the parameter count.
"""

import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.records import Measured

# Dense peak in FLOP/s by device name and precision, without sparsity. Source: NVIDIA data sheets of H100 (2023), H200 (2024), A100 (2020).
PEAK_FLOPS = {
    "NVIDIA H200": {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12, "float64": 67e12},
    "NVIDIA H100 80GB HBM3": {
        "bfloat16": 989e12,
        "float16": 989e12,
        "tf32": 494e12,
        "float32": 67e12,
        "float64": 67e12,
    },
    "NVIDIA A100-SXM4-80GB": {
        "bfloat16": 312e12,
        "float16": 312e12,
        "tf32": 156e12,
        "float32": 19.5e12,
        "float64": 19.5e12,
    },
    "NVIDIA A100-SXM4-40GB": {
        "bfloat16": 312e12,
        "float16": 312e12,
        "tf32": 156e12,
        "float32": 19.5e12,
        "float64": 19.5e12,
    },
}


def count_step_flops(step: Callable[[], object]) -> Measured:
    """Run one training step under torch's FLOP counter and return its floating point operations (a multiply-add is two).

    Source: `torch.utils.flop_counter.FlopCounterMode`; it counts matrix products, convolutions and attention, forward and backward.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    total = counter.get_total_flops()
    if total <= 0:
        return Measured(value=None, unit="FLOP", reason="torch's FLOP counter knows none of the step's operators")
    return Measured(value=float(total), unit="FLOP")


def model_flops_utilisation(
    flops_per_step: Measured, step_seconds: float, device: torch.device, precision: str
) -> Measured:
    """Return MFU as a fraction of the device's dense peak.

    Args:
        flops_per_step: From `count_step_flops`.
        step_seconds: Median step time of the steady window.
        device: Where the step ran.
        precision: `bfloat16`, `float16`, `tf32`, `float32` or `float64`: the precision of the matrix products.

    Raises:
        EvidenceError: The figure is above 1, so the step time, the count or the peak is wrong.
    """
    if device.type != "cuda":
        return Measured(value=None, unit="fraction", reason="no CUDA device")
    if flops_per_step.value is None:
        return Measured(value=None, unit="fraction", reason=flops_per_step.reason)
    name = torch.cuda.get_device_name(device)
    peak = PEAK_FLOPS.get(name, {}).get(precision)
    if peak is None:
        return Measured(value=None, unit="fraction", reason=f"no peak on record for {name} at {precision}")
    utilisation = flops_per_step.value / step_seconds / peak
    if utilisation > 1:
        raise EvidenceError(
            f"MFU {utilisation:.2f} on {name} is above 1: expected at most {peak:.3g} FLOP/s, got {flops_per_step.value:.3g} FLOP in "
            f"{step_seconds:.3g} s; check the timing window and the precision"
        )
    return Measured(value=utilisation, unit="fraction")


def matmul_ceiling(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = 8192, num_repeats: int = 10
) -> Measured:
    """Measure the FLOP/s of a square matrix product on the spot, the practical ceiling beside the data sheet's peak."""
    if device.type != "cuda":
        return Measured(value=None, unit="FLOP/s", reason="no CUDA device")
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        left @ right
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(num_repeats):
        left @ right
    torch.cuda.synchronize(device)
    return Measured(value=2 * size**3 * num_repeats / (time.perf_counter() - started), unit="FLOP/s")
