"""The verification matrix of a rung, computed from what its ranks returned: one observation a check, pure functions without a process.

A rung is compared with the frozen legacy gradients (V3 to V6) and with the single process that runs the same plan through the same code
(V2, V10 to V12); V1, V8 and V9 compare ranks with each other. The numbers V1 to V13 are those of the matrix in the documentation.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dualtrack.facts.expansion_settings import ExpansionSettings
from dualtrack.facts.observations import Divergence, Equality, Observation, Unmeasured
from dualtrack.stages.expansion_counting import compare, padded, within
from dualtrack.stages.expansion_curves import (
    FLOAT32_EPS,
    curve_float64,
    curve_in_band,
    parameters_across_ranks,
    run_repeats,
    schedule,
)
from dualtrack.stages.expansion_rung import Rung
from dualtrack.training.gradient_buckets import BucketLayout
from dualtrack.training.rank_checks import share_explained_by_cyclic_sums

LARGEST_ELEMENT_ALLOWANCE = 4.0
"""The norm decides; one element may be off by so many times its tolerance (60 eps were seen in a convolution over 64 x 64 pixels)."""


def check_rung(rung: Rung, settings: ExpansionSettings) -> dict[str, Observation]:
    """Return the observations of one rung, by key."""
    checks: dict[str, Callable[[], Observation]] = {
        "ranks_agree_on_settings": lambda: settings_agree(rung),
        "samples_as_planned": lambda: samples_as_planned(rung),
        "samples_as_delivered": lambda: samples_as_delivered(rung),
        "initial_parameters_equal": lambda: initial_parameters(rung),
        "probe_gradients_bit_equal": lambda: probe_gradients(rung.results, rung.probe),
        "gradients_float64": lambda: legacy_gradients(rung, "float64", settings.float64_tolerance),
        "gradients_float32": lambda: legacy_gradients(rung, "float32", settings.float32_tolerance_eps * FLOAT32_EPS),
        "reduction_order": lambda: reduction_order(rung),
        "parameters_equal_across_ranks": lambda: parameters_across_ranks(rung),
        "run_repeats": lambda: run_repeats(rung),
        "loss_curve_float64": lambda: curve_float64(rung, settings.curve64_tolerance),
        "loss_curve_float32_in_band": lambda: curve_in_band(rung, settings.band_widening),
        "schedule_equal": lambda: schedule(rung),
        "bucket_layout_as_predicted": lambda: bucket_layout(rung),
    }
    return {key: check() for key, check in checks.items()}


def settings_agree(rung: Rung) -> Equality:
    """V1: every rank runs the same versions, parameters, cap, timeout, plan and seed as rank 0; DDP compares neither caps nor data order."""
    first = rung.results[0]["facts"]
    pairs = [
        (f"rank {rank}, {name}", first[name], result["facts"].get(name))
        for rank, result in enumerate(rung.results)
        for name in first
    ]
    return compare("settings of all ranks against rank 0", pairs)


def samples_as_planned(rung: Rung) -> Equality:
    """V2: at every step the ranks' ids are disjoint, in order the planned ids, and as many on each; an epoch is the chosen subset."""
    pairs: list[tuple[str, Any, Any]] = []
    num_steps = len(rung.results[0]["ids"])
    for step in range(num_steps):
        joined = [sample for result in rung.results for sample in result["ids"][step]]
        pairs.append((f"ids of step {step}", rung.plan.step_ids(step).tolist(), joined))
        pairs.append(
            (
                f"share sizes of step {step}",
                [rung.plan.batch_per_rank(rung.world_size)],
                sorted({len(result["ids"][step]) for result in rung.results}),
            )
        )
    for epoch in range(num_steps // rung.plan.steps_per_epoch):
        steps = range(epoch * rung.plan.steps_per_epoch, (epoch + 1) * rung.plan.steps_per_epoch)
        seen = sorted(sample for step in steps for result in rung.results for sample in result["ids"][step])
        pairs.append((f"samples of epoch {epoch}", sorted(rung.plan.selected_ids.tolist()), seen))
    return compare("planned ids by step and epoch", pairs)


def samples_as_delivered(rung: Rung) -> Equality:
    """V2: the ranks' datasets gave the samples that the single process got, and every rank's stage 2 path delivered them, bit for bit."""
    pairs: list[tuple[str, Any, Any]] = []
    for step, expected in enumerate(rung.single["curve32"]["sample_digests"]):
        drawn = [digest for result in rung.results for digest in result["curve32"]["sample_digests"][step]]
        pairs += [
            (f"step {step}, sample {place} of the global batch", want, got)
            for place, (want, got) in enumerate(zip(expected, padded(drawn, len(expected)), strict=True))
        ]
    for rank, result in enumerate(rung.results):
        pairs += [
            (f"rank {rank}, batch delivered at step {step}", want, got)
            for step, (want, got) in enumerate(result["curve32"]["batch_digests"])
        ]
    return compare("samples drawn and batches delivered", pairs)


def initial_parameters(rung: Rung) -> Equality:
    """V3: parameters and buffers before the first step, on every rank, are those of the legacy baseline."""
    expected = rung.legacy.initial_parameters_digest
    return compare(
        "initial parameters against the legacy baseline",
        [(f"rank {rank}", expected, result["initial_digest"]) for rank, result in enumerate(rung.results)],
    )


def probe_gradients(results: Sequence[dict[str, Any]], expected: Sequence[str]) -> Equality:
    """V4: the integer probe's averaged gradient equals the single process bit for bit on every rank."""
    pairs = [
        (f"rank {rank}, batch {place}", want, got)
        for rank, result in enumerate(results)
        for place, (want, got) in enumerate(zip(expected, padded(result["probe"], len(expected)), strict=True))
    ]
    return compare("gradients of the integer probe against one process", pairs)


def legacy_gradients(rung: Rung, precision: str, tolerance: float) -> Observation:
    """V5 and V6: averaged gradients on the frozen legacy batches, at legacy weights, against the legacy gradients, norm-wise per parameter."""
    what = f"{precision} gradients on frozen batches against legacy"
    if precision not in rung.results[0]:
        return Unmeasured(what=what, reason=rung.legacy.float64_error or "the ranks computed none")
    errors = rung.results[0][precision]["errors"]
    judged = [
        (f"{error['parameter']}, batch {error['step']}, {norm}", float(error[key]) / allowance)
        for error in errors
        for key, norm, allowance in (("relative", "L2", 1.0), ("largest", "largest element", LARGEST_ELEMENT_ALLOWANCE))
    ]
    different = {tuple(result[precision]["digests"]) for result in rung.results} - {
        tuple(rung.results[0][precision]["digests"])
    }
    seen = within(what, judged, tolerance)
    if not different:
        return seen
    return seen.model_copy(update={
        "num_compared": seen.num_compared + 1, "num_mismatched": seen.num_mismatched + 1,
        "first_divergence": Divergence(where="averaged gradients of the ranks", legacy="the same on every rank", candidate="they differ"),
    })  # fmt: skip


def reduction_order(rung: Rung) -> Observation:
    """V7, advisory: every element of the averaged gradient is one of the cyclic sums of what the ranks put in."""
    what = "elements explained by a cyclic sum of the ranks' contributions"
    if rung.backend == "nccl" and rung.world_size > 2:
        return Unmeasured(
            what=what, reason="NCCL's order of sums from 3 ranks on depends on its algorithm, which it does not tell"
        )
    num_explained, num = share_explained_by_cyclic_sums(rung.folder, rung.world_size)
    return Equality(what=what, num_compared=num, num_equal=num_explained, num_mismatched=num - num_explained)


def bucket_layout(rung: Rung) -> Equality:
    """V13: every rank built the predicted buckets, once it had rebuilt them; they hold all gradient bytes once, and step 1 had one bucket."""
    predicted = rung.legacy.predicted_layouts[0]
    pairs: list[tuple[str, Any, Any]] = []
    for rank, result in enumerate(rung.results):
        built = BucketLayout.model_validate(result["layout"]) if result["layout"] is not None else None
        buckets = [] if built is None else sorted((bucket.parameters, bucket.num_bytes) for bucket in built.buckets)
        pairs.append(
            (
                f"rank {rank}, buckets",
                sorted((bucket.parameters, bucket.num_bytes) for bucket in predicted.buckets),
                buckets,
            )
        )
        pairs.append(
            (f"rank {rank}, gradient bytes", rung.legacy.gradient_bytes, 0 if built is None else built.num_bytes)
        )
        pairs.append((f"rank {rank}, buckets of the first step", 1, result["num_initial_buckets"]))
    return compare("bucket layout against the prediction", pairs)
