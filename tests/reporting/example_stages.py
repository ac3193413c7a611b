"""What each stage sees in the example runs: the same keys and limits as the real stages, with plausible figures."""

from typing import Any

from example_trials import NO_CUDA, abba_plan, example_trials

from dualtrack.facts.derivations import failures_from_trials, ratio_from_trials
from dualtrack.facts.observations import (
    Divergence,
    Equality,
    Limit,
    Maximum,
    Observation,
    ToolError,
    Unmeasured,
    Value,
)
from dualtrack.facts.records import PlantedFault, Rollback, Series, StageRecord, Trial

NOISE_FLOOR = [("noise floor", "legacy", pair, 1) for pair in range(3) for _ in range(2)]


def _equal(what: str, num: int, **more: Any) -> Equality:
    return Equality(what=what, num_compared=num, num_equal=num, **more)


def _rollback(from_path: str, to_path: str) -> Rollback:
    return Rollback(
        from_path=from_path,
        to_path=to_path,
        active_path_read_back=to_path,
        num_steps_compared=23,
        num_steps_equal=23,
        seconds=0.84,
    )


def _limit(observation: str, relation: Any, bound: Any, reason: str, **more: Any) -> Limit:
    return Limit(observation=observation, relation=relation, bound=bound, reason=reason, **more)


BIT_EQUAL = "the mathematics is the same, so every bit must be"
NO_CRASH = "one crash in a dozen fresh processes is a defect, not noise"
Parts = tuple[
    dict[str, Observation],
    tuple[Limit, ...],
    tuple[PlantedFault, ...],
    Rollback | None,
    tuple[Trial, ...],
    dict[str, Series],
]


def freeze_parts(device: str) -> Parts:
    """Return what the freeze stage saw, its limits, planted faults, rollback, trials and figures."""
    plan = [("extra", "legacy", 0, 1), ("extra", "cached", 0, 1)]
    plan += [("noise floor", "legacy", pair, 1) for pair in range(3) for _ in range(2)] + [
        ("headroom", "cached", pair, 1) for pair in range(3)
    ]
    trials = example_trials("0_freeze_baseline", device, plan)
    observations: dict[str, Observation] = {
        "batches_repeat": _equal("batches of a second legacy pass", 46),
        "legacy_repeats": _equal("losses and gradient norms, legacy against legacy", 92),
        "trial_failures": failures_from_trials(trials, "fresh-process trials that failed"),
    }
    limits = (
        _limit("batches_repeat", "equal", 0, "a baseline that does not repeat proves nothing", primary=True),
        _limit("legacy_repeats", "equal", 0, "legacy against legacy is the numeric noise floor"),
        _limit("trial_failures", "at most", 0, NO_CRASH),
    )
    planted = PlantedFault(
        what="one bit of one frozen batch flipped",
        observation="batches_repeat",
        seen=Equality(what="batches", num_compared=46, num_equal=45, num_mismatched=1),
        caught=True,
    )
    return observations, limits, (planted,), None, trials, {}


