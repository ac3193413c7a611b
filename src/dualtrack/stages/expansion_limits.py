"""What the gate of stage 3 demands unless a project says otherwise."""

from dualtrack.facts.observations import Limit

_SAME = "the mathematics is the same, so every bit must be"
_ROUNDING = (
    "only the order of a sum differs; the tolerance is norm-wise, because cancelled elements have no digits to compare"
)

RUNG_LIMITS = (
    Limit(observation="ranks_agree_on_settings", relation="equal", bound=0, reason="V1: DDP trains silently with different caps or data orders"),
    Limit(observation="samples_as_planned", relation="equal", bound=0, reason="V2: no sample twice, none lost, none padded, by arithmetic"),
    Limit(observation="samples_as_delivered", relation="equal", bound=0, reason="V2: the pool and the prefetcher of stage 2 carry the planned samples; " + _SAME),
    Limit(observation="initial_parameters_equal", relation="equal", bound=0, reason="V3: every comparison starts from the baseline's own weights"),
    Limit(observation="probe_gradients_bit_equal", relation="equal", bound=0, reason="V4: integers are exact in float32, so there is no rounding to excuse a difference"),
    Limit(observation="gradients_float64", relation="equal", bound=0, reason="V5: 1e-12; 2e-15 was measured, three orders are left for other BLAS libraries"),
    Limit(observation="gradients_float32", relation="equal", bound=0, reason="V6: 64 eps; " + _ROUNDING),
    Limit(observation="reduction_order", relation="equal", bound=0, reason="V7: pins the all-reduce's order of sums; another one is news, not an error", advisory=True),
    Limit(observation="parameters_equal_across_ranks", relation="equal", bound=0, reason="V8: the reduced gradient is the same bytes on every rank"),
    Limit(observation="run_repeats", relation="equal", bound=0, reason="V9: gloo adds in a fixed order, so a rerun has the same bits; NCCL within 64 eps"),
    Limit(observation="loss_curve_float64", relation="equal", bound=0, reason="V10: 1e-9; training amplifies rounding of 1e-16, 1e-12 was measured after 100 steps"),
    Limit(observation="loss_curve_float32_in_band", relation="equal", bound=0, reason="V11: chaos, not DDP, parts float32 curves; permuted single-process reruns show by how much"),
    Limit(observation="schedule_equal", relation="equal", bound=0, reason="V12: learning rate, steps and samples follow from the plan alone"),
    Limit(observation="bucket_layout_as_predicted", relation="equal", bound=0, reason="V13: an explicit cap must do what its number says"),
)  # fmt: skip
"""Judged at every rung before the next one starts, and over all rungs in the record."""

EXPANSION = (
    Limit(observation="rungs_verified", relation="equal", bound=0, reason="the mission: each rung is checked against the single process before the next starts", primary=True),
    *RUNG_LIMITS,
    Limit(observation="pool_peak_share_of_host_cap", relation="at most", bound=1.0, reason="the cap of stage 1 holds for all ranks of a host together"),
    Limit(observation="legacy_anchor", relation="equal", bound=0, reason="the gradients compared with are those of the frozen baseline; " + _ROUNDING),
    Limit(observation="resume_bit_equal", relation="equal", bound=0, reason="V19: a resumed run is the undisturbed one; " + _SAME),
    Limit(observation="resume_other_world_size", relation="equal", bound=0, reason="V20: up and down the ladder the float64 losses stay those of the single process"),
    Limit(observation="killed_rank_named", relation="equal", bound=True, reason="a dead rank is named within the launching process's deadline, and no process is left"),
    Limit(observation="rollback_verified", relation="equal", bound=True, reason="a stage without an executed rollback may not be promoted"),
    Limit(observation="trial_failures", relation="at most", bound=0, reason="one crash in a dozen fresh launches is a defect, not noise; zero failures is stated with its bound"),
    Limit(observation="step_latency_ratio", relation="at most", bound=1.11, reason="efficiency of at least 0.90: the step of many ranks over the step of one, equal samples a rank", needs="cuda"),
)  # fmt: skip


def default_limits() -> tuple[Limit, ...]:
    """Return the limits that a freeze writes to `limits.json` for stage 3."""
    return EXPANSION
