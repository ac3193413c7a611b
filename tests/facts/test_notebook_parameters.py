"""The guard behind a notebook's parameters cell."""

import sys

import pytest

from dualtrack.facts.notebook_parameters import read_parameters
from dualtrack.facts.settings import FreezeSettings


def test_known_names_become_settings() -> None:
    names = {
        "workload": "digits",
        "num_pairs": 3,
        "run_folder": "reports/x",
        "_": 1,
        "In": [],
        "Out": {},
        "sys": sys,
        "read_parameters": read_parameters,
    }
    settings, run_folder = read_parameters(FreezeSettings, names)
    assert (settings.num_pairs, run_folder) == (3, "reports/x")


def test_a_misspelt_name_is_refused_with_the_nearest_valid_one() -> None:
    with pytest.raises(ValueError, match=r"num_piars.*num_pairs"):
        read_parameters(FreezeSettings, {"workload": "digits", "num_piars": 3})


def test_a_notebook_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="found no parameter"):
        read_parameters(FreezeSettings, {"In": [], "sys": sys})


def test_running_the_cell_again_leaves_the_notebooks_own_variables_alone() -> None:
    names = {"workload": "digits", "num_pairs": 3}
    read_parameters(FreezeSettings, names)
    names |= {"record": object(), "frozen": "abc", "num_pairs": 4}
    settings, _ = read_parameters(FreezeSettings, names)
    assert settings.num_pairs == 4


def test_a_run_folder_that_is_no_string_is_refused() -> None:
    with pytest.raises(ValueError, match="run_folder"):
        read_parameters(FreezeSettings, {"workload": "digits", "run_folder": 3})
