"""The seal of a run: what it covers, and that it can be computed again."""

import json
from pathlib import Path

import pytest
from sealed_run import write_page, write_sealed_run

from dualtrack.facts.digests import sha256_file
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.ledger import Ledger, RunDigest
from dualtrack.reporting.manifest import evidence_root, write_manifest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_sealed_run(folder)
    return folder


def seals(run: Path) -> list[RunDigest]:
    return [entry for entry in Ledger(run / "ledger.jsonl").entries() if isinstance(entry, RunDigest)]


def test_every_file_but_the_seal_itself_is_listed(run: Path) -> None:
    listed = set(json.loads((run / "manifest.json").read_bytes())["files"])
    present = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert present - listed == {"manifest.json", "ledger.jsonl", ".ledger.jsonl.lock"}
    assert "index.html" in listed


def test_the_digest_of_the_manifest_stands_in_the_ledger(run: Path) -> None:
    assert seals(run)[-1].manifest_digest == sha256_file(run / "manifest.json")


def test_sealing_an_unchanged_run_again_changes_nothing(run: Path) -> None:
    before = (run / "manifest.json").read_bytes(), (run / "ledger.jsonl").read_bytes()
    digest = write_manifest(run)
    assert ((run / "manifest.json").read_bytes(), (run / "ledger.jsonl").read_bytes()) == before
    assert digest == sha256_file(run / "manifest.json")


def test_sealing_a_changed_run_again_keeps_the_earlier_seal(run: Path) -> None:
    first = seals(run)[0]
    (run / "figures" / "new.csv").write_text("a\n")
    write_page(run)
    write_manifest(run)
    assert seals(run)[0] == first
    assert seals(run)[1].evidence_root != first.evidence_root


@pytest.mark.parametrize(
    ("name", "is_evidence"),
    [("records/x.json", 1), ("notebooks/x", 1), ("figures/x", 1), ("html/x", 0), ("index.html", 0)],
)
def test_the_evidence_root_covers_records_notebooks_and_figures(run: Path, name: str, is_evidence: int) -> None:
    before = evidence_root(run)
    (run / name).write_text("changed")
    assert (evidence_root(run) != before) == bool(is_evidence)


def test_a_folder_without_evidence_is_not_sealed(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("x")
    with pytest.raises(EvidenceError, match="found none"):
        write_manifest(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_a_link_is_not_sealed(run: Path) -> None:
    (run / "records" / "elsewhere.json").symlink_to(run / "run.json")
    with pytest.raises(EvidenceError, match=r"records/elsewhere\.json: expected a regular file"):
        write_manifest(run)
