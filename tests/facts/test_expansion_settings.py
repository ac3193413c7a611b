"""Stage 3's settings: what can't be run or proved is refused before anything starts."""

import pytest

from dualtrack.facts.expansion_settings import ExpansionSettings


def test_the_defaults_are_the_missions_ladder_on_a_tenth_of_the_data() -> None:
    settings = ExpansionSettings()
    assert (settings.ladder, settings.data_fraction) == ((4, 8, 32), 0.10)


def test_lists_from_a_notebook_become_tuples() -> None:
    settings = ExpansionSettings.parse({"ladder": [2, 4], "curve_steps": [20, 20], "sweep_caps_mb": [1, 25]})
    assert (settings.ladder, settings.sweep_caps_mb) == ((2, 4), (1.0, 25.0))


@pytest.mark.parametrize("ladder", [(), (8, 4), (4, 4), (3,), (1, 4), (6,)])
def test_a_ladder_that_does_not_rise_by_powers_of_two_is_refused(ladder: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rising ladder of powers of two"):
        ExpansionSettings.parse({"ladder": ladder, "curve_steps": (30,) * len(ladder)})


def test_a_curve_too_short_for_its_commit_and_resume_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 10"):
        ExpansionSettings.parse({"curve_steps": (30, 30, 9)})


def test_every_rung_has_its_number_of_steps() -> None:
    with pytest.raises(ValueError, match="each of the 2 rungs"):
        ExpansionSettings.parse({"ladder": (2, 4)})


def test_a_misspelt_parameter_shows_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        ExpansionSettings.parse({"bucket_cap": 25.0})
