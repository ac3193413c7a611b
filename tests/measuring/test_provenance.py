"""Provenance: what is collected, what a missing field reads as, and what may never be in it."""

import getpass
import importlib
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dualtrack.facts.digests import sha256_file
from dualtrack.measuring import code_state, provenance

GROUPS = {
    "code", "sources", "own_sources", "packages", "python", "platform", "cpu", "memory", "cgroup", "gpu", "torch", "threads", "load", "environment",
}  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of its own with one committed file."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "job.py").write_text("print(1)\n")
    git(folder, "add", "job.py")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    return folder


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout


def described(folder: Path) -> dict[str, Any]:
    found = code_state.describe_code(folder)
    assert found is not None
    return found


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_every_group_is_there_and_is_plain_json() -> None:
    found = provenance.collect("cpu")
    assert found.keys() == GROUPS
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_no_field_is_blank() -> None:
    assert not [leaf for leaf in leaves(provenance.collect("cpu")) if leaf is None or leaf == ""]


def test_what_cannot_be_read_is_not_collected_and_stops_nothing() -> None:
    def broken() -> str:
        raise RuntimeError("driver gone")

    fields = {"raises": broken, "none": lambda: None, "blank": lambda: "", "zero": lambda: 0, "off": lambda: False}
    assert provenance.read_fields(fields) == {
        "raises": "not collected",
        "none": "not collected",
        "blank": "not collected",
        "zero": 0,
        "off": False,
    }


def test_a_machine_without_git_still_has_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = provenance.collect("cpu")
    assert found["code"] == "not collected"
    assert found["cpu"]["num_logical"] >= 1


def test_without_cuda_each_field_of_the_gpu_is_not_collected() -> None:
    assert set(provenance.collect("cpu")["gpu"].values()) == {"not collected"}


def test_nothing_of_the_machine_or_its_user_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", str(tmp_path / "topology.xml"))
    monkeypatch.setenv("TORCH_API_TOKEN", "hunter2hunter2")
    monkeypatch.setenv("MASTER_ADDR", "node-17.example")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("AWS_SESSION", "unrelated")
    found = provenance.collect("cpu")
    text = json.dumps(found)
    assert not re.search(r'"(/|[A-Za-z]:\\)', text), "an absolute path"
    assert not re.search(
        rf"\b{re.escape(socket.gethostname())}\b", json.dumps({**found, "sources": 0, "own_sources": 0, "code": 0})
    )
    assert not re.search(
        rf'"[^"]*\b{re.escape(getpass.getuser())}\b', json.dumps({**found, "sources": 0, "own_sources": 0, "code": 0})
    )
    assert str(Path.home()) not in text
    for secret in ("hunter2hunter2", "node-17.example", "topology.xml", "AWS_SESSION"):
        assert secret not in text
    kept = found["environment"]
    assert kept["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert kept["NCCL_TOPO_FILE"] == kept["TORCH_API_TOKEN"] == kept["MASTER_ADDR"] == "set, value not recorded"


def test_imported_sources_are_digested_by_their_path_and_others_are_not() -> None:
    sources = provenance.collect("cpu")["sources"]
    module = sys.modules["dualtrack.facts.digests"]
    assert module.__file__ is not None
    assert sources["dualtrack/facts/digests.py"] == sha256_file(Path(module.__file__))
    assert all(name.startswith("dualtrack/") for name in sources)


def test_the_users_own_imported_files_are_digested_apart(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    monkeypatch.syspath_prepend(str(repository))
    (repository / "dualtrack_test_job.py").write_text("a = 1\n")
    (repository / "never_imported.py").write_text("")
    importlib.import_module("dualtrack_test_job")
    digests = code_state.digest_own_sources()
    assert digests == {"dualtrack_test_job.py": sha256_file(repository / "dualtrack_test_job.py")}


def test_packages_are_those_this_process_imported() -> None:
    packages = provenance.collect("cpu")["packages"]
    assert packages["pytest"] == pytest.__version__
    assert "jupyterlab" not in packages


def test_a_clean_tree_is_clean(repository: Path) -> None:
    found = described(repository)
    assert (found["state"], found["difference_digest"]) == ("clean", "no difference")
    assert found["commit"] == git(repository, "rev-parse", "HEAD").strip()


def test_a_dirty_tree_is_flagged_with_a_digest_of_the_difference(repository: Path) -> None:
    (repository / "job.py").write_text("print(2)\n")
    first = described(repository)
    (repository / "job.py").write_text("print(3)\n")
    second = described(repository)
    assert first["state"] == second["state"] == "dirty"
    assert first["changed"] == ["job.py"]
    assert first["commit"] == second["commit"]
    assert first["difference_digest"] != second["difference_digest"]


def test_an_untracked_file_makes_the_tree_dirty_and_its_bytes_count(repository: Path) -> None:
    (repository / "new.py").write_text("a = 1\n")
    first = described(repository)
    (repository / "new.py").write_text("a = 2\n")
    assert (first["state"], first["untracked"]) == ("dirty", ["new.py"])
    assert described(repository)["difference_digest"] != first["difference_digest"]


def test_the_evidence_that_the_workbook_writes_does_not_make_the_tree_dirty(repository: Path) -> None:
    (repository / "reports" / "run").mkdir(parents=True)
    (repository / "reports" / "run" / "index.html").write_text("x")
    (repository / "ledger.jsonl").write_text("{}\n")
    assert described(repository)["state"] == "clean"


def test_a_folder_outside_any_repository_has_no_code_state(tmp_path: Path) -> None:
    assert code_state.describe_code(tmp_path) is None


def test_the_digest_of_a_source_tree_follows_every_file_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_state, "PACKAGE_FOLDER", tmp_path)
    (tmp_path / "loading").mkdir()
    with pytest.raises(ValueError, match="found none"):
        code_state.digest_source_tree("loading")
    (tmp_path / "loading" / "pool.py").write_text("a")
    before = code_state.digest_source_tree("loading")
    (tmp_path / "loading" / "pool.py").write_text("b")
    assert code_state.digest_source_tree("loading") != before


def test_the_hardware_identity_is_a_stable_file_name_that_tells_threads_apart() -> None:
    identity = provenance.hardware_identity("cpu")
    assert re.fullmatch(r"cpu-[a-z0-9.-]+-\d+threads?-torch\d+\.\d+\.\d+[a-z0-9.]*", identity)
    assert provenance.hardware_identity("cpu") == identity
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert provenance.hardware_identity("cpu") != identity
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-64-core"),
        ("Intel(R) Xeon(R) Platinum 8480+", "intel-xeon-platinum-8480"),
        ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", "intel-core-i7-8650u"),
    ],
)
def test_the_model_of_the_cpu_becomes_part_of_a_file_name(
    model: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_cpu_model", lambda: model)
    assert f"cpu-{expected}-" in provenance.hardware_identity("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_the_gpu_is_named_with_driver_and_clocks() -> None:
    gpu = provenance.collect("cuda")["gpu"]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert gpu["driver"] != "not collected"
    assert gpu["sm_clock_mhz"] > 0
    assert provenance.hardware_identity("cuda").startswith("cuda-")