def memory_parts(device: str, broken: bool, slow: bool) -> Parts:
    """Return what the memory stage saw, its limits, planted faults, rollback, trials and figures."""
    plan = [("extra", "legacy", 0, 1), ("extra", "pooled", 0, 1), *abba_plan("pooled", 6), *NOISE_FLOOR]
    trials = example_trials("1_pinned_pool", device, plan, 1.68 if slow else 1.0)
    wait: Observation = Value(what="a full pool makes the producer wait", value=True)
    if broken:
        wait = ToolError(
            what="a full pool makes the producer wait",
            error="PoolError: expected a wait of 0.2 s, the clock went backwards",
        )
    observations: dict[str, Observation] = {
        "pool_peak_share_of_cap": Maximum(
            what="pool bytes, share of the cap", unit="fraction", values=(0.648, 0.641, 0.648, 0.633, 0.648, 0.64)
        ),
        "batches_equal_frozen": _equal("batches against the frozen ones", 23),
        "training_equals_baseline": _equal("losses and gradient norms against the baseline", 46),
        "full_pool_makes_producer_wait": wait,
        "rollback_verified": Value(what="rollback to the legacy path verified", value=True),
        "trial_failures": failures_from_trials(trials, "fresh-process trials that failed"),
        "step_latency_ratio": ratio_from_trials(trials, "pooled", "pooled over legacy, median step"),
    }
    if device == "cpu":
        observations["h2d_bandwidth"] = Unmeasured(what="host-to-device bandwidth by size", reason=NO_CUDA)
    limits = (
        _limit("pool_peak_share_of_cap", "at most", 1.0, "the cap is the promise of this stage", primary=True),
        _limit("batches_equal_frozen", "equal", 0, BIT_EQUAL),
        _limit("training_equals_baseline", "equal", 0, BIT_EQUAL),
        _limit("full_pool_makes_producer_wait", "equal", True, "a full pool must wait, never grow"),
        _limit("rollback_verified", "equal", True, "a stage without an executed rollback may not be promoted"),
        _limit("trial_failures", "at most", 0, NO_CRASH),
        _limit(
            "step_latency_ratio", "at most", 1.05, "bounded memory may not cost more than 5 % of a step", needs="cuda"
        ),
    )
    planted = PlantedFault(
        what="a pool that grows by one slot when it is full",
        observation="pool_peak_share_of_cap",
        seen=Maximum(what="pool bytes, share of the cap", unit="fraction", values=(1.03,)),
        caught=True,
    )
    bandwidth = Series(
        title="Where does page-locked memory pay? Above 1 MiB a copy",
        x_label="copy, MiB",
        y_label="host to device, GB/s",
        lines={
            name: tuple((float(size), rate * size / (size + knee)) for size in (0.06, 0.25, 1, 4, 16, 64))
            for name, rate, knee in (("pageable", 11.0, 0.4), ("pinned", 55.0, 0.9), ("pooled", 54.0, 0.9))
        },
    )
    return (
        observations,
        limits,
        (planted,),
        _rollback("pooled", "legacy"),
        trials,
        {"h2d_bandwidth": bandwidth} if device == "cuda" else {},
    )


def transfer_parts(device: str, diverging: bool) -> Parts:
    """Return what the transfer stage saw, its limits, planted faults, rollback, trials and figures."""
    plan = [("extra", "legacy", 0, 1), ("extra", "prefetched", 0, 1), *abba_plan("prefetched", 6), *NOISE_FLOOR]
    trials = example_trials("2_stream_prefetcher", device, plan)
    divergence = Divergence(
        where="epoch 3, step 7, leaf [0], index [2, 0, 4, 4]",
        legacy="0.43750000 (3ee00000)",
        candidate="0.43750003 (3ee00001)",
        bundle="bundles/divergence-0",
    )
    shadow = _equal("batches, one fetch teed into both copy paths", 2300)
    if diverging:
        shadow = Equality(
            what=shadow.what,
            num_compared=76,
            num_equal=75,
            num_mismatched=1,
            largest_error=2.98e-8,
            first_divergence=divergence,
        )
    observations: dict[str, Observation] = {
        "clean_epochs": Value(
            what="consecutive clean epochs with both shadows", value=3 if diverging else 100, unit="epochs"
        ),
        "transfer_shadow": shadow,
        "loader_shadow": _equal("batches, legacy loader against pooled loader", 76 if diverging else 2300),
        "training_equals_baseline": _equal("losses and gradient norms against the baseline", 46),
        "final_traffic_share": Value(what="share of traffic on the new path", value=0.1 if diverging else 1.0),
        "legacy_is_retired": Value(what="legacy loader is never constructed any more", value=not diverging),
        "rollback_verified": Value(what="rollback to the legacy path verified", value=True),
        "trial_failures": failures_from_trials(trials, "fresh-process trials that failed"),
        "step_latency_ratio": ratio_from_trials(trials, "prefetched", "prefetched over legacy, median step"),
    }
    limits = (
        _limit(
            "clean_epochs",
            "at least",
            100,
            "the mission: 100 consecutive clean epochs before legacy goes",
            primary=True,
        ),
        _limit("transfer_shadow", "equal", 0, BIT_EQUAL),
        _limit("loader_shadow", "equal", 0, BIT_EQUAL),
        _limit("training_equals_baseline", "equal", 0, BIT_EQUAL),
        _limit("final_traffic_share", "equal", 1.0, "a ramp that ends below 100 % leaves the old path in charge"),
        _limit("legacy_is_retired", "equal", True, "after retirement the legacy loader is never constructed"),
        _limit("rollback_verified", "equal", True, "a stage without an executed rollback may not be promoted"),
        _limit("trial_failures", "at most", 0, NO_CRASH),
        _limit(
            "step_latency_ratio", "at most", 1.02, "the new path may not cost more than 2 % of a step", needs="cuda"
        ),
    )
    planted = PlantedFault(
        what="one byte of one device batch changed after its copy",
        observation="transfer_shadow",
        seen=Equality(what=shadow.what, num_compared=23, num_equal=22, num_mismatched=1),
        caught=True,
    )
    ramp = Series(
        title="Does the new path take all traffic? 0 to 100 % over the clean epochs",
        x_label="epoch",
        y_label="share of traffic, %",
        lines={
            "new path": tuple(
                (float(e), s) for e, s in ((0, 0), (9, 0), (10, 10), (39, 10), (40, 50), (79, 50), (80, 100), (99, 100))
            )
        },
    )
    return observations, limits, (planted,), _rollback("prefetched", "pooled"), trials, {"traffic_ramp": ramp}


