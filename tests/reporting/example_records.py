"""Stage records as a run would leave them: the same keys and limits, plausible figures, judged by the real judge."""

from datetime import timedelta
from typing import Any

from example_stages import expansion_parts, freeze_parts, memory_parts, report_parts, transfer_parts
from example_trials import CAP_BYTES, START

from dualtrack.facts.digests import sha256_json
from dualtrack.facts.observations import (
    Equality,
)
from dualtrack.facts.records import StageRecord
from dualtrack.facts.verdicts import judge_stage

FROZEN_DIGEST = sha256_json("frozen digits")


def example_records(device: str = "cpu", failing: str | None = None) -> dict[str, StageRecord]:
    """Return the four records of a run on `device`.

    Args:
        device: `cpu` or `cuda`.
        failing: `divergence` lets stage 2 deliver wrong bytes; `tool error` breaks a measurement of stage 1; `slow` makes stage 1's
            candidate slower than its limit allows, and the run stops there; `slow but waived` goes on.
    """
    records = {
        "0_freeze_baseline": _record("0_freeze_baseline", device, 0, *freeze_parts(device)),
        "1_pinned_pool": _record(
            "1_pinned_pool",
            device,
            40,
            *memory_parts(device, failing == "tool error", failing in ("slow", "slow but waived")),
        ),
    }
    if failing in (None, "slow but waived", "divergence"):
        records["2_stream_prefetcher"] = _record(
            "2_stream_prefetcher", device, 95, *transfer_parts(device, failing == "divergence")
        )
    if failing in (None, "slow but waived"):
        records["3_ddp_expansion"] = _record("3_ddp_expansion", device, 170, *expansion_parts(device))
    records["4_migration_report"] = _record("4_migration_report", device, 210, *report_parts(records))
    return records


def _record(stage: str, device: str, offset_seconds: int, *parts: Any) -> StageRecord:
    observations, limits, planted, rollback, trials, figures = parts
    settings: dict[str, Any] = {
        "workload": "digits",
        "device": "auto",
        "seed": 20260101,
        "num_pairs": 6,
        "num_warmup_steps": 10,
        "num_steps": 120,
    }
    if stage[0] in "12":
        settings["cap_bytes"] = CAP_BYTES
    if stage[0] == "3":
        settings |= {"world_sizes": [4, 8, 32], "data_fraction": 0.1, "bucket_cap_mb": 25.0}
    record = StageRecord(
        stage=stage,
        workload="digits",
        device=device,
        started_at=START + timedelta(seconds=offset_seconds),
        ended_at=START + timedelta(seconds=offset_seconds + 38),
        settings=settings,
        settings_digest=sha256_json(settings),
        frozen_inputs_digest=FROZEN_DIGEST,
        hardware_identity="nvidia-h200" if device == "cuda" else "x86_64-cpu",
        conditions=example_conditions(device),
        observations=observations,
        limits=limits,
        planted_faults=planted,
        rollback=rollback,
        trials=trials,
        figures=figures,
        notes=("on CPU the prefetcher is a pass-through: nothing overlaps",)
        if (stage[0], device) == ("2", "cpu")
        else (),
        stable_keys=tuple(key for key, seen in observations.items() if isinstance(seen, Equality)),
        verdict=judge_stage(observations, limits, planted, device),
    )
    return record.model_copy(update={"stable_digest": record.compute_stable_digest()})


def example_conditions(device: str) -> dict[str, Any]:
    """Return conditions in the shape that `provenance.collect` gives."""
    on_cuda = device == "cuda"
    missing = "not collected"
    before = {
        "code": {
            "commit": "4f1c09d2a7b35e8890c6d1a4b2f37e5c6a90d811",
            "state": "clean",
            "num_changed": 0,
            "num_untracked": 0,
            "difference_digest": "no difference",
        },
        "sources": {"dualtrack": sha256_json("dualtrack")},
        "packages": {"numpy": "2.4.6", "torch": "2.11.0+cu128" if on_cuda else "2.13.0+cpu"},
        "python": {"version": "3.12.9" if on_cuda else "3.11.7", "implementation": "CPython"},
        "platform": {"system": "Linux", "kernel": "6.18.44", "machine": "x86_64"},
        "cpu": {
            "model": "Intel(R) Xeon(R) Platinum 8481C" if on_cuda else "AMD EPYC",
            "num_allowed": 16 if on_cuda else 2,
        },
        "memory": {"total_bytes": 128 * 2**30 if on_cuda else 24 * 2**30},
        "gpu": {"name": "NVIDIA H200", "num_devices": 1, "driver": "570.124"}
        if on_cuda
        else {"name": missing, "driver": missing},
        "torch": {"cuda": "12.8" if on_cuda else missing},
        "load": {"load_average_1": 0.4},
    }
    return {"before": before, "load_after": {"load_average_1": 1.1}}
