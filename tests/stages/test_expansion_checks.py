"""Each check of the matrix passes on a rung in which everything is right, and fails when the one thing it is about is wrong."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dualtrack.facts.expansion_settings import ExpansionSettings
from dualtrack.facts.line_judges import judge_observation
from dualtrack.facts.observations import Equality, Observation, State, Unmeasured
from dualtrack.stages import expansion_checks as checks
from dualtrack.stages import expansion_curves as curves
from dualtrack.stages.expansion import failing_checks
from dualtrack.stages.expansion_counting import merge, within
from dualtrack.stages.expansion_limits import RUNG_LIMITS
from dualtrack.stages.expansion_rung import Rung
from tests.stages.rung_examples import PLAN, good_rung

SETTINGS = ExpansionSettings()
CHECKS: dict[str, Callable[[Rung], Observation]] = {
    "ranks_agree_on_settings": checks.settings_agree, "samples_as_planned": checks.samples_as_planned,
    "samples_as_delivered": checks.samples_as_delivered, "initial_parameters_equal": checks.initial_parameters,
    "probe_gradients_bit_equal": lambda rung: checks.probe_gradients(rung.results, rung.probe),
    "gradients_float64": lambda rung: checks.legacy_gradients(rung, "float64", 1e-12),
    "gradients_float32": lambda rung: checks.legacy_gradients(rung, "float32", 7.6e-6),
    "parameters_equal_across_ranks": curves.parameters_across_ranks, "run_repeats": curves.run_repeats,
    "loss_curve_float64": lambda rung: curves.curve_float64(rung, 1e-9), "loss_curve_float32_in_band": lambda rung: curves.curve_in_band(rung, 3.0),
    "schedule_equal": curves.schedule, "bucket_layout_as_predicted": checks.bucket_layout,
}  # fmt: skip
LIMITS = {limit.observation: limit for limit in RUNG_LIMITS}


def state_of(key: str, rung: Rung) -> State:
    return judge_observation(CHECKS[key](rung), LIMITS[key]).state


def change(result: dict[str, Any], path: str, value: Any) -> None:
    *way, last = path.split(".")
    for step in way:
        result = result[int(step) if isinstance(result, list) else step]
    result[int(last) if isinstance(result, list) else last] = value  # type: ignore[call-overload, index]


@pytest.mark.parametrize("key", CHECKS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rung_in_which_everything_is_right_passes(key: str, world_size: int) -> None:
    assert state_of(key, good_rung(world_size)) is State.PASSED


@pytest.mark.parametrize(("key", "path", "value"), [
    ("ranks_agree_on_settings", "facts.bucket_cap_mb", 25.0),
    ("ranks_agree_on_settings", "facts.plan", "another order"),
    ("samples_as_planned", "ids.0", PLAN.rank_ids(0, 0, 2).tolist()),
    ("samples_as_planned", "ids.3", [1]),
    ("samples_as_delivered", "curve32.sample_digests.1.2", "drawn otherwise"),
    ("samples_as_delivered", "curve32.sample_digests.0", ["s0-4"]),
    ("samples_as_delivered", "curve32.batch_digests.1", ["b1", "changed in the pool"]),
    ("initial_parameters_equal", "initial_digest", "another"),
    ("probe_gradients_bit_equal", "probe", ["a", "c"]),
    ("probe_gradients_bit_equal", "probe", ["a"]),
    ("gradients_float64", "float64.digests", ["another on this rank"]),
    ("parameters_equal_across_ranks", "curve32.parameter_digests.2", "drifted"),
    ("run_repeats", "repeated.losses.1", 1.5000001),
    ("loss_curve_float64", "curve64.losses.2", 1.2000001),
    ("loss_curve_float64", "curve64.losses.2", math.nan),
    ("loss_curve_float32_in_band", "curve32.losses.2", 1.3),
    ("loss_curve_float32_in_band", "curve32.losses.2", math.nan),
    ("schedule_equal", "curve32.learning_rates.3", 0.01),
    ("schedule_equal", "curve32.num_samples.3", 5),
    ("bucket_layout_as_predicted", "layout", None),
    ("bucket_layout_as_predicted", "num_initial_buckets", 2),
    ("bucket_layout_as_predicted", "layout.buckets.0.num_bytes", 44),
])  # fmt: skip
def test_one_wrong_thing_on_the_last_rank_fails_its_check(key: str, path: str, value: Any) -> None:
    rung = good_rung()
    change(rung.results[1], path, value)
    assert state_of(key, rung) is State.FAILED


@pytest.mark.parametrize(("precision", "error"), [("float64", 5e-12), ("float32", 4e-5), ("float64", math.nan)])
@pytest.mark.parametrize("norm", ["relative", "largest"])
def test_a_gradient_beyond_its_tolerance_fails_and_is_named(precision: str, error: float, norm: str) -> None:
    rung = good_rung()
    rung.results[0][precision]["errors"][1][norm] = error
    seen = CHECKS[f"gradients_{precision}"](rung)
    assert isinstance(seen, Equality)
    assert seen.num_mismatched == 1
    assert seen.first_divergence is not None
    assert seen.first_divergence.where.startswith("bias, batch 0")
    assert state_of(f"gradients_{precision}", rung) is State.FAILED


def test_without_float64_the_check_is_not_measured_with_the_reason() -> None:
    rung = good_rung()
    for result in rung.results:
        del result["float64"]
    seen = CHECKS["gradients_float64"](rung)
    assert isinstance(seen, Unmeasured)
    assert state_of("gradients_float64", rung) is State.NOT_MEASURED


def test_the_band_grows_with_the_reruns_and_never_shrinks() -> None:
    single = {"curve32": {"losses": [1.0, 1.0, 1.0]}, "band": [[1.0, 1.1, 1.0], [1.0, 0.9, 1.0]]}
    rooms = [room for _, _, room in curves.loss_band(single, 3.0)]
    assert rooms[0] < 1e-4
    assert rooms[1] == pytest.approx(0.6, rel=1e-4)
    assert rooms[2] >= rooms[1] - 1e-5


def test_on_nccl_a_rerun_may_differ_by_rounding_and_by_no_more() -> None:
    rung = dataclasses.replace(good_rung(), backend="nccl")
    change(rung.results[1], "repeated.losses.1", rung.results[1]["curve32"]["losses"][1] * (1 + 1e-7))
    assert state_of("run_repeats", rung) is State.PASSED
    change(rung.results[1], "repeated.losses.1", 1.6)
    assert state_of("run_repeats", rung) is State.FAILED


def test_a_reduction_in_the_expected_cyclic_order_is_explained_and_a_mean_of_other_numbers_is_not(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    local = [torch.randn(1000) / 3 for _ in range(3)]
    for rank, gradient in enumerate(local):
        save_file({"gradient": gradient}, tmp_path / f"local-{rank:05d}.safetensors")
    rung = dataclasses.replace(good_rung(), world_size=3, folder=tmp_path)
    save_file(
        {"gradient": torch.cat([(local[1] + local[0] + local[2])[:500], (local[0] + local[2] + local[1])[500:]])},
        tmp_path / "reduced.safetensors",
    )
    seen = checks.reduction_order(rung)
    assert isinstance(seen, Equality)
    assert (seen.num_compared, seen.num_mismatched) == (1000, 0)
    save_file({"gradient": local[0]}, tmp_path / "reduced.safetensors")
    other = checks.reduction_order(rung)
    assert isinstance(other, Equality)
    assert other.num_mismatched > 900


def test_the_order_of_nccl_is_not_claimed_from_three_ranks_on() -> None:
    assert isinstance(checks.reduction_order(dataclasses.replace(good_rung(4), backend="nccl")), Unmeasured)


def test_a_failing_check_stops_the_ladder_and_an_unmeasured_or_advisory_one_does_not() -> None:
    good = within("x", [("here", 0.0)], 1.0)
    bad = within("x", [("here", 2.0)], 1.0)
    assert failing_checks({"gradients_float32": bad, "run_repeats": good}, RUNG_LIMITS) == ["gradients_float32"]
    assert (
        failing_checks({"gradients_float64": Unmeasured(what="x", reason="none"), "reduction_order": bad}, RUNG_LIMITS)
        == []
    )
    assert failing_checks({"gradients_float32": bad}, ()) == ["gradients_float32"]


def test_rungs_join_into_one_count_with_the_first_divergence_and_the_largest_error() -> None:
    joined = merge([within("x", [("a", 0.1)], 1.0), within("x", [("b", 2.0), ("c", 0.5)], 1.0)])
    assert isinstance(joined, Equality)
    assert (joined.num_compared, joined.num_mismatched, joined.largest_error) == (3, 1, 2.0)
    assert joined.first_divergence is not None
    assert joined.first_divergence.where == "b"
    missing = Unmeasured(what="x", reason="one rung lacks it")
    assert merge([joined, missing]) is missing
