"""The committed example runs verify, and a changed byte in one does not."""

import shutil
from pathlib import Path

import pytest

from dualtrack.reporting.verify import verify_run

REPORTS = Path(__file__).parents[1] / "reports"
EXAMPLES = sorted(folder for folder in REPORTS.glob("example-*") if folder.is_dir())


def test_there_is_an_example_of_a_complete_run() -> None:
    assert [folder.name for folder in EXAMPLES] == ["example-digits-cpu"]


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_a_committed_example_verifies(folder: Path) -> None:
    result = verify_run(folder)
    assert result.ok, result.text()
    assert result.is_complete


@pytest.mark.parametrize(
    "place",
    [
        "records/1_pinned_pool.json",
        "notebooks/2_stream_prefetcher.ipynb",
        "index.html",
        "run.json",
        "ledger.jsonl",
        "manifest.json",
    ],
)
def test_one_changed_byte_of_an_example_is_named(place: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLES[0], tmp_path / EXAMPLES[0].name))
    content = bytearray((folder / place).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / place).write_bytes(content)
    result = verify_run(folder)
    assert not result.ok
    assert any(place in difference for difference in result.differences)
