"""A rung in which everything is right, written by hand; tests change one thing."""

import copy
from pathlib import Path
from typing import Any

from dualtrack.stages.expansion_rung import Rung
from dualtrack.training.data_plan import DataPlan
from dualtrack.training.gradient_buckets import Bucket, BucketLayout
from dualtrack.training.legacy_gradients import LegacyGradients

PLAN = DataPlan(num_samples=40, global_batch=8, data_fraction=0.5, seed=1)
LAYOUT = BucketLayout(buckets=(Bucket(parameters=(1,), num_bytes=40), Bucket(parameters=(0,), num_bytes=80)))
NUM_STEPS = 4
LOSSES = [2.0, 1.5, 1.2, 1.0]


def curve(num_samples: int, digests: list[list[str]], rank_offset: float = 0.0) -> dict[str, Any]:
    return {
        "losses": [loss + rank_offset for loss in LOSSES], "learning_rates": [0.1] * NUM_STEPS, "num_samples": [num_samples] * NUM_STEPS,
        "sample_digests": digests, "batch_digests": [["b0", "b0"], ["b1", "b1"]], "parameter_digests": {"1": "p1", "2": "p2", "4": "p4"},
    }  # fmt: skip


def result(rank: int, world_size: int, offset: float = 0.0) -> dict[str, Any]:
    size = PLAN.batch_per_rank(world_size)
    digests = [[f"s{step}-{place}" for place in range(rank * size, (rank + 1) * size)] for step in range(2)]
    errors = [{"parameter": name, "step": 0, "relative": 1e-16, "largest": 1e-16} for name in ("weight", "bias")]
    return {
        "facts": {"torch": "2.13", "bucket_cap_mb": 1.0, "plan": PLAN.digest()}, "initial_digest": "initial", "probe": ["a", "b"],
        "ids": [PLAN.rank_ids(step, rank, world_size).tolist() for step in range(NUM_STEPS)], "curve32": curve(size, digests, offset),
        "curve64": curve(size, [], offset), "repeated": {"losses": [loss + offset for loss in LOSSES[:2]]},
        "float64": {"digests": ["g"], "errors": errors if rank == 0 else []}, "float32": {"digests": ["g"], "errors": errors if rank == 0 else []},
        "layout": LAYOUT.model_dump(mode="json"), "num_initial_buckets": 1, "pss_bytes": 1000,
    }  # fmt: skip


def good_rung(world_size: int = 2) -> Rung:
    legacy = LegacyGradients(
        folder="", num_batches=1, batch_size=8, losses=(2.0,), gradient_norms=(1.0,), initial_parameters_digest="initial", anchor={},
        parameter_names=("weight", "bias"), predicted_layouts=(LAYOUT,), gradient_bytes=120, float64_error=None, notes=(),
    )  # fmt: skip
    single = {**result(0, 1), "band": [[loss * (1 + 1e-7) for loss in LOSSES], [loss * (1 - 1e-7) for loss in LOSSES]]}
    offsets = {0: 1e-13, 1: -1e-13}  # the mean over ranks is the loss; one rank's own is not
    results = tuple(copy.deepcopy(result(rank, world_size, offsets.get(rank, 0.0))) for rank in range(world_size))
    return Rung(
        world_size=world_size,
        backend="gloo",
        results=results,
        folder=Path("nowhere"),
        legacy=legacy,
        single=single,
        probe=["a", "b"],
        plan=PLAN,
    )
