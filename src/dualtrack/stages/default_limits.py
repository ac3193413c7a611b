"""What the gates demand unless a project says otherwise; written to `limits.json` at the freeze, where margins are reviewed and changed."""

from dualtrack.facts.observations import Limit
from dualtrack.stages.expansion_limits import EXPANSION

BIT_EQUAL = "the mathematics is the same, so every bit must be"
EVERY_TRIAL = "one crash in a dozen fresh processes is a defect, not noise; zero failures is stated with its bound"

FREEZE = (
    Limit(observation="batches_repeat", relation="equal", bound=0, reason="a baseline that does not repeat proves nothing", primary=True),
    Limit(observation="legacy_repeats", relation="equal", bound=0, reason="legacy against legacy is the numeric noise floor; with deterministic algorithms it is zero"),
    Limit(
        observation="copy_keeps_batches",
        relation="equal",
        bound=0,
        reason="stages 1 and 2 compare copies bit for bit; scaling, casting and unpacking belong into loss()",
    ),
    Limit(observation="trial_failures", relation="at most", bound=0, reason=EVERY_TRIAL),
)  # fmt: skip

MEMORY = (
    Limit(observation="pool_peak_share_of_cap", relation="at most", bound=1.0, reason="the cap is the promise of this stage", primary=True),
    Limit(observation="batches_equal_frozen", relation="equal", bound=0, reason=BIT_EQUAL),
    Limit(observation="training_equals_baseline", relation="equal", bound=0, reason=BIT_EQUAL),
    Limit(observation="full_pool_makes_producer_wait", relation="equal", bound=True, reason="a full pool must wait, never grow"),
    Limit(observation="pools_are_isolated", relation="equal", bound=True, reason="evaluation may not take training's memory"),
    Limit(observation="allocations_after_warmup", relation="equal", bound=0, reason="a late page-lock stalls the device (pytorch/pytorch#97432)"),
    Limit(observation="refused_in_process_group", relation="equal", bound=True, reason="this stage allows no distributed communication"),
    Limit(observation="rollback_verified", relation="equal", bound=True, reason="a stage without an executed rollback may not be promoted"),
    Limit(observation="trial_failures", relation="at most", bound=0, reason=EVERY_TRIAL),
    Limit(observation="step_latency_ratio", relation="at most", bound=1.05, reason="bounded memory may not cost more than 5 % of a step", needs="cuda"),
    Limit(observation="step_latency_p95_ratio", relation="at most", bound=1.25, reason="a few slow steps must not hide behind a good median", needs="cuda"),
    Limit(observation="step_latency_max_ratio", relation="at most", bound=2.0, reason="one longest step a run is a noisy figure: shown, not deciding", needs="cuda", advisory=True),
)  # fmt: skip

TRANSFER = (
    Limit(observation="clean_epochs", relation="at least", bound=100, reason="the mission: 100 consecutive clean epochs before legacy goes", primary=True),
    Limit(observation="batches_equal_frozen", relation="equal", bound=0, reason=BIT_EQUAL),
    Limit(observation="transfer_shadow", relation="equal", bound=0, reason=BIT_EQUAL),
    Limit(observation="loader_shadow", relation="equal", bound=0, reason=BIT_EQUAL),
    Limit(observation="training_equals_baseline", relation="equal", bound=0, reason=BIT_EQUAL),
    Limit(observation="fallback_is_exact", relation="equal", bound=0, reason="after a fault each sample is delivered exactly once, in order"),
    Limit(observation="final_traffic_share", relation="equal", bound=1.0, reason="a ramp that ends below 100 % leaves the old path in charge"),
    Limit(observation="legacy_is_retired", relation="equal", bound=True, reason="after retirement the legacy loader is never constructed"),
    Limit(observation="pool_peak_share_of_cap", relation="at most", bound=1.0, reason="the cap of stage 1 still holds"),
    Limit(observation="rollback_verified", relation="equal", bound=True, reason="a stage without an executed rollback may not be promoted"),
    Limit(observation="trial_failures", relation="at most", bound=0, reason=EVERY_TRIAL),
    Limit(observation="step_latency_ratio", relation="at most", bound=1.02, reason="the new path may not cost more than 2 % of a step", needs="cuda"),
    Limit(
        observation="step_latency_p95_ratio", relation="at most", bound=1.25, needs="cuda", advisory=True,
        reason="look-ahead joins the workers two steps early: on an H200 20 + 40 ms in two steps of 23 where legacy took 65 ms in one; shown, not deciding",
    ),
    Limit(observation="step_latency_max_ratio", relation="at most", bound=2.0, reason="one longest step a run is a noisy figure: shown, not deciding", needs="cuda", advisory=True),
)  # fmt: skip

REPORT = (
    Limit(observation="verdicts_recomputed", relation="equal", bound=0, reason="a verdict that does not follow from its raw values is worth nothing", primary=True),
)  # fmt: skip


def default_limits() -> dict[str, tuple[Limit, ...]]:
    """Return the limits of every stage that has a gate, by stage."""
    return {
        "0_freeze_baseline": FREEZE,
        "1_pinned_pool": MEMORY,
        "2_stream_prefetcher": TRANSFER,
        "3_ddp_expansion": EXPANSION,
        "4_migration_report": REPORT,
    }
