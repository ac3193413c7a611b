"""The seal of a run: a digest for every file, one root over the evidence, and the manifest's own digest in the run's ledger.

The evidence root covers `records/`, `notebooks/` and `figures/` and is printed on the page; `manifest.json` covers the page too. Nothing in
the manifest is free text: it can be computed again from the folder byte for byte, so a change of any byte anywhere shows.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dualtrack.facts.digests import combined_digest, sha256_bytes, sha256_file
from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.ledger import Ledger, RunDigest, lock_name

MANIFEST_NAME = "manifest.json"
LEDGER_NAME = "ledger.jsonl"
EVIDENCE_FOLDERS = ("records", "notebooks", "figures")


def write_manifest(run_folder: Path) -> str:
    """Write `manifest.json` over every file of a run and enter its digest in the run's ledger.

    Sealing an unchanged run again changes nothing.

    Returns:
        SHA-256 of `manifest.json`, which the terminal prints last.

    Raises:
        EvidenceError: The folder has no evidence, or holds a link.
        LedgerError: The run's ledger is broken.
    """
    ledger = Ledger(run_folder / LEDGER_NAME)
    path = run_folder / MANIFEST_NAME
    if path.is_file() and _is_sealed(run_folder, path.read_bytes(), ledger):
        return sha256_file(path)
    files = digest_files(run_folder)
    before = ledger.path.read_bytes() if ledger.path.exists() else b""
    content = manifest_content(files, {"num_bytes": len(before), "sha256": sha256_bytes(before)})
    write_atomically(path, content, overwrite=True)
    digest = sha256_bytes(content)
    ledger.append(
        RunDigest(
            at=datetime.now(UTC), run=run_folder.resolve().name, manifest_digest=digest, evidence_root=_root_of(files)
        )
    )
    return digest


def evidence_root(run_folder: Path) -> str:
    """Return the one digest over all records, notebooks and figures of a run.

    Raises:
        EvidenceError: There are none, or one is a link.
    """
    return _root_of(digest_files(run_folder))


def manifest_content(files: Mapping[str, str], ledger: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest.

    Args:
        files: As `digest_files` finds them.
        ledger: `num_bytes` and `sha256` of the ledger at the time of sealing; the seal itself is appended after it.
    """
    sealed = {"num_bytes": int(ledger["num_bytes"]), "sha256": str(ledger["sha256"])}
    manifest = {"schema_version": 1, "evidence_root": _root_of(files), "ledger": sealed, "files": dict(files)}
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def digest_files(run_folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a run by its path in the folder, without the manifest, the ledger and its lock.

    Raises:
        EvidenceError: Something in the folder is a link or no regular file; its content is not the run's.
    """
    own = {MANIFEST_NAME, LEDGER_NAME, lock_name(LEDGER_NAME)}
    digests = {}
    for path in sorted(run_folder.rglob("*")):
        name = path.relative_to(run_folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise EvidenceError(f"{name}: expected a regular file, got a link or a device; put the file itself there")
        if path.is_file() and name not in own:
            digests[name] = sha256_file(path)
    return digests


def _root_of(files: Mapping[str, str]) -> str:
    evidence = {name: digest for name, digest in files.items() if name.partition("/")[0] in EVIDENCE_FOLDERS}
    if not evidence:
        raise EvidenceError(f"expected files in {', '.join(EVIDENCE_FOLDERS)}, found none; run a stage first")
    return combined_digest(evidence)


def _is_sealed(run_folder: Path, content: bytes, ledger: Ledger) -> bool:
    """Tell whether the manifest is the one that the ledger's last entry seals, and the folder is still as it says."""
    last = ledger.entries()[-1:]
    if not last or not isinstance(last[0], RunDigest) or last[0].manifest_digest != sha256_bytes(content):
        return False
    return manifest_content(digest_files(run_folder), json.loads(content)["ledger"]) == content