def expansion_parts(device: str) -> Parts:
    """Return what the expansion stage saw, its limits, planted faults, rollback, trials and figures."""
    plan = [entry for world_size in (4, 8, 32) for entry in abba_plan("ddp", 2, "single", world_size)]
    trials = example_trials("3_ddp_expansion", "cpu", plan)
    observations: dict[str, Observation] = {
        "probe_equals_single_process": _equal("weights of the integer probe model, 4, 8 and 32 ranks", 1260),
        "gradients_near_baseline": Equality(
            what="gradients on the frozen batches, norm-wise",
            num_compared=36,
            num_equal=20,
            num_within_tolerance=16,
            tolerance=7.6e-6,
            largest_error=2.4e-7,
        ),
        "killed_rank_is_named": Value(what="a killed rank gives a named error inside the deadline", value=True),
        "rollback_verified": Value(what="rollback to the rung before verified", value=True),
        "trial_failures": failures_from_trials(trials, "fresh-process trials that failed"),
        "scaling_efficiency": Value(what="throughput of 32 ranks against 32 x one rank", value=0.83)
        if device == "cuda"
        else Unmeasured(
            what="throughput of 32 ranks against 32 x one rank", reason="routing verified on CPU, speed not measured"
        ),
    }
    limits = (
        _limit("probe_equals_single_process", "equal", 0, "integers add up exactly in any order", primary=True),
        _limit("gradients_near_baseline", "equal", 0, "64 eps norm-wise: the order of an fp32 sum differs"),
        _limit("killed_rank_is_named", "equal", True, "a dead rank must not become a hang"),
        _limit("rollback_verified", "equal", True, "a stage without an executed rollback may not be promoted"),
        _limit("trial_failures", "at most", 0, NO_CRASH),
        _limit("scaling_efficiency", "at least", 0.7, "below that the bucket layout is wrong", needs="cuda"),
    )
    planted = PlantedFault(
        what="rank 2 averages over world size - 1",
        observation="probe_equals_single_process",
        seen=Equality(what="weights", num_compared=420, num_equal=0, num_mismatched=420),
        caught=True,
    )
    return observations, limits, (planted,), _rollback("ddp, 32 ranks", "ddp, 8 ranks"), trials, {}


def report_parts(records: dict[str, StageRecord]) -> Parts:
    """Return what the report stage saw, its limits, planted faults, rollback, trials and figures."""
    num_lines = sum(len(record.verdict.lines) + 1 for record in records.values())
    observations: dict[str, Observation] = {
        "verdicts_recomputed": _equal("gate lines computed again from the raw values", num_lines)
    }
    limits = (
        _limit(
            "verdicts_recomputed",
            "equal",
            0,
            "a verdict that does not follow from its record is worth nothing",
            primary=True,
        ),
    )
    planted = PlantedFault(
        what="a verdict edited in every record",
        observation="verdicts_recomputed",
        seen=Equality(
            what="gate lines", num_compared=num_lines, num_equal=num_lines - len(records), num_mismatched=len(records)
        ),
        caught=True,
    )
    return observations, limits, (planted,), None, (), {}
