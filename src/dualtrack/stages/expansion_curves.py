"""Checks V8 to V12: what training gave on many ranks, against rank 0, against itself and against the single process."""

from collections.abc import Sequence
from typing import Any

from dualtrack.facts.observations import Equality, Observation, Unmeasured
from dualtrack.stages.expansion_counting import compare, relative, within
from dualtrack.stages.expansion_rung import Rung

FLOAT32_EPS = 2.0**-23
NCCL_REPEAT_TOLERANCE = 64 * FLOAT32_EPS


def parameters_across_ranks(rung: Rung) -> Equality:
    """V8: after steps 1 and 2 and every few, all ranks hold the same parameters."""
    pairs: list[tuple[str, Any, Any]] = []
    for curve in rung.curves:
        expected = rung.results[0][curve]["parameter_digests"]
        for rank, result in enumerate(rung.results):
            pairs += [
                (f"{curve}, rank {rank}, after step {step}", want, result[curve]["parameter_digests"].get(step))
                for step, want in expected.items()
            ]
    return compare("parameters of all ranks against rank 0", pairs)


def run_repeats(rung: Rung) -> Equality:
    """V9: the same steps from the same start give the same losses again; exact on gloo, within rounding on NCCL, whose order may change."""
    pairs = [
        (f"rank {rank}, step {step}", want, got)
        for rank, result in enumerate(rung.results)
        for step, (want, got) in enumerate(zip(result["curve32"]["losses"], result["repeated"]["losses"], strict=False))
    ]
    if rung.backend == "nccl":
        return within(
            "losses of a second run",
            [(where, relative(got, want)) for where, want, got in pairs],
            NCCL_REPEAT_TOLERANCE,
        )
    return compare("losses of a second run", pairs)


def curve_float64(rung: Rung, tolerance: float) -> Observation:
    """V10: the float64 loss of every step against the single process."""
    what = "float64 losses against the single process"
    if "curve64" not in rung.results[0]:
        return Unmeasured(what=what, reason=rung.legacy.float64_error or "the ranks computed none")
    means = mean_losses(rung.results, "curve64")
    expected = rung.single["curve64"]["losses"]
    return within(
        what, [(f"step {step}", relative(loss, expected[step])) for step, loss in enumerate(means)], tolerance
    )


def curve_in_band(rung: Rung, widening: float) -> Equality:
    """V11: the float32 loss of every step, and the mean of the last epoch, inside the band of permuted single-process reruns.

    The error of a step is its distance from the reruns' spread in units of the room that is left around it; 1 is the edge of the band.
    """
    means = mean_losses(rung.results, "curve32")
    band = loss_band(rung.single, widening)[: len(means)]
    errors = [(f"step {step}", _distance(loss, *band[step])) for step, loss in enumerate(means)]
    last = rung.plan.steps_per_epoch
    low, high, room = (_mean_of_last([values[place] for values in band], last) for place in range(3))
    errors.append(("mean of the last epoch", _distance(_mean_of_last(means, last), low, high, room)))
    return within("float32 losses inside the band of permuted single-process reruns", errors, 1.0)


def _distance(loss: float, low: float, high: float, room: float) -> float:
    return max(0.0, low - loss, loss - high) / room if loss == loss else float("nan")


def loss_band(single: dict[str, Any], widening: float) -> list[tuple[float, float, float]]:
    """Return low, high and room of each step: the spread of the reruns, and how far around it a loss may lie.

    The room is `widening` times the widest spread so far, and 64 eps of the loss at least: training that has parted by rounding does not come
    together again at a step where the reruns happen to cross.
    """
    runs = [single["curve32"]["losses"], *single["band"]]
    band, widest = [], 0.0
    for values in zip(*runs, strict=True):
        low, high = min(values), max(values)
        widest = max(widest, high - low)
        band.append((low, high, widening * widest + 64 * FLOAT32_EPS * max(abs(low), abs(high))))
    return band


def schedule(rung: Rung) -> Equality:
    """V12: learning rate, number of steps and samples of each step are those of the single process."""
    pairs: list[tuple[str, Any, Any]] = []
    for curve in rung.curves:
        expected = rung.single[curve]
        num_steps = len(rung.results[0][curve]["losses"])
        for rank, result in enumerate(rung.results):
            mine = result[curve]
            pairs.append(
                (
                    f"{curve}, rank {rank}, learning rates",
                    expected["learning_rates"][:num_steps],
                    mine["learning_rates"],
                )
            )
            pairs.append((f"{curve}, rank {rank}, number of steps", num_steps, len(mine["losses"])))
        seen = [sum(counts) for counts in zip(*(result[curve]["num_samples"] for result in rung.results), strict=True)]
        pairs.append((f"{curve}, samples a step", expected["num_samples"][:num_steps], seen))
    return compare("learning rate, steps and samples against the single process", pairs)


def mean_losses(results: Sequence[dict[str, Any]], curve: str) -> list[float]:
    """Return the loss of the global batch at each step: the mean of the ranks' means, which are over equally many samples."""
    return [sum(losses) / len(results) for losses in zip(*(result[curve]["losses"] for result in results), strict=True)]


def _mean_of_last(values: Sequence[float], num_last: int) -> float:
    last = values[-num_last:]
    return sum(last) / len(last)
