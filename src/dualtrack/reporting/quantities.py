"""Figures in words a reader takes in at a glance: three significant digits, a prefix that fits, the unit always there."""

import math


def with_digits(value: float, num_digits: int = 3) -> str:
    """Return `value` with so many significant digits, thousands apart by commas, and no exponent between 0.001 and a million."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    places = num_digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    if not 1e-3 <= abs(rounded) < 1e6:
        return f"{value:.{num_digits - 1}e}"
    return f"{rounded:,.{max(0, places)}f}"


def with_binary_prefix(num_bytes: float) -> str:
    """Return bytes as B, KiB, MiB, GiB or TiB, for example `61.3 MiB`."""
    size = float(num_bytes)
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{with_digits(size)} {prefix}"
        size /= 1024
    return f"{with_digits(size)} TiB"


def with_time_unit(seconds: float) -> str:
    """Return seconds as µs, ms, s, min or h, for example `1.92 ms`."""
    for factor, name, below in ((1e6, "µs", 1e-3), (1e3, "ms", 1.0), (1.0, "s", 120.0), (1 / 60, "min", 7200.0)):
        if abs(seconds) < below:
            return f"{with_digits(seconds * factor)} {name}"
    return f"{with_digits(seconds / 3600)} h"


def with_unit(value: float, unit: str | None) -> str:
    """Return a value in its recorded unit: bytes and seconds with a fitting prefix, a fraction as per cent, anything else as it is."""
    if unit in ("bytes", "B"):
        return with_binary_prefix(value)
    if unit in ("s", "seconds"):
        return with_time_unit(value)
    if unit in ("fraction", "share"):
        return f"{with_digits(value * 100)} %"
    return f"{with_digits(value)} {unit}".strip() if unit else with_digits(value)
