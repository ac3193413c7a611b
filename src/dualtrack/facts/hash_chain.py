"""Lines of JSON that each carry their own digest and that of the line before.

A change, a removal, an insertion or a swap anywhere is found when the chain is read. An unfinished last line, as a killed writer leaves it,
is told apart from a whole line that lost its newline.
"""

import json
from typing import Any, NamedTuple

from dualtrack.facts.digests import canonical_json, sha256_bytes, sha256_json
from dualtrack.facts.errors import LedgerError

NO_ENTRY = "0" * 64


class Chain(NamedTuple):
    """What a file of chained lines holds, and where whole lines end."""

    contents: tuple[Any, ...]
    root: str
    """Digest of the last line, which covers every line before it; 64 zeros for none."""
    num_whole_bytes: int
    lacks_newline: bool = False
    """The last line is whole, only its newline is missing."""


def make_line(content: Any, index: int, previous: str) -> tuple[bytes, str]:
    """Return the line for plain data, with its newline, and the new root."""
    linked = {"index": index, "previous": previous, "entry": content}
    digest = sha256_json(linked)
    return canonical_json({**linked, "digest": digest}) + b"\n", digest


def read_chain(content: bytes, name: str, *, strict: bool = False) -> Chain:
    """Parse chained lines and check every link.

    Args:
        content: The whole file.
        name: How to call it in an error.
        strict: Refuse an unfinished last line too, as `verify` does for a run that came to its end.

    Raises:
        LedgerError: A line was changed, is missing or is no link; the message names it.
    """
    contents: list[Any] = []
    root = NO_ENTRY
    *lines, tail = content.split(b"\n")
    for line in lines:
        found, root = _parse_line(line, len(contents), root, name)
        contents.append(found)
    if tail and strict:
        raise LedgerError(f"{name}: line {len(contents) + 1} has no end; the file was cut short")
    if tail and not _is_unfinished(tail):
        found, root = _parse_line(tail, len(contents), root, name)
        return Chain((*contents, found), root, len(content), lacks_newline=True)
    return Chain(tuple(contents), root, len(content) - len(tail))


def _is_unfinished(line: bytes) -> bool:
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="replace"))
    except json.JSONDecodeError:
        return True
    return False


def _parse_line(line: bytes, index: int, previous: str, name: str) -> tuple[Any, str]:
    where = f"{name}: line {index + 1}"
    try:
        found: dict[str, Any] = json.loads(line)
        digest: str = found.pop("digest")
        is_canonical = canonical_json({**found, "digest": digest}) == line
    except (ValueError, KeyError, AttributeError) as error:
        raise LedgerError(
            f"{where} is no ledger line ({error}); restore the file from version control or a run's copy"
        ) from error
    if not is_canonical or digest != sha256_bytes(canonical_json(found)):
        raise LedgerError(f"{where} was changed: its digest does not follow from it; restore the file")
    if found.get("previous") != previous or found.get("index") != index or "entry" not in found:
        raise LedgerError(
            f"{where} does not follow line {index}: a line was taken out, put in or moved; restore the file"
        )
    return found["entry"], digest
