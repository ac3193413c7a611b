"""Digests and canonical JSON: the same content always gives the same bytes, and raw bytes are never normalised."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Encode plain data as UTF-8 JSON with sorted keys and no spaces.

    Raises:
        ValueError: `value` holds NaN or an infinity, which JSON cannot carry; records hold them as strings.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_bytes(content: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of `content` as 64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's raw bytes as 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of plain data."""
    return sha256_bytes(canonical_json(value))


def tensor_digest(dtype: str, shape: tuple[int, ...] | list[int], content: bytes | bytearray | memoryview) -> str:
    """Return the digest of one tensor: dtype name, shape, then its little-endian contiguous bytes.

    Args:
        dtype: torch's name without the prefix, for example `float32`.
        shape: The sizes; `()` for a scalar.
        content: The elements in row-major order. NaN payloads and the sign of zero count: the comparison is of bytes.
    """
    header = canonical_json([dtype, [int(size) for size in shape]])
    return sha256_bytes(header + b"\n" + bytes(content))


def combined_digest(digests: Mapping[str, str]) -> str:
    """Return one digest over named digests, whatever order they are given in."""
    return sha256_json(dict(digests))
