"""A project of its own for every test, with the bundled digits or a workload of the test's."""

from pathlib import Path

import pytest

from dualtrack.facts.project import Project, find_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return an empty project."""
    (tmp_path / "dualtrack.toml").write_text('workload = "digits"\n')
    return find_project(tmp_path)
