"""The host path benchmark gives plain, consistent records, and the pool stays far ahead of the default loader."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dualtrack.stages import host_path_benchmark
from dualtrack.stages.host_path_benchmark import compare_host_paths, compare_small_epochs, measure_track
from dualtrack.stages.host_path_bounds import HostPathCase, measure_host_copies, transfer_bandwidth

TINY = HostPathCase(batch_size=4, image_shape=(3, 16, 16), num_sources=8, num_workers=1, seconds=0.2)


def test_a_rate_is_batches_over_the_window() -> None:
    rate = measure_track("pooled", "cpu", TINY.model_dump())
    assert rate["bytes_per_second"] == pytest.approx(rate["samples_per_second"] * 3 * 16 * 16)
    assert rate["num_batches"] >= 2
    assert rate["loader_stats"]["num_pageable_batches"] == 0
    assert 0.5 < rate["loader_stats"]["slot_fill_ratio"] <= 1
    json.dumps(rate)


def test_a_float_case_counts_four_bytes_a_value() -> None:
    case = TINY.model_copy(update={"dtype": "float32"})
    assert case.batch_bytes == 4 * TINY.batch_bytes == 4 * 4 * 3 * 16 * 16
    assert case.slot_bytes % 512 == 0


def test_host_copies_are_measured_with_as_many_processes_as_workers() -> None:
    assert measure_host_copies(TINY.model_copy(update={"num_workers": 2}).model_dump()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_bandwidth_without_a_gpu_says_why_there_is_none() -> None:
    assert transfer_bandwidth([1024]) == [
        {"size_bytes": 1024, "pageable": None, "pinned": None, "pooled": None, "reason": "not measured: no CUDA device"}
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pooled_memory_copies_as_fast_as_pinned_memory_and_faster_than_pageable() -> None:
    (row,) = transfer_bandwidth([64 << 20])
    assert row["pooled"] > 0.8 * row["pinned"]
    assert row["pooled"] > 1.5 * row["pageable"]


@pytest.mark.full
def test_the_command_writes_both_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_path_benchmark, "CPU_CASES", (TINY,))
    path = tmp_path / "out.json"
    done = CliRunner().invoke(host_path_benchmark.main, ["--device", "cpu", "--json", str(path), "--repeats", "1"])
    assert done.exit_code == 0, done.output
    records = json.loads(path.read_text())
    assert records["comparisons"][0]["against"] == "legacy"
    assert len(records["comparisons"][0]["rates"]) == 2
    assert records["small_epochs"]["pooled_over_legacy"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("num_sources", "at_least"), [(64, 4), (3000, 3)])
def test_the_pool_is_several_times_faster_than_the_default_loader(num_sources: int, at_least: float) -> None:
    case = HostPathCase(batch_size=64, num_sources=num_sources)
    assert compare_host_paths(case, "cpu", "legacy", num_repeats=3).ratio > at_least


@pytest.mark.full
def test_tiny_batches_are_not_slower_than_legacy() -> None:
    assert (
        compare_small_epochs("digits", num_repeats=5, num_epochs=10)["pooled_over_legacy"] < 1.15
    )  # the noise of a shared machine
