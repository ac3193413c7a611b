"""A small run as the runner leaves it, sealed: records with raw trials, planted faults and a rollback, notebooks, figures, page, ledger."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dualtrack.facts.derivations import (
    TRACK_OF_STAGE,
    combine_stable_digests,
    failures_from_trials,
    peak_from_trials,
    ratio_from_trials,
)
from dualtrack.facts.digests import canonical_json, sha256_file, sha256_json
from dualtrack.facts.frozen_inputs import Baseline, FrozenBatch, FrozenManifest, limits_json
from dualtrack.facts.ledger import Ledger, Promotion, RollbackEntry
from dualtrack.facts.observations import Equality, Limit, Observation, State, Value
from dualtrack.facts.records import STAGES, Measured, Outcome, Rollback, RunSummary, StageRecord, Trial
from dualtrack.facts.verdicts import judge_stage, plant_fault
from dualtrack.reporting.manifest import evidence_root, write_manifest

START = datetime(2026, 1, 1, tzinfo=UTC)
HARDWARE = "cpu-test-2threads-torch2.13.0"
FROZEN = FrozenManifest(
    workload="digits", mode="stored", seed=1, loader={"class": "DataLoader"}, random_states={}, created_at=START, reason="first",
    conditions={}, batches_sha256=None, batches=(FrozenBatch(structure=["t"], tensors={"t": "d" * 64}, sample_ids=(0, 1), num_bytes=8),),
)  # fmt: skip
EQUAL = Limit(observation="batches_equal_frozen", relation="equal", bound=0, reason="same mathematics", primary=True)
LIMITS: dict[str, tuple[Limit, ...]] = {
    stage: (
        EQUAL,
        Limit(observation="trial_failures", relation="at most", bound=0, reason="no crash"),
        Limit(observation="rollback_verified", relation="equal", bound=True, reason="a way back"),
        Limit(observation="pool_peak_bytes", relation="at most", bound=1000, reason="the cap"),
        Limit(observation="step_latency_ratio", relation="at most", bound=1.05, reason="not slower", needs="cuda"),
    )
    for stage in ("1_pinned_pool", "2_stream_prefetcher")
} | dict.fromkeys(("0_freeze_baseline", "3_ddp_expansion", "4_migration_report"), (EQUAL,))


def make_trials(track: str, num_pairs: int = 6) -> tuple[Trial, ...]:
    """Return an ABBA block of legacy and `track`, the latter faster by a third."""
    trials = []
    for position in range(2 * num_pairs):
        pair, name = position // 2, ("legacy", track, track, "legacy")[position % 4]
        step = (0.003 if name == "legacy" else 0.002) * (1 + 0.01 * (pair % 3))
        trials.append(
            Trial(
                name=f"t{position}",
                block="paired",
                track=name,
                pair=pair,
                position=position,
                started_at=START + timedelta(seconds=position),
                outcome=Outcome(state="completed", exit_code=0, seconds=0.4),
                num_steps=3,
                step_seconds=(step, step * 1.1, step * 0.9),
                peaks={"pool_peak_bytes": Measured(value=640.0 + pair, unit="bytes")} if name == track else {},
            )
        )
    return tuple(trials)


def make_record(stage: str, device: str = "cpu") -> StageRecord:
    """Return a record of `stage` that follows from its trials."""
    seen = Equality(what="batches", num_compared=40, num_equal=40)
    observations: dict[str, Observation] = {"batches_equal_frozen": seen}
    trials: tuple[Trial, ...] = ()
    rollback = None
    if stage in ("1_pinned_pool", "2_stream_prefetcher"):
        track = TRACK_OF_STAGE[stage]
        trials = make_trials(track)
        rollback = Rollback(
            from_path=track,
            to_path="legacy",
            active_path_read_back="legacy",
            num_steps_compared=5,
            num_steps_equal=5,
            seconds=0.5,
        )
        observations |= {
            "trial_failures": failures_from_trials(trials, "runs"),
            "rollback_verified": Value(what="rollback", value=rollback.verified),
            "pool_peak_bytes": peak_from_trials(trials, track, "pool_peak_bytes", "pool", "bytes"),
            "step_latency_ratio": ratio_from_trials(trials, track, "latency"),
        }
    bad = Equality(what="batches with one byte changed", num_compared=40, num_equal=39, num_mismatched=1)
    faults = (plant_fault("one byte changed", "batches_equal_frozen", bad, LIMITS[stage], device),)
    settings = {"workload": "digits", "num_pairs": 6, "seed": 1}
    record = StageRecord(
        stage=stage, workload="digits", device=device, started_at=START, ended_at=START, settings=settings,
        settings_digest=sha256_json(settings), frozen_inputs_digest=FROZEN.digest, hardware_identity=HARDWARE,
        conditions={"before": {"code": {"state": "clean", "commit": "abc"}}}, observations=observations, limits=LIMITS[stage],
        planted_faults=faults, rollback=rollback, trials=trials, stable_keys=("batches_equal_frozen",),
        verdict=judge_stage(observations, LIMITS[stage], faults, device),
    )  # fmt: skip
    return record.model_copy(update={"stable_digest": record.compute_stable_digest()})


def write_record(folder: Path, record: StageRecord) -> None:
    """Write a record and its completion mark, replacing earlier ones."""
    path = folder / "records" / f"{record.stage}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record.model_dump_json(indent=1))
    mark = {"stage": record.stage, "record_sha256": sha256_file(path), "state": record.verdict.state}
    path.with_name(f"{record.stage}.completed.json").write_bytes(canonical_json(mark))


def write_summary(folder: Path, records: Mapping[str, StageRecord], **changes: Any) -> None:
    """Write `run.json` as the runner does for a complete run of these records."""
    states = {stage: records[stage].verdict.state.value if stage in records else "not run" for stage in STAGES}
    complete = set(records) == set(STAGES)
    passed = complete and set(states.values()) == {State.PASSED.value}
    content = {
        "run": folder.name, "workload": "digits", "started_at": START, "ended_at": START, "stages": states, "seconds": {},
        "complete": complete, "exit_code": 0 if passed else 4, "stable_digest": combine_stable_digests(records.values()),
        "parameters": {stage: {"num_pairs": 6} for stage in records}, **changes,
    }  # fmt: skip
    (folder / "run.json").write_text(RunSummary.model_validate(content).model_dump_json(indent=1))


def write_page(folder: Path) -> None:
    """Write a page that prints the evidence root."""
    (folder / "index.html").write_text(
        f"<!doctype html><title>run</title><p>evidence root <code>{evidence_root(folder)}</code></p>"
    )


def write_sealed_run(folder: Path, stages: tuple[str, ...] = STAGES) -> dict[str, StageRecord]:
    """Write a whole run and seal it."""
    records = {stage: make_record(stage) for stage in stages}
    for stage, record in records.items():
        write_record(folder, record)
        (folder / "notebooks").mkdir(exist_ok=True)
        (folder / "notebooks" / f"{stage}.ipynb").write_text(json.dumps({"cells": [stage], "nbformat": 4}))
        (folder / "html").mkdir(exist_ok=True)
        (folder / "html" / f"{stage}.html").write_text(f"<p>{stage}</p>")
    (folder / "figures").mkdir()
    (folder / "figures" / "1_pinned_pool-memory.csv").write_text("step,bytes\n0,640\n")
    (folder / "frozen").mkdir()
    (folder / "frozen" / "manifest.json").write_text(FROZEN.model_dump_json(indent=1))
    (folder / "frozen" / "limits.json").write_bytes(limits_json(LIMITS))
    (folder / "baseline").mkdir()
    baseline = Baseline(
        hardware_identity=HARDWARE, frozen_inputs_digest=FROZEN.digest, device="cpu", seed=1, losses=(2.3,), gradient_norms=(1.0,),
        initial_parameters_digest="a", final_parameters_digest="b", created_at=START, conditions={},
    )  # fmt: skip
    (folder / "baseline" / f"{HARDWARE}.json").write_text(baseline.model_dump_json(indent=1))
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.append(Promotion(at=START, stage="1_pinned_pool", active_path="pooled", who="rehearsal", why="x", run="r"))
    ledger.append(
        RollbackEntry(at=START, stage="1_pinned_pool", from_path="pooled", to_path="legacy", who="rehearsal", why="x")
    )
    write_summary(folder, records)
    write_page(folder)
    write_manifest(folder)
    return records


def seal_again(folder: Path, records: Mapping[str, StageRecord]) -> None:
    """Do what a forger does who knows the tool: compute every digest anew after an edit."""
    for record in records.values():
        write_record(folder, record)
    write_summary(folder, records)
    write_page(folder)
    (folder / "ledger.jsonl").unlink()
    (folder / "manifest.json").unlink()
    write_manifest(folder)
