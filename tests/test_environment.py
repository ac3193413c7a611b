"""The two ways to install give the same versions."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def pins(lines: list[str]) -> dict[str, str]:
    """Return package -> version of every `name==version` line."""
    found = (re.fullmatch(r"([A-Za-z0-9_.\-]+)==(\S+)", line.strip()) for line in lines)
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def test_environment_yml_and_constraints_carry_the_same_pins() -> None:
    constraints = pins((ROOT / "constraints.txt").read_text().splitlines())
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict)]
    assert len(constraints) > 50
    assert pins(pip) == constraints


def test_every_pin_is_exact() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(pins(lines)) == len(lines)


def test_every_requirement_is_pinned() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {re.split(r"[<>=!\[;]", requirement)[0].lower().replace("_", "-") for requirement in asked}
    assert names <= pins((ROOT / "constraints.txt").read_text().splitlines()).keys()
