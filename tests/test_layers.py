"""The structure that CONTRIBUTING.md draws: imports go one way, modules and functions stay small, facts and reporting do without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "dualtrack"
ALLOWED = {
    "facts": {"facts"},
    "measuring": {"facts", "measuring"},
    "loading": {"facts", "measuring", "loading"},
    "training": {"facts", "measuring", "loading", "training"},
    "workloads": {"facts", "training", "workloads"},
    "stages": {"facts", "measuring", "loading", "training", "stages"},
    "reporting": {"facts", "reporting"},
    "running": {"facts", "reporting", "running"},
}
MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 320, 60, 6
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield every module name that is imported, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def layer_of(module: str) -> str | None:
    """Return the layer of a dualtrack module, or None for another package or the root's own modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == "dualtrack" and len(parts) > 1 and parts[1] in ALLOWED else None


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parent != PACKAGE], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_go_one_way(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0]
    names = list(imported_modules(ast.parse(path.read_text())))
    wrong = [name for name in names if (layer := layer_of(name)) is not None and layer not in ALLOWED[own]]
    assert wrong == []
    assert "dualtrack" not in names, "never through the package root"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"
            names = [
                argument.arg
                for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if argument.arg not in ("self", "cls")
            ]
            is_command = any(
                "command" in ast.unparse(decorator) for decorator in node.decorator_list
            )  # click passes one parameter an option
            assert is_command or len(names) <= MAX_PARAMETERS, (
                f"{node.name} takes {len(names)} parameters; make a settings object"
            )


@pytest.mark.parametrize("layer", ["facts", "reporting", "running"])
def test_a_reviewer_needs_no_torch(layer: str) -> None:
    names = [
        ".".join(["dualtrack", *path.relative_to(PACKAGE).with_suffix("").parts])
        for path in sorted((PACKAGE / layer).glob("*.py"))
    ]
    assert names
    script = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_nothing_happens_at_import() -> None:
    script = "import threading, dualtrack.loading.pooled_loader, dualtrack.loading.stream_prefetcher, torch\nassert threading.active_count() == 1\nassert not torch.cuda.is_initialized()"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
