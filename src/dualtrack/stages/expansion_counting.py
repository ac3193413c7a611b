"""Turn many small comparisons into one counted observation."""

from collections.abc import Iterable, Sequence
from typing import Any

from dualtrack.facts.observations import Divergence, Equality, Observation


def merge(observations: Sequence[Observation]) -> Observation:
    """Join one check over several rungs: counts add up, the largest error and the first divergence stay."""
    equalities = [item for item in observations if isinstance(item, Equality)]
    others = [item for item in observations if not isinstance(item, Equality)]
    if others or not equalities:
        return others[0]
    errors = [item.largest_error for item in equalities if item.largest_error is not None]
    return equalities[0].model_copy(update={
        "num_compared": sum(item.num_compared for item in equalities), "num_equal": sum(item.num_equal for item in equalities),
        "num_within_tolerance": sum(item.num_within_tolerance for item in equalities),
        "num_mismatched": sum(item.num_mismatched for item in equalities), "largest_error": max(errors, default=None),
        "first_divergence": next((item.first_divergence for item in equalities if item.first_divergence is not None), None),
    })  # fmt: skip


def padded(values: Sequence[Any], num: int) -> list[Any]:
    """Return `num` values; missing ones are None, which equals nothing, and values too many join the last one."""
    if len(values) <= num:
        return [*values, *([None] * (num - len(values)))]
    return [*values[: num - 1], tuple(values[num - 1 :])]


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-30)


def compare(what: str, pairs: Iterable[tuple[str, Any, Any]]) -> Equality:
    compared = list(pairs)
    different = [(where, want, got) for where, want, got in compared if want is None or want != got]
    first = None
    if different:
        where, want, got = different[0]
        first = Divergence(where=where, legacy=str(want)[:200], candidate=str(got)[:200])
    return Equality(
        what=what,
        num_compared=len(compared),
        num_equal=len(compared) - len(different),
        num_mismatched=len(different),
        first_divergence=first,
    )


def within(what: str, errors: Sequence[tuple[str, float]], tolerance: float) -> Equality:
    """Count errors up to the tolerance and above it; NaN is above. Zero counts as within, so that the counts repeat on every CPU."""
    above = [(where, error) for where, error in errors if not error <= tolerance]
    first = None
    if above:
        first = Divergence(where=above[0][0], legacy=f"at most {tolerance:.3g}", candidate=f"{above[0][1]:.3g}")
    return Equality(
        what=what, num_compared=len(errors), num_equal=0, num_within_tolerance=len(errors) - len(above), num_mismatched=len(above),
        tolerance=tolerance, largest_error=max((error for _, error in errors), default=None), first_divergence=first,
    )  # fmt: skip
