"""The first divergence as a small folder: both sides' bytes and where they differ, comparable again on a machine without the dataset.

`bundle.json` lists both batches entry by entry; `tensors.safetensors` holds the bytes. Whatever is written is read back and compared before
the folder gets its name.
"""

import importlib.metadata
import platform
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from dualtrack.facts.digests import canonical_json, sha256_file
from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.observations import Divergence, Fact
from dualtrack.loading.batch_compare import (
    BatchComparison,
    Entry,
    LeafDifference,
    as_bytes,
    compare_entries,
    list_entries,
)

SCHEMA_VERSION = 1
RECORD_NAME = "bundle.json"
TENSORS_NAME = "tensors.safetensors"
MAX_BUNDLE_BYTES = 64 * 2**20
PACKAGES = ("dualtrack", "torch", "numpy", "safetensors")


class BundleContext(Fact):
    """Where a divergence was seen."""

    epoch: int
    step: int
    """Position of the batch in its epoch, from 0."""
    shadow: str
    """`loader shadow` or `transfer shadow`, or what else compared the two."""
    device: str
    sample_reference: dict[str, Any] = {}
    """How to find the batch again where the data is, for example workload and frozen batch."""


class BundleRecord(Fact):
    """`bundle.json`."""

    schema_version: int = SCHEMA_VERSION
    context: BundleContext
    difference: LeafDifference
    is_whole_batch: bool
    """False when the batch was too large and only the differing leaf (or its differing row) is kept."""
    versions: dict[str, str]
    tensors_digest: str
    legacy: tuple[dict[str, Any], ...]
    candidate: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Bundle:
    """A bundle in memory: the record and both sides as entries with their content."""

    record: BundleRecord
    legacy: tuple[Entry, ...]
    candidate: tuple[Entry, ...]


class Recomparison(Fact):
    """The recorded bytes, compared again."""

    same_verdict: bool
    """True when the comparison finds what was recorded: the same kind of difference, with the same two values, at the same leaf."""
    recorded: LeafDifference
    found: LeafDifference | None
    context: BundleContext
    versions_recorded: dict[str, str]
    versions_now: dict[str, str]


