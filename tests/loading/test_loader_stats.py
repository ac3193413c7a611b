"""Figures over time stay small however long a run is."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dualtrack.loading.loader_stats import LoaderCounts, ThinnedSeries


@given(st.integers(0, 3000), st.integers(2, 40))
def test_a_series_is_bounded_and_spans_the_whole_run(num_points: int, length: int) -> None:
    series = ThinnedSeries(length)
    for value in range(num_points):
        series.add(value)
    values = [value for _, value in series.points()]
    assert len(values) <= length
    assert values == sorted(values)
    assert values[:1] == ([0] if num_points else [])
    steps = {after - before for before, after in itertools.pairwise(values)}
    assert len(steps) <= 1
    if values:
        assert num_points - values[-1] <= (steps.pop() if steps else 1)


def test_buffers_of_the_first_batch_are_warm_up() -> None:
    counts = LoaderCounts()
    counts.num_batches = 1
    counts.note_allocation()
    assert counts.num_allocations_after_warmup == 0
    counts.num_batches = 2
    counts.note_allocation()
    assert counts.num_allocations_after_warmup == 1
