"""Read a notebook's parameters cell, and refuse what no setting bears.

papermill only logs an unknown parameter; here the second code cell stops before anything is started.
"""

import types
from collections.abc import MutableMapping
from typing import Any, TypeVar

from dualtrack.facts.settings import StageSettings

IPYTHON_NAMES = frozenset({"In", "Out", "exit", "quit", "get_ipython", "open"})
RUN_FOLDER = "run_folder"
READ_BEFORE = "_parameters_read_before"

Settings = TypeVar("Settings", bound=StageSettings)


def read_parameters(settings: type[Settings], names: MutableMapping[str, Any]) -> tuple[Settings, str]:
    """Validate the names that the parameters cell (and papermill's injected cell) defined.

    Args:
        settings: The stage's settings class.
        names: The notebook's `globals()`, right after the parameters cell. In a kernel where the cell ran before, names that no setting
            bears are the notebook's own variables by now, and are left alone.

    Returns:
        The settings, and `run_folder`: where the record goes, relative to the project's root; empty for a folder of its own.

    Raises:
        ValueError: A name is unknown, missing or ill-typed; the nearest valid name is shown.
    """
    given = {
        name: value
        for name, value in names.items()
        if not name.startswith("_")
        and name not in IPYTHON_NAMES
        and not isinstance(value, types.ModuleType | types.FunctionType | type)
    }
    run_folder = given.pop(RUN_FOLDER, "")
    if not isinstance(run_folder, str):
        raise ValueError(f"{RUN_FOLDER}: expected a string, got {run_folder!r}")
    if names.get(READ_BEFORE):
        given = {name: value for name, value in given.items() if name in settings.model_fields}
    names[READ_BEFORE] = True
    if not given:
        raise ValueError(
            "expected a cell tagged 'parameters' before this one, found no parameter; restore the notebook's first code cell"
        )
    return settings.parse(given), run_folder
