"""Whether the files of a run are the ones that were sealed: manifest, ledger and page against the folder as it is now."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualtrack.facts.digests import sha256_bytes
from dualtrack.facts.hash_chain import read_chain
from dualtrack.facts.ledger import RunDigest, lock_name, parse_entries
from dualtrack.reporting.manifest import LEDGER_NAME, MANIFEST_NAME, digest_files, manifest_content

_DIGEST = re.compile(rb"\b[0-9a-f]{64}\b")


def check_files(run_folder: Path) -> Iterator[str]:
    """Yield each file that is missing, changed or not listed, then anything else that is wrong with the manifest."""
    path = run_folder / MANIFEST_NAME
    if not path.is_file():
        yield f"{MANIFEST_NAME}: missing; the run was not sealed, or the file was taken out"
        return
    content = path.read_bytes()
    manifest: dict[str, Any] = json.loads(content)
    listed: dict[str, str] = manifest["files"]
    found = digest_files(run_folder)
    for name in sorted(listed.keys() | found.keys()):
        if name not in found:
            yield f"{name}: missing, though the manifest lists it"
        elif name not in listed:
            yield f"{name}: not listed in the manifest; it was put in afterwards"
        elif listed[name] != found[name]:
            yield f"{name}: changed, SHA-256 is {found[name][:16]}, the manifest says {str(listed[name])[:16]}"
    if listed == found and manifest_content(found, manifest["ledger"]) != content:
        yield f"{MANIFEST_NAME}: changed; computed from the folder it has other bytes"


def check_ledger(run_folder: Path) -> Iterator[str]:
    """Yield what is wrong with the run's ledger: a broken link, another state than was sealed, or no seal."""
    path = run_folder / LEDGER_NAME
    if not path.is_file():
        yield f"{LEDGER_NAME}: missing; the seal of the run stands in it"
        return
    content = path.read_bytes()
    chain = read_chain(content, LEDGER_NAME, strict=True)
    entries = parse_entries(chain, LEDGER_NAME)
    lock = run_folder / lock_name(LEDGER_NAME)
    if lock.exists() and lock.read_bytes():
        yield f"{lock.name}: expected an empty lock file, it has content"
    if not (run_folder / MANIFEST_NAME).is_file():
        return
    manifest_bytes = (run_folder / MANIFEST_NAME).read_bytes()
    seals = [entry for entry in entries if isinstance(entry, RunDigest)]
    if not seals or seals[-1].manifest_digest != sha256_bytes(manifest_bytes):
        yield f"{MANIFEST_NAME}: its digest {sha256_bytes(manifest_bytes)[:16]} is not the one that {LEDGER_NAME} seals"
        return
    manifest = json.loads(manifest_bytes)
    if seals[-1].evidence_root != manifest["evidence_root"]:
        yield f"{LEDGER_NAME}: seals another evidence root than the manifest has"
    if sha256_bytes(content[: manifest["ledger"]["num_bytes"]]) != manifest["ledger"]["sha256"]:
        yield f"{LEDGER_NAME}: what stood in it before the seal was changed"


def check_page(run_folder: Path) -> Iterator[str]:
    """Yield a difference where the page prints full digests and the evidence root is not among them."""
    path = run_folder / "index.html"
    if not path.is_file():
        yield "index.html: missing; build it with `dualtrack report`"
        return
    printed = set(_DIGEST.findall(path.read_bytes()))
    root = str(json.loads((run_folder / MANIFEST_NAME).read_bytes())["evidence_root"]).encode()
    if printed and root not in printed:
        yield "index.html: prints another evidence root than the manifest has; build it again with `dualtrack report`"
