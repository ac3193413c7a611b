"""Which code ran: commit, whether the tree was clean, and the digests of the source files and packages as this process imported them.

A commit alone lies: it is the same for a clean and a changed tree. So the difference is digested too, and each imported source file by
itself. Names of files are relative to the repository or are module names; no path of the machine is kept.
"""

import functools
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

from dualtrack.facts.digests import combined_digest, sha256_bytes, sha256_file

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
MAX_LISTED_FILES = 50
_GIT_SECONDS = 20.0
# what the workbook itself writes into a project is not a change of its code
_OWN_EVIDENCE = (":(top)", ":(top,exclude)reports", ":(top,exclude)ledger.jsonl", ":(top,exclude).ledger.jsonl.lock")


def describe_code(folder: Path | None = None) -> dict[str, Any] | None:
    """Return commit and state of the git repository that holds `folder`.

    Args:
        folder: None takes the current folder's repository, else the one dualtrack is installed from.

    Returns:
        `commit`, `state` (`clean` or `dirty`), `changed` and `untracked` (names, at most 50 each, with their full numbers),
        `difference_digest` over the binary difference and the untracked files' bytes; None outside any repository.
    """
    root = _repository(folder) if folder is not None else _repository(Path.cwd()) or _repository(PACKAGE_FOLDER)
    if root is None:
        return None
    status = _git(root, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", "--", *_OWN_EVIDENCE)
    entries = [entry for entry in status.decode(errors="replace").split("\0") if entry]
    untracked = sorted(entry[3:] for entry in entries if entry.startswith("??"))
    changed = sorted(entry[3:] for entry in entries if not entry.startswith("??"))
    return {
        "commit": _git(root, "rev-parse", "HEAD").decode().strip(),
        "state": "dirty" if entries else "clean",
        "num_changed": len(changed),
        "changed": changed[:MAX_LISTED_FILES],
        "num_untracked": len(untracked),
        "untracked": untracked[:MAX_LISTED_FILES],
        "difference_digest": _difference_digest(root, untracked) if entries else "no difference",
    }


def digest_imported_sources() -> dict[str, str]:
    """Return the SHA-256 of each file of dualtrack that this process has imported, by its path, for example `dualtrack/loading/pinned_pool.py`."""
    return _digest_modules(PACKAGE_FOLDER, PACKAGE_FOLDER.parent)


def digest_own_sources() -> dict[str, str]:
    """Return the SHA-256 of each imported file of the user's own repository, by its path in it; empty outside any repository."""
    root = _repository(Path.cwd())
    if root is None:
        return {}
    found = _digest_modules(root, root)
    return {name: digest for name, digest in found.items() if not (root / name).is_relative_to(PACKAGE_FOLDER)}


def digest_source_tree(*folders: str) -> str:
    """Return one digest over every source file of dualtrack's sub-packages, imported or not: the key of the clean-epoch count.

    Args:
        folders: For example `loading`, `training`; relative to the package.
    """
    files = sorted(path for folder in folders for path in (PACKAGE_FOLDER / folder).rglob("*.py"))
    if not files:
        raise ValueError(f"expected source files in {', '.join(folders)}, found none; the package is incomplete")
    return combined_digest({path.relative_to(PACKAGE_FOLDER).as_posix(): sha256_file(path) for path in files})


def list_imported_packages() -> dict[str, str]:
    """Return distribution name -> version for each installed package that this process has imported."""
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    known = _distributions()
    names = {distribution for top in tops for distribution in known.get(top, ())}
    return {name: importlib.metadata.version(name) for name in sorted(names, key=str.lower)}


def _digest_modules(folder: Path, base: Path) -> dict[str, str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).resolve() for file in files if isinstance(file, str) and file.endswith(".py")}
    own = (
        path
        for path in paths
        if path.is_relative_to(folder) and path.is_file() and not _is_installed(path.relative_to(folder))
    )
    return {path.relative_to(base).as_posix(): sha256_file(path) for path in sorted(own)}


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {name: list(found) for name, found in importlib.metadata.packages_distributions().items()}


def _is_installed(path: Path) -> bool:
    return "site-packages" in path.parts or "dist-packages" in path.parts


def _repository(folder: Path) -> Path | None:
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel").decode().strip())
    except (OSError, subprocess.SubprocessError):
        return None


def _difference_digest(root: Path, untracked: list[str]) -> str:
    difference = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color", "--", *_OWN_EVIDENCE)
    digests = {"difference": sha256_bytes(difference)}
    for name in untracked:
        path = root / name
        digests[f"untracked/{name}"] = sha256_file(path) if path.is_file() else "no regular file"
    return combined_digest(digests)


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, check=True, timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL
    ).stdout
