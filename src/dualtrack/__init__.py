"""Move a PyTorch training system from its old data path to a new one in stages, and prove each stage.

Names are imported on first use, so that a reviewer's laptop can verify a report without torch.
"""

import importlib
from typing import Any

_HOME_OF = {
    "PinnedBudget": "dualtrack.loading.pinned_pool",
    "PinnedPool": "dualtrack.loading.pinned_pool",
    "PooledLoader": "dualtrack.loading.pooled_loader",
    "CUDADataPrefetcher": "dualtrack.loading.stream_prefetcher",
    "DualTrackLoader": "dualtrack.loading.dual_track",
    "Workload": "dualtrack.training.workload",
    "open_loader": "dualtrack.training.active_path",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Import the public object `name` from its module on first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dualtrack' has no attribute {name!r}; it offers {', '.join(sorted(_HOME_OF))}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
