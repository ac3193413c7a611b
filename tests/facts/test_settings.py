"""Settings refuse what they do not bear, and say what was meant."""

import pytest

from dualtrack.facts.settings import FreezeSettings, MemorySettings, TransferSettings


def test_a_misspelt_parameter_shows_the_nearest_valid_name() -> None:
    with pytest.raises(ValueError, match=r"unknown parameter 'num_pair'; did you mean 'num_pairs'"):
        MemorySettings.parse({"num_pair": 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_pairs", "6"),
        ("num_pairs", True),
        ("num_pairs", 6.0),
        ("seed", float("inf")),
        ("workload", ["digits"]),
        ("num_steps", "007"),
    ],
)
def test_an_ill_typed_value_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        MemorySettings.parse({name: value})


@pytest.mark.parametrize("ramp", [[0.0, 0.3, 0.6, 0.9], [], [0.5, 0.1, 1.0], [0.0, 1.5]])
def test_a_ramp_that_does_not_end_at_all_traffic_is_refused(ramp: list[float]) -> None:
    with pytest.raises(ValueError, match=r"last rung is exactly 1\.0"):
        TransferSettings.parse({"traffic_ramp": ramp})


def test_a_changed_margin_is_another_digest() -> None:
    assert FreezeSettings().digest() == FreezeSettings().digest()
    assert FreezeSettings().digest() != FreezeSettings(num_pairs=7).digest()


def test_settings_can_not_change_after_they_were_read() -> None:
    settings = MemorySettings()
    with pytest.raises(ValueError, match="frozen"):
        settings.num_pairs = 2  # type: ignore[misc]
