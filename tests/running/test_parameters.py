"""Parameters from the command line are typed and checked before anything starts."""

import pytest

from dualtrack.running.parameters import collect_parameters, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [("6", 6), ("0.5", 0.5), ("true", True), ("[0, 0.5, 1]", [0, 0.5, 1]), ('"6"', "6"), ("digits", "digits"), ("12e4567", "12e4567"), ("007", "007"), ("1_000", "1_000"), ("NaN", "NaN"), ("", "")],
)  # fmt: skip
def test_a_value_is_what_json_says_it_is(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    "assignment",
    [
        "num_pairs=12e4567",
        "num_pairs=007",
        "num_pairs=true",
        "num_pairs=1_000",
        "num_pairs=six",
        "1_pinned_pool.cap_bytes=-1",
    ],
)
def test_an_ill_typed_value_is_refused(assignment: str) -> None:
    with pytest.raises(ValueError, match=r"num_pairs|cap_bytes"):
        collect_parameters([assignment], {})


@pytest.mark.parametrize(
    ("assignment", "hint"),
    [
        ("num_piars=3", "num_pairs"),
        ("1_pined_pool.num_pairs=3", "1_pinned_pool"),
        ("1_pinned_pool.cap_byte=3", "cap_bytes"),
        ("seed", "name=value"),
    ],
)
def test_an_unknown_name_shows_the_nearest_valid_one(assignment: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        collect_parameters([assignment], {})


def test_a_bare_name_reaches_every_stage_that_bears_it_and_a_stage_name_one() -> None:
    chosen = collect_parameters(["num_pairs=3", "1_pinned_pool.num_pairs=4"], {"workload": "digits"})
    assert chosen["0_freeze_baseline"]["num_pairs"] == 3
    assert chosen["1_pinned_pool"]["num_pairs"] == 4
    assert "num_pairs" not in chosen["4_migration_report"]
    assert {parameters["workload"] for parameters in chosen.values()} == {"digits"}