def current_versions() -> dict[str, str]:
    """Return the versions that a comparison of bytes may depend on."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def write_bundle(
    folder: Path,
    context: BundleContext,
    difference: LeafDifference,
    legacy: Any,
    candidate: Any,
    max_bytes: int = MAX_BUNDLE_BYTES,
) -> BundleRecord:
    """Write a bundle; the folder appears whole or not at all.

    Args:
        folder: Must not exist.
        context: Where the difference was seen.
        difference: The first difference of `compare_batches(legacy, candidate)`.
        legacy: The batch of the legacy side, on any device.
        candidate: The other side's.
        max_bytes: A larger pair of batches is cut down to the differing leaf, and a larger leaf to its differing row.

    Raises:
        FileExistsError: The folder exists; evidence is never replaced.
        EvidenceError: What was written does not read back as it was.
    """
    if folder.exists():
        raise FileExistsError(
            f"expected a new folder for the bundle, {folder.name} exists; keep it and choose another name"
        )
    sides = [list(list_entries(legacy)), list(list_entries(candidate))]
    is_whole = sum(map(_entry_bytes, sides[0] + sides[1])) <= max_bytes
    if not is_whole:
        sides = [_cut_down(side, difference, max_bytes) for side in sides]
    tensors: dict[str, torch.Tensor] = {}
    listed = [
        tuple(_to_plain(entry, f"{name}.{number}", tensors) for number, entry in enumerate(side))
        for name, side in zip(("legacy", "candidate"), sides, strict=True)
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        safetensors.torch.save_file(tensors, partial / TENSORS_NAME)
        record = BundleRecord(
            context=context, difference=difference, is_whole_batch=is_whole, versions=current_versions(),
            tensors_digest=sha256_file(partial / TENSORS_NAME), legacy=listed[0], candidate=listed[1],
        )  # fmt: skip
        write_atomically(partial / RECORD_NAME, canonical_json(record.model_dump(mode="json")))
        _check_round_trip(load_bundle(partial), sides)
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return record


def load_bundle(folder: Path) -> Bundle:
    """Read a bundle and check its digest.

    Raises:
        EvidenceError: A file is missing, is no bundle of this schema, or its bytes are not the recorded ones.
    """
    try:
        record = BundleRecord.model_validate_json((folder / RECORD_NAME).read_bytes())
        digest = sha256_file(folder / TENSORS_NAME)
    except (OSError, ValueError) as error:
        raise EvidenceError(
            f"{folder.name}: expected a divergence bundle ({RECORD_NAME} and {TENSORS_NAME}), got: {error}"
        ) from error
    if record.schema_version != SCHEMA_VERSION:
        raise EvidenceError(f"{folder.name}: expected a bundle of schema {SCHEMA_VERSION}, got {record.schema_version}")
    if digest != record.tensors_digest:
        raise EvidenceError(
            f"{folder.name}: {TENSORS_NAME} was changed after it was written (SHA-256 {digest[:12]}... instead of {record.tensors_digest[:12]}...)"
        )
    tensors = safetensors.torch.load_file(folder / TENSORS_NAME)
    sides = (tuple(_from_plain(plain, tensors) for plain in side) for side in (record.legacy, record.candidate))
    return Bundle(record, *sides)


def compare_bundle(bundle: Bundle) -> BatchComparison:
    """Compare the recorded sides again, with the code that compares live batches."""
    return compare_entries(bundle.legacy, bundle.candidate)


def recompare(folder: Path) -> Recomparison:
    """Load a bundle, compare its bytes again and say whether the recorded verdict follows from them. Needs no dataset and no GPU.

    Raises:
        EvidenceError: The folder is no intact bundle.
    """
    bundle = load_bundle(folder)
    record, found = bundle.record, compare_bundle(bundle).first
    keys = ("kind", "leaf", "legacy", "candidate")
    same = found is not None and all(getattr(found, key) == getattr(record.difference, key) for key in keys)
    return Recomparison(
        same_verdict=same, recorded=record.difference, found=found, context=record.context,
        versions_recorded=record.versions, versions_now=current_versions(),
    )  # fmt: skip


def describe_divergence(context: BundleContext, difference: LeafDifference, bundle: str | None) -> Divergence:
    """Return the divergence as records show it."""
    where = f"epoch {context.epoch}, step {context.step}, {difference.where}"
    return Divergence(where=where, legacy=difference.legacy, candidate=difference.candidate, bundle=bundle)


def _entry_bytes(entry: Entry) -> int:
    return entry.content.numel() * entry.content.element_size() if entry.kind == "tensor" else 0


def _cut_down(side: Sequence[Entry], difference: LeafDifference, max_bytes: int) -> list[Entry]:
    """Keep the differing leaf, and of a leaf that is too large the row that holds the first difference; of another form keep the forms."""
    if difference.kind not in ("bits", "value"):
        return [entry._replace(content=_form_of(entry.content)) if entry.kind == "tensor" else entry for entry in side]
    kept = [entry for entry in side if entry.path == difference.leaf]
    if difference.index and sum(map(_entry_bytes, kept)) > max_bytes // 2:
        row = difference.index[0]
        kept = [entry._replace(content=entry.content[row : row + 1]) for entry in kept]
    return kept


def _form_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _to_plain(entry: Entry, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    plain: dict[str, Any] = {"path": entry.path, "kind": entry.kind, "what": entry.what}
    if entry.kind == "value":
        return plain | {"value": _value_to_plain(entry.content)}
    if entry.kind == "container":
        return plain
    tensor: torch.Tensor = entry.content
    # safetensors can save dtypes that it can't load again, so the bytes are stored as bytes and the dtype beside them
    if not tensor.is_meta:
        tensors[name] = as_bytes(tensor).cpu().clone()
    return plain | {
        "tensor": None if tensor.is_meta else name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "device": entry.device,
    }


def _from_plain(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Entry:
    entry = Entry(plain["path"], plain["kind"], plain["what"])
    if entry.kind == "value":
        return entry._replace(content=_value_from_plain(plain["value"]))
    if entry.kind == "container":
        return entry
    dtype = getattr(torch, plain["dtype"])
    if plain["tensor"] is None:
        form = torch.empty_strided(plain["shape"], plain["strides"], dtype=dtype, device="meta")
        return entry._replace(content=form, device=plain["device"])
    dense = tensors[plain["tensor"]].view(dtype).reshape(plain["shape"])
    strided = torch.empty_strided(plain["shape"], plain["strides"], dtype=dtype)
    if all(stride for size, stride in zip(plain["shape"], plain["strides"], strict=True) if size > 1):
        dense = strided.copy_(dense)  # of an expanded tensor, which nobody can write to, only the bytes are kept
    return entry._replace(content=dense, device=plain["device"])


@dataclass(frozen=True)
class OpaqueValue:
    """Stands for an object that a bundle can't hold: its class and how it printed."""

    text: str


def _value_to_plain(value: Any) -> dict[str, Any]:
    if value is None or type(value) in (bool, int, str):
        return {"plain": value}
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) in (bytes, bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, np.ndarray | np.generic) and not np.asarray(value).dtype.hasobject:
        array = np.asarray(value)
        return {"array": array.tobytes().hex(), "dtype": array.dtype.str, "shape": list(array.shape)}
    return {"opaque": f"{type(value).__qualname__}: {value!r}"}


def _value_from_plain(plain: dict[str, Any]) -> Any:
    if "plain" in plain:
        return plain["plain"]
    if "float" in plain:
        return float.fromhex(plain["float"])
    if "bytes" in plain:
        return bytes.fromhex(plain["bytes"])
    if "array" in plain:
        return np.frombuffer(bytes.fromhex(plain["array"]), dtype=np.dtype(plain["dtype"])).reshape(plain["shape"])
    return OpaqueValue(plain["opaque"])


def _check_round_trip(bundle: Bundle, sides: Sequence[Sequence[Entry]]) -> None:
    """Compare what was read back with what was to be written, byte by byte."""
    for written, read in zip(sides, (bundle.legacy, bundle.candidate), strict=True):
        for before, after in zip(written, read, strict=True):
            is_same = (
                before.kind != "tensor"
                or before.content.is_meta
                or (
                    before.content.dtype == after.content.dtype
                    and before.content.shape == after.content.shape
                    and torch.equal(as_bytes(before.content).cpu(), as_bytes(after.content))
                )
            )
            if not is_same:
                raise EvidenceError(
                    f"bundle: leaf {before.path} does not read back as it was written; the disk or the storage format lost bytes"
                )
