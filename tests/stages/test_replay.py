"""Replay: the recorded bytes speak again in an isolated process, and a race that does not recur is reported as such."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dualtrack.facts.errors import EvidenceError, TrialError
from dualtrack.loading.batch_compare import compare_batches
from dualtrack.loading.divergence_bundle import BundleContext, load_bundle, write_bundle
from dualtrack.stages import replay as replay_module
from dualtrack.stages.replay import replay, run_sample_again

CPU = torch.device("cpu")


def batches() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a legacy batch and a candidate in which one element differs."""
    legacy = {
        "image": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
        "label": torch.tensor([1, 2]),
        "name": "a",
    }
    candidate = {**legacy, "image": legacy["image"].clone()}
    candidate["image"][1, 2, 3] = -5.0
    return legacy, candidate


def write(folder: Path, legacy: Any, candidate: Any, device: str = "cpu") -> Path:
    difference = compare_batches(legacy, candidate).first
    assert difference is not None
    write_bundle(
        folder, BundleContext(epoch=3, step=7, shadow="transfer shadow", device=device), difference, legacy, candidate
    )
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "epoch-3-step-7", *batches())


def test_the_recorded_bytes_give_the_recorded_difference_in_an_isolated_process(bundle: Path) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    result = replay(bundle, 3)
    assert result.bytes_agree
    assert (result.num_reproduced, result.num_other_differences, result.num_repeats) == (0, 0, 3)
    text = str(result)
    assert "compared again  the same difference" in text
    assert "run again       0 of 3 reproduced" in text
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert "epoch 3, step 7" in text
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


def test_the_process_is_isolated_from_environment_folder_and_path(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    real = replay_module.subprocess.Popen

    def watch(command: list[str], **options: Any) -> Any:
        seen.update(options, command=command)
        return real(command, **options)

    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("DUALTRACK_SECRET_TOKEN", "x")
    monkeypatch.setattr(replay_module.subprocess, "Popen", watch)
    replay(bundle, 1)
    assert "-I" in seen["command"]
    assert seen["env"].keys() <= {"HOME", "TMPDIR", "LANG", *replay_module.KEPT_VARIABLES}
    assert Path(seen["cwd"]) != Path.cwd()
    assert not Path(seen["cwd"]).exists(), "the temporary folder is gone"


def test_a_record_that_does_not_follow_from_its_bytes_is_told(bundle: Path) -> None:
    path = bundle / "bundle.json"
    record = json.loads(path.read_bytes())
    record["difference"]["candidate"] = "-6.0 (bytes 0000c0c0)"
    path.write_text(json.dumps(record))
    result = replay(bundle, 1)
    assert not result.bytes_agree
    assert "NOT the recorded difference" in str(result)


def test_damaged_bytes_are_refused_before_anything_runs(bundle: Path) -> None:
    path = bundle / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(EvidenceError, match="was changed after it was written"):
        replay(bundle, 1)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="expected a divergence bundle"):
        replay(tmp_path, 1)
    with pytest.raises(ValueError, match="num_repeats of at least 1"):
        replay(tmp_path, 0)


def test_a_process_that_hangs_is_killed_at_its_deadline(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "START_SECONDS", 0.0)
    monkeypatch.setattr(replay_module, "REPEAT_SECONDS", 0.05)
    with pytest.raises(TrialError, match="passed its deadline"):
        replay(bundle, 1)


def test_a_path_that_corrupts_is_reproduced_and_counted(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Corrupting:
        def __init__(self, loader: Any, device: Any, **options: Any) -> None:
            self.loader = loader

        def __enter__(self) -> "Corrupting":
            return self

        def __exit__(self, *error: object) -> None:
            return None

        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(self.loader):
                changed = [tensor.clone() for tensor in batch]
                if number < 2:
                    changed[0][0, 0, 0] = 99.0  # ['image'] comes first in the order of names
                elif number == 2:
                    changed[1][0] = 99
                yield changed

    monkeypatch.setattr(replay_module, "CUDADataPrefetcher", Corrupting)
    assert run_sample_again(load_bundle(bundle), CPU, 4) == ["['image']", "['image']", "['label']", None]


def test_a_difference_of_shape_can_be_run_again_without_its_bytes(tmp_path: Path) -> None:
    legacy = {"image": torch.zeros(2, 3)}
    folder = write(tmp_path / "shape", legacy, {"image": torch.zeros(1, 2, 3)})
    assert run_sample_again(load_bundle(folder), CPU, 2) == [None, None]


def test_a_bundle_from_a_gpu_is_compared_on_a_machine_without_one(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device")
    result = replay_module.replay_here(_staged(write(tmp_path / "gpu", *batches(), device="cuda:0")), 2)
    assert result.bytes_agree
    assert result.note == "recorded on cuda, and there is no cuda device here"


def _staged(bundle: Path) -> Path:
    shutil.copytree(bundle, bundle.parent / "staged" / "bundle")
    return bundle.parent / "staged"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_the_sample_goes_through_the_copy_stream_on_a_gpu(tmp_path: Path) -> None:
    result = replay(write(tmp_path / "gpu", *batches(), device="cuda:0"), 20)
    assert (result.device, result.num_repeats, result.num_reproduced, result.num_other_differences) == (
        "cuda",
        20,
        0,
        0,
    )
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None or result.note == ""
