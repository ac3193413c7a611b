"""Frozen inputs are verified at every load, and every kind of damage is named."""

import json
import shutil
from pathlib import Path

import pytest

from dualtrack.facts.errors import FrozenInputError
from dualtrack.facts.frozen_inputs import BATCHES_FILE, load_baseline, load_limits, load_manifest

DIGITS = Path(__file__).parents[2] / "frozen_inputs" / "digits"


@pytest.fixture
def copy_of_digits(tmp_path: Path) -> Path:
    """Return a copy of the frozen digits that a test may damage."""
    return Path(shutil.copytree(DIGITS, tmp_path / "digits"))


def test_the_frozen_digits_verify() -> None:
    manifest = load_manifest(DIGITS)
    assert len(manifest.batches) == 23
    assert sum(len(batch.sample_ids or ()) for batch in manifest.batches) == 1437
    assert {sample for batch in manifest.batches for sample in batch.sample_ids or ()} == set(range(1437))


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9, 0.9999])
def test_one_changed_byte_is_named(copy_of_digits: Path, place: float) -> None:
    path = copy_of_digits / BATCHES_FILE
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(FrozenInputError, match=r"batch_\d{4}\.\d|damaged"):
        load_manifest(copy_of_digits)


def test_a_changed_digest_in_the_manifest_is_refused(copy_of_digits: Path) -> None:
    path = copy_of_digits / "manifest.json"
    manifest = json.loads(path.read_text())
    name = next(iter(manifest["batches"][4]["tensors"]))
    manifest["batches"][4]["tensors"][name] = "0" * 64
    manifest["batches_sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(FrozenInputError, match=name):
        load_manifest(copy_of_digits)


def test_an_lfs_pointer_is_named_as_such(copy_of_digits: Path) -> None:
    (copy_of_digits / BATCHES_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(FrozenInputError, match="git-LFS pointer"):
        load_manifest(copy_of_digits)


@pytest.mark.parametrize("name", [BATCHES_FILE, "manifest.json"])
def test_a_missing_file_is_named(copy_of_digits: Path, name: str) -> None:
    (copy_of_digits / name).unlink()
    with pytest.raises(FrozenInputError, match=name):
        load_manifest(copy_of_digits)


def test_a_baseline_of_other_hardware_is_refused(copy_of_digits: Path) -> None:
    folder = copy_of_digits / "baselines"
    own = next(folder.glob("*.json"))
    own.rename(folder / "cuda-other.json")
    with pytest.raises(FrozenInputError, match="was recorded on"):
        load_baseline(folder, "cuda-other")
    assert load_baseline(folder, "cuda-unknown") is None


def test_every_limit_has_a_reason_and_every_gate_one_primary() -> None:
    limits = load_limits(DIGITS)
    assert set(limits) >= {"0_freeze_baseline", "1_pinned_pool", "2_stream_prefetcher", "3_ddp_expansion"}
    for rules in limits.values():
        assert sum(rule.primary for rule in rules) == 1
        assert all(len(rule.reason) > 10 for rule in rules)
