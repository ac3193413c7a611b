"""Bundles of a first divergence: what is written reads back, and the recorded verdict follows from the recorded bytes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from dualtrack.facts.errors import EvidenceError
from dualtrack.loading.batch_compare import compare_batches
from dualtrack.loading.divergence_bundle import (
    RECORD_NAME,
    TENSORS_NAME,
    BundleContext,
    compare_bundle,
    describe_divergence,
    load_bundle,
    recompare,
    write_bundle,
)

CONTEXT = BundleContext(
    epoch=3, step=7, shadow="transfer shadow", device="cuda:0", sample_reference={"workload": "digits", "batch": 7}
)


def write(folder, legacy, candidate, **options):
    return write_bundle(folder, CONTEXT, compare_batches(legacy, candidate).first, legacy, candidate, **options)


PAIRS = {
    "bits": ([torch.zeros(4, 3), torch.arange(4)], [torch.eye(4, 3), torch.arange(4)]),
    "nan payload": (
        [torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)],
        [torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)],
    ),
    "dtype": ([torch.zeros(2)], [torch.zeros(2, dtype=torch.float16)]),
    "shape": ([torch.zeros(2)], [torch.zeros(1, 2)]),
    "strides": ([torch.zeros(3, 2)], [torch.zeros(2, 3).t()]),
    "structure": ({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": 1}),
    "value": ([1.5, "cat", b"x", None, np.arange(3)], [1.5, "cat", b"x", None, np.arange(1, 4)]),
    "scalar": ([torch.tensor(1.0)], [torch.tensor(2.0)]),
    "bfloat16": ([torch.ones(2, dtype=torch.bfloat16)], [2 * torch.ones(2, dtype=torch.bfloat16)]),
    "float8": (
        [torch.tensor([1, 2], dtype=torch.uint8).view(torch.float8_e8m0fnu)],
        [torch.tensor([1, 3], dtype=torch.uint8).view(torch.float8_e8m0fnu)],
    ),
    "transposed": ([torch.arange(6.0).reshape(2, 3).t()], [-torch.arange(6.0).reshape(2, 3).t()]),
    "expanded": ([torch.zeros(1).expand(4)], [torch.ones(1).expand(4)]),
    "sparse": ([torch.eye(3).to_sparse()], [(2 * torch.eye(3)).to_sparse()]),
    "empty": ([torch.zeros(0, 2), 1], [torch.zeros(0, 2), 2]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_recorded_verdict_follows_from_the_recorded_bytes(tmp_path, name):
    legacy, candidate = PAIRS[name]
    write(tmp_path / "bundle", legacy, candidate)
    result = recompare(tmp_path / "bundle")
    assert result.same_verdict, result
    assert result.found.model_dump(exclude={"device"}) == result.recorded.model_dump(exclude={"device"})
    assert result.versions_recorded == result.versions_now
    assert result.context == CONTEXT


def test_the_bytes_of_both_sides_read_back(tmp_path):
    legacy, candidate = PAIRS["transposed"]
    write(tmp_path / "bundle", legacy, candidate)
    bundle = load_bundle(tmp_path / "bundle")
    assert torch.equal(bundle.legacy[1].content, legacy[0]) and torch.equal(bundle.candidate[1].content, candidate[0])
    assert bundle.legacy[1].content.stride() == legacy[0].stride()


def test_a_large_batch_is_cut_down_to_the_differing_row(tmp_path):
    legacy = {"image": torch.zeros(1000, 1000), "other": torch.zeros(100_000)}
    candidate = {"image": legacy["image"].clone(), "other": legacy["other"].clone()}
    candidate["image"][617, 3] = 1
    record = write(tmp_path / "bundle", legacy, candidate, max_bytes=20_000)
    assert not record.is_whole_batch
    assert (tmp_path / "bundle" / TENSORS_NAME).stat().st_size < 10_000
    result = recompare(tmp_path / "bundle")
    assert result.same_verdict
    assert result.recorded.index == (617, 3)


def test_a_large_batch_of_another_form_keeps_only_the_forms(tmp_path):
    record = write(tmp_path / "bundle", [torch.zeros(1000, 100)], [torch.zeros(1000, 101)], max_bytes=1000)
    assert not record.is_whole_batch
    assert recompare(tmp_path / "bundle").same_verdict


def test_an_object_that_no_file_can_hold_is_named(tmp_path):
    write(tmp_path / "bundle", [torch.zeros(1), object], [torch.ones(1), object])
    assert recompare(tmp_path / "bundle").same_verdict
    assert "opaque" in (tmp_path / "bundle" / RECORD_NAME).read_text()


def test_a_changed_byte_is_noticed(tmp_path):
    write(tmp_path / "bundle", *PAIRS["bits"])
    path = tmp_path / "bundle" / TENSORS_NAME
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(EvidenceError, match="was changed after it was written"):
        load_bundle(tmp_path / "bundle")


def test_a_verdict_that_does_not_follow_from_the_bytes_is_noticed(tmp_path):
    write(tmp_path / "bundle", *PAIRS["bits"])
    path = tmp_path / "bundle" / RECORD_NAME
    record = json.loads(path.read_text())
    record["difference"]["candidate"] = "9.0 (bytes 00001041)"
    path.write_text(json.dumps(record))
    assert not recompare(tmp_path / "bundle").same_verdict


def test_a_missing_or_foreign_folder_is_no_bundle(tmp_path):
    with pytest.raises(EvidenceError, match="expected a divergence bundle"):
        load_bundle(tmp_path)


def test_a_bundle_is_never_replaced_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path / "bundle", *PAIRS["bits"])
    with pytest.raises(FileExistsError, match="bundle exists"):
        write(tmp_path / "bundle", *PAIRS["bits"])
    monkeypatch.setattr("safetensors.torch.load_file", lambda path: {name: torch.zeros(1) for name in "abc"})
    with pytest.raises((EvidenceError, KeyError)):
        write(tmp_path / "other", *PAIRS["bits"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def test_a_round_trip_that_loses_bytes_is_refused(tmp_path, monkeypatch):
    import safetensors.torch

    load = safetensors.torch.load_file
    monkeypatch.setattr(
        "safetensors.torch.load_file", lambda path: {name: tensor ^ 1 for name, tensor in load(path).items()}
    )
    with pytest.raises(EvidenceError, match="does not read back"):
        write(tmp_path / "bundle", *PAIRS["bits"])


def test_the_divergence_says_where_in_words():
    difference = compare_batches(*PAIRS["bits"]).first
    divergence = describe_divergence(CONTEXT, difference, "bundles/one")
    assert divergence.where == "epoch 3, step 7, leaf [0], index [0, 0]"
    assert (divergence.legacy, divergence.candidate) == ("0.0 (bytes 00000000)", "1.0 (bytes 0000803f)")


def test_another_process_without_the_dataset_comes_to_the_same_verdict(tmp_path):
    write(tmp_path / "bundle", *PAIRS["bits"])
    code = "import sys, pathlib; from dualtrack.loading.divergence_bundle import recompare; print(recompare(pathlib.Path(sys.argv[1])).same_verdict)"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bundle")], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == "True"


def test_bundles_are_compared_by_the_code_that_compares_live_batches(tmp_path):
    legacy, candidate = PAIRS["bits"]
    write(tmp_path / "bundle", legacy, candidate)
    assert compare_bundle(load_bundle(tmp_path / "bundle")) == compare_batches(legacy, candidate)
