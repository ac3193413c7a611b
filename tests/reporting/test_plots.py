"""Figures: what is drawn is what was recorded, and the same data gives the same bytes."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pandas as pd
import pytest
from example_trials import CAP_BYTES, abba_plan, example_trials

from dualtrack.facts.records import Outcome, Series
from dualtrack.reporting.inline_figures import inline_svg
from dualtrack.reporting.plots import (
    memory_frame,
    plot_memory,
    plot_series,
    plot_step_latency,
    plot_throughput,
    save_figure,
    series_frame,
    step_latency_frame,
    thin,
    throughput_frame,
)

PLAN = [("extra", "legacy", 0, 1), ("extra", "pooled", 0, 1), *abba_plan("pooled", 3), ("noise floor", "legacy", 0, 1)]


@pytest.fixture
def trials():
    return example_trials("1_pinned_pool", "cpu", PLAN)


def drawn_lines(panel):
    return {line.get_label(): np.asarray(line.get_ydata(), dtype=float) for line in panel.lines}


def test_memory_frame_holds_each_sample_of_each_trial_once(trials):
    frame = memory_frame(trials)
    pooled = frame[(frame["track"] == "pooled") & (frame["series"] == "pool")]
    assert tuple(pooled["bytes"]) == trials[1].memory.pool_bytes
    assert list(pooled["step"]) == list(range(130))
    legacy = frame[(frame["track"] == "legacy") & (frame["series"] == "pss")]
    assert tuple(legacy["bytes"]) == trials[0].memory.pss_bytes
    assert len(frame) == 130 * 3  # process memory of both tracks, the pool of one
    assert frame.groupby("series").size().to_dict() == {"pool": 130, "pss": 260}


def test_memory_is_drawn_over_seconds_where_it_was_not_sampled_step_by_step(trials):
    by_clock = trials[1].model_copy(update={"num_steps": 7})
    assert memory_frame([by_clock])["step"].isna().all()
    assert plot_memory([by_clock]).axes[-1].get_xlabel() == "time since the first sample, s"
    assert plot_memory(trials).axes[-1].get_xlabel() == "step, warm-up included"


def test_memory_figure_draws_the_recorded_bytes_and_the_cap(trials):
    figure = plot_memory(trials, CAP_BYTES)
    lines = drawn_lines(figure.axes[1])
    assert np.array_equal(lines["pooled"], np.array(trials[1].memory.pool_bytes) / 2**20)
    assert set(lines["cap 64.0 MiB"]) == {64.0}
    assert figure.get_label() == "Does the pool stay below its cap? Yes: at most 41.5 MiB of 64.0 MiB"


def test_memory_title_says_no_when_one_sample_is_above_the_cap(trials):
    samples = trials[1].memory
    above = (*samples.pool_bytes[:-1], CAP_BYTES + 2**20)
    worse = trials[1].model_copy(update={"memory": samples.model_copy(update={"pool_bytes": above})})
    assert (
        plot_memory([trials[0], worse], CAP_BYTES).get_label()
        == "Does the pool stay below its cap? No: at most 65.0 MiB of 64.0 MiB"
    )


def test_throughput_is_drawn_in_order_of_execution_without_the_slowed_memory_runs(trials):
    frame = throughput_frame(tuple(reversed(trials)))
    assert list(frame["position"]) == [2, 3, 4, 5, 6, 7, 8]
    assert list(frame["samples_per_second"]) == [trial.samples_per_second for trial in trials[2:]]
    panel = plot_throughput(trials).axes[0]
    drawn = drawn_lines(panel)
    assert list(drawn["pooled"]) == [
        t.samples_per_second for t in trials if t.track == "pooled" and t.block == "paired"
    ]
    assert list(drawn["legacy (noise floor)"]) == [trials[-1].samples_per_second]


def test_a_run_that_died_is_drawn_as_a_cross_and_not_left_out(trials):
    died = trials[4].model_copy(
        update={
            "samples_per_second": None,
            "outcome": Outcome(state="failed", cause="killed by signal SIGKILL", seconds=1.0),
        }
    )
    changed = [*trials[:4], died, *trials[5:]]
    frame = throughput_frame(changed)
    assert frame.set_index("position").loc[4, "outcome"] == "killed by signal SIGKILL"
    assert "no figure" in drawn_lines(plot_throughput(changed).axes[0])


def test_a_run_that_was_not_to_be_timed_is_no_cross_in_the_figure(trials):
    untimed = trials[0].model_copy(update={"samples_per_second": None, "memory": None, "step_seconds": ()})
    assert list(throughput_frame([untimed, *trials[2:]])["position"]) == [2, 3, 4, 5, 6, 7, 8]
    assert "no figure" not in drawn_lines(plot_throughput([untimed, *trials[2:]]).axes[0])


def test_bytes_of_a_series_are_drawn_as_mebibytes():
    series = Series(
        title="Weight?",
        x_label="ranks",
        y_label="bytes (PSS)",
        lines={"rank": ((4.0, 2.0**21), (8.0, 2.0**22))},
        bounds={"cap": 2.0**23},
    )
    panel = plot_series(series).axes[0]
    assert panel.get_ylabel() == "MiB (PSS)"
    assert list(drawn_lines(panel)["rank"]) == [2.0, 4.0]
    assert set(drawn_lines(panel)["cap 8.00"]) == {8.0}


def test_step_latency_shows_median_tail_and_longest_step_of_each_run(trials):
    frame = step_latency_frame(trials).set_index("position")
    milliseconds = np.array(trials[3].step_seconds) * 1e3
    assert frame.loc[3, "p50_milliseconds"] == pytest.approx(np.median(milliseconds))
    assert frame.loc[3, "p95_milliseconds"] == pytest.approx(np.percentile(milliseconds, 95))
    assert frame.loc[3, "max_milliseconds"] == pytest.approx(milliseconds.max())
    assert frame.loc[3, "num_steps"] == 120
    assert "legacy" in drawn_lines(plot_step_latency(trials).axes[0])


def test_series_figure_and_frame_change_with_one_plotted_value():
    series = Series(
        title="Ramp?", x_label="epoch", y_label="%", lines={"new": ((0.0, 0.0), (1.0, 50.0))}, bounds={"goal": 100.0}
    )
    other = series.model_copy(update={"lines": {"new": ((0.0, 0.0), (1.0, 51.0))}})
    assert not series_frame(series).equals(series_frame(other))
    assert list(drawn_lines(plot_series(other).axes[0])["new"]) == [0.0, 51.0]
    assert series_frame(series).to_dict("list")["line"] == ["new", "new", "bound: goal"]


def test_every_figure_states_units_and_asks_a_question(trials):
    for figure in (plot_memory(trials), plot_throughput(trials), plot_step_latency(trials)):
        assert "?" in figure.get_label()
        assert all(panel.get_ylabel() for panel in figure.axes)
        assert figure.axes[-1].get_xlabel()


def test_figures_of_no_trials_say_not_measured():
    for figure in (plot_memory(()), plot_throughput(()), plot_step_latency(())):
        assert figure.get_label().endswith("Not measured")
        assert "not measured" in [text.get_text() for text in figure.axes[0].texts]


def test_saving_twice_gives_equal_bytes_without_a_date(trials, tmp_path):
    for folder in ("one", "two"):
        save_figure(plot_throughput(trials), throughput_frame(trials), tmp_path / folder, "throughput")
    for name in ("throughput.svg", "throughput.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    text = (tmp_path / "one" / "throughput.svg").read_text()
    assert "dc:date" not in text
    assert "Matplotlib v" not in text
    data = pd.read_csv(tmp_path / "one" / "throughput.csv")
    assert data["samples_per_second"].tolist() == pytest.approx([t.samples_per_second for t in trials[2:]], rel=1e-8)


def test_thinning_keeps_the_highest_and_the_lowest_point():
    y = np.zeros(100_000)
    y[61_234], y[77_777] = 9.0, -9.0
    x, kept = thin(np.arange(100_000), y)
    assert len(kept) <= 400
    assert (kept.max(), kept.min()) == (9.0, -9.0)
    assert x[kept.argmax()] == 61_234


def test_inlined_figures_share_no_id_and_follow_the_page_s_colours(trials, tmp_path):
    picture, _ = save_figure(plot_memory(trials), memory_frame(trials), tmp_path, "memory")
    one, two = (inline_svg(picture.read_text(), prefix, "Memory & cap") for prefix in ("a", "b"))
    ids = [{e.get("id") for e in ElementTree.fromstring(svg).iter() if e.get("id")} for svg in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert 'aria-label="Memory &amp; cap"' in one
    assert "var(--ink)" in one
    assert "#1c2127" not in one
    targets = {e.get("href")[1:] for e in ElementTree.fromstring(one).iter() if e.get("href")}
    assert targets <= ids[0]


def test_inlining_drops_whatever_does_not_draw():
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" onload="x()"><script>alert(1)</script>'
        '<a href="https://example.com"><text>t</text></a><rect id="r" style="fill: url(https://example.com)"/></svg>'
    )
    assert inline_svg(svg, "p", "t") == '<svg role="img" aria-label="t" focusable="false"><rect id="p-r" /></svg>'
    with pytest.raises(ValueError, match="can't be parsed"):
        inline_svg("<svg", "p", "t")


def test_a_figure_shows_itself_in_a_notebook_with_its_title_as_alternative_text(trials):
    data, details = plot_throughput(trials)._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    assert data["text/plain"].startswith("Figure: How fast is each run")
    assert details["image/png"]["alt"].startswith("How fast is each run")


def test_plots_need_neither_torch_nor_a_display():
    code = (
        "import sys, dualtrack.reporting.plots; sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env={"PATH": "", "HOME": "/"}).returncode == 0
