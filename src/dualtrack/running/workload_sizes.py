"""Sizes of the bundled workloads: `small` runs anywhere, `full` is for a GPU."""

import importlib
from typing import Any


def sized_workload(workload: str, size: str) -> tuple[str, dict[str, Any]]:
    """Return the reference of `workload` at `size`, and the parameters that go with it.

    Args:
        workload: Bundled bare name, or `package.module:factory` (which has no sizes of its own).
        size: `small` or `full`.

    Raises:
        ValueError: The workload has no such size.
    """
    if size == "small":
        return workload, {}
    if ":" in workload:
        raise ValueError(f"--size {size} is for bundled workloads; {workload!r} already names its factory")
    module = importlib.import_module(f"dualtrack.workloads.{workload}")
    sizes: dict[str, str] = getattr(module, "SIZES", {})
    if size not in sizes:
        raise ValueError(f"workload {workload!r} has no size {size!r}; it has {', '.join(sizes) or 'only one'}")
    return sizes[size], dict(getattr(module, "PARAMETERS", {}).get(size, {}))
