"""Frozen inputs: batches exactly as the legacy loader delivered them, verified at every load.

A folder `frozen_inputs/<workload>/` holds `manifest.json` (what was frozen, with a digest per tensor), `batches.safetensors` (unless only
digests are kept), `limits.json` (what the gates demand, with reasons) and `baselines/<hardware identity>.json` (the legacy outputs).
This module needs no torch: a reviewer's laptop can verify a freeze.
"""

import json
from pathlib import Path
from typing import Any, Literal

import safetensors
from pydantic import AwareDatetime, TypeAdapter, ValidationError

from dualtrack.facts.digests import sha256_bytes, sha256_file, sha256_json, tensor_digest
from dualtrack.facts.errors import FrozenInputError
from dualtrack.facts.observations import Fact, Limit

BATCHES_FILE = "batches.safetensors"
MANIFEST_FILE = "manifest.json"
LIMITS_FILE = "limits.json"
LFS_HEADER = b"version https://git-lfs"

# safetensors' short names -> torch's names, which the digests use
DTYPE_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64",
    "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip


class FrozenBatch(Fact):
    """One frozen batch: its structure, and a digest for each tensor in it."""

    structure: Any
    """Nested containers with tensors by name; `training.frozen_batches` encodes and decodes it."""
    tensors: dict[str, str]
    """Tensor name -> digest over dtype, shape and bytes."""
    sample_ids: tuple[int, ...] | None
    """Dataset indices in order; None for a dataset without indices."""
    num_bytes: int


class FrozenManifest(Fact):
    """What was frozen, how it came about, and the digests that guard it."""

    schema_version: Literal[1] = 1
    workload: str
    mode: Literal["stored", "recipe"]
    """`stored` keeps the bytes; `recipe` keeps digests only and runs the legacy loader again, for large or private data."""
    seed: int
    batches: tuple[FrozenBatch, ...]
    loader: dict[str, Any]
    """Class, batch size, workers, sampler and collate function of the legacy loader."""
    random_states: dict[str, str]
    """Digests of the three global generators' states just before the loader was iterated."""
    created_at: AwareDatetime
    reason: str
    conditions: dict[str, Any]
    batches_sha256: str | None

    @property
    def digest(self) -> str:
        """The frozen-input digest: content, order, seed and loader, whatever machine froze it."""
        return sha256_json(
            [self.workload, self.seed, [batch.model_dump(mode="json") for batch in self.batches], self.loader]
        )

    @property
    def largest_batch_bytes(self) -> int:
        """Tensor bytes of the largest frozen batch; the slot size of stage 1 comes from it."""
        return max(batch.num_bytes for batch in self.batches)


class Baseline(Fact):
    """What the legacy pipeline computed on the frozen inputs, on one kind of hardware, with deterministic algorithms."""

    schema_version: Literal[1] = 1
    hardware_identity: str
    frozen_inputs_digest: str
    device: str
    seed: int
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    """L2 norm over all gradients, one a step."""
    initial_parameters_digest: str
    final_parameters_digest: str
    created_at: AwareDatetime
    conditions: dict[str, Any]


def load_manifest(folder: Path) -> FrozenManifest:
    """Read the manifest and verify the stored bytes against it.

    Raises:
        FrozenInputError: Something is missing, is a git-LFS pointer, or differs from its digest; the message names it.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = FrozenManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise FrozenInputError(
            f"expected frozen inputs in {folder.name}/, found no {MANIFEST_FILE}; run `dualtrack freeze`"
        ) from error
    except ValidationError as error:
        raise FrozenInputError(f"{folder.name}/{MANIFEST_FILE} is not a manifest of schema 1: {error}") from error
    if manifest.mode == "stored":
        verify_batches(folder / BATCHES_FILE, manifest)
    return manifest


def verify_batches(path: Path, manifest: FrozenManifest) -> None:
    """Compare the stored tensors with the manifest, tensor by tensor.

    Raises:
        FrozenInputError: A tensor is missing, extra or changed; the message names the batch and the tensor.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise FrozenInputError(
            f"expected {path.parent.name}/{path.name}, found none; restore it from version control"
        ) from error
    if content.startswith(LFS_HEADER):
        raise FrozenInputError(
            f"{path.parent.name}/{path.name} is a git-LFS pointer, not the tensors; run `git lfs pull`"
        )
    expected = {name: digest for batch in manifest.batches for name, digest in batch.tensors.items()}
    if sha256_bytes(content) == manifest.batches_sha256 and len(expected) > 0:
        return  # every byte is as it was when the tensors were digested one by one
    found = {}
    try:
        for name, entry in safetensors.deserialize(content):
            dtype = DTYPE_NAMES.get(entry["dtype"], entry["dtype"])
            found[name] = tensor_digest(dtype, entry["shape"], entry["data"])
    except Exception as error:
        raise FrozenInputError(f"{path.parent.name}/{path.name} is damaged and can't be parsed: {error}") from error
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise FrozenInputError(
                f"{path.parent.name}/{path.name}: tensor {name!r} has digest {found.get(name)}, expected {expected.get(name)}; "
                "restore the file, or freeze again with a reason"
            )
    raise FrozenInputError(
        f"{path.parent.name}/{path.name} differs from its SHA-256 outside the tensors; restore the file"
    )


def load_limits(folder: Path) -> dict[str, tuple[Limit, ...]]:
    """Read what the gates demand, by stage.

    Raises:
        FrozenInputError: The file is missing or no list of limits.
    """
    path = folder / LIMITS_FILE
    try:
        return TypeAdapter(dict[str, tuple[Limit, ...]]).validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise FrozenInputError(f"expected {folder.name}/{LIMITS_FILE}, found none; run `dualtrack freeze`") from error
    except ValidationError as error:
        raise FrozenInputError(f"{folder.name}/{LIMITS_FILE} is not a set of limits: {error}") from error


def limits_json(limits: dict[str, tuple[Limit, ...]]) -> bytes:
    """Encode limits for `limits.json`, indented so that a change of a margin can be reviewed."""
    plain = {
        stage: [limit.model_dump(mode="json", exclude_defaults=True) for limit in rules]
        for stage, rules in limits.items()
    }
    return (json.dumps(plain, indent=1) + "\n").encode()


def load_baseline(folder: Path, hardware_identity: str) -> Baseline | None:
    """Read the baseline of one kind of hardware from `folder`, or return None where it was never recorded.

    Raises:
        FrozenInputError: The file is no baseline, or belongs to other hardware.
    """
    path = folder / f"{hardware_identity}.json"
    if not path.is_file():
        return None
    try:
        baseline = Baseline.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise FrozenInputError(f"baseline {path.name} is not a baseline of schema 1: {error}") from error
    if baseline.hardware_identity != hardware_identity:
        raise FrozenInputError(
            f"baseline {path.name} was recorded on {baseline.hardware_identity}, this is {hardware_identity}; record one for this hardware"
        )
    return baseline


def digest_of_folder(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a freeze, by path relative to the folder."""
    return {
        path.relative_to(folder).as_posix(): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
