"""A project is found by its marker, and runs never share a folder."""

from pathlib import Path

import pytest

from dualtrack.facts.project import find_project


def make_project(folder: Path) -> Path:
    """Write a marker."""
    (folder / "dualtrack.toml").write_text('workload = "mine:create"\n')
    return folder


def test_the_root_is_found_upward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = make_project(tmp_path) / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    project = find_project()
    assert (project.root, project.workload) == (tmp_path.resolve(), "mine:create")


def test_from_nowhere_the_checkout_is_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert find_project().root == Path(__file__).resolve().parents[2]


def test_a_given_root_without_a_marker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected the marker dualtrack\.toml"):
        find_project(tmp_path)


def test_two_runs_in_one_second_get_their_own_folders(tmp_path: Path) -> None:
    project = find_project(make_project(tmp_path))
    folders = {project.new_run_folder("digits") for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() for folder in folders)
