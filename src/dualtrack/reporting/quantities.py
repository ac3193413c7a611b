"""Figures in words a reader takes in at a glance: three significant digits, a prefix that fits, the unit always there."""

import math

_TIMES = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"))
_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB")
_EN_DASH = "\u2013"


def with_digits(value: float, num_digits: int = 3) -> str:
    """Return `value` with at least so many significant digits, thousands apart by commas, and no exponent between 0.0001 and a million."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    rounded = f"{value:.{num_digits - 1}e}"
    exponent = int(rounded.partition("e")[2])  # after rounding, so that 9.996 counts as 10.0
    return f"{value:,.{max(0, num_digits - 1 - exponent)}f}" if -4 <= exponent < 6 else rounded


def with_binary_prefix(num_bytes: float) -> str:
    """Return bytes as B, KiB, MiB, GiB or TiB, for example `61.3 MiB`."""
    return with_unit(num_bytes, "bytes")


def with_time_unit(seconds: float) -> str:
    """Return seconds as µs, ms, s, min or h, for example `1.92 ms`."""
    return with_unit(seconds, "s")


def with_unit(value: float, unit: str) -> str:
    """Return a value in its recorded unit: bytes and seconds with a fitting prefix, a fraction as per cent, anything else as it is."""
    factor, name = _scale(value, unit)
    return f"{with_digits(value * factor)} {name}".rstrip()


def range_beside(low: float, high: float, value: float, unit: str) -> str:
    """Return `low` to `high` without a unit, in the one in which `with_unit` shows `value`, so that the two can stand side by side."""
    factor, _ = _scale(value, unit)
    return f"{with_digits(low * factor)}{_EN_DASH}{with_digits(high * factor)}"


def _scale(value: float, unit: str) -> tuple[float, str]:
    """Return by what to multiply a value, and the unit it then has."""
    if unit == "bytes":
        step = min(len(_PREFIXES) - 1, int(math.log2(abs(value)) // 10)) if abs(value) >= 1 else 0
        return 1024.0**-step, _PREFIXES[step]
    if unit == "s":
        return next(((factor, name) for below, factor, name in _TIMES if abs(value) < below), (1 / 3600, "h"))
    return (100.0, "%") if unit == "fraction" else (1.0, unit)
