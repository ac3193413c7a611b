"""Checkpoints that are whole or absent: one folder a step, a commit marker with digests, then a pointer that is replaced atomically.

A kill at any moment leaves the previous commit, and the pointer never names a step that is not committed. Position in the data plan and the
state of every rank's generators are part of it. A restart is a new launch from the last commit.
"""

import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualtrack.facts.digests import canonical_json, sha256_bytes, sha256_file
from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.observations import Fact

MARKER = "COMMIT.json"
POINTER = "latest.json"
STATE_FILE = "state.pt"
GENERATORS_FILE = "generators.pt"


class Position(Fact):
    """Where training stands."""

    global_step: int
    """Steps done; the next step has this number."""
    world_size: int
    plan_digest: str
    seed: int
    parameters_digest: str


class Commit(Fact):
    """A committed checkpoint."""

    position: Position
    files: dict[str, str]
    """File name -> SHA-256."""


def save_checkpoint(
    root: Path,
    position: Position,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    generators: list[dict[str, Any]],
) -> Path:
    """Commit one step; the pointer names it afterwards.

    Args:
        root: Folder of all checkpoints of a run.
        position: Where training stands.
        model: The plain model, not its DDP wrapper.
        optimizer: Its optimizer.
        generators: State of the generators by rank, from `generator_state`.

    Returns:
        The step's folder.
    """
    folder = step_folder(root, position.global_step)
    if (folder / MARKER).is_file():
        raise FileExistsError(
            f"expected a free folder for step {position.global_step}, {folder.name} is committed; a commit is never replaced"
        )
    shutil.rmtree(folder, ignore_errors=True)  # what a killed attempt left without its marker
    folder.mkdir(parents=True)
    # serialising copies: state_dict() hands out the live tensors
    _write_tensors(folder / STATE_FILE, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    _write_tensors(folder / GENERATORS_FILE, {"ranks": generators})
    files = {name: sha256_file(folder / name) for name in (STATE_FILE, GENERATORS_FILE)}
    commit = Commit(position=position, files=files).model_dump_json(indent=1).encode()
    write_atomically(folder / MARKER, commit)
    pointer = {"folder": folder.name, "commit_sha256": sha256_bytes(commit)}
    write_atomically(root / POINTER, canonical_json(pointer), overwrite=True)
    return folder


def step_folder(root: Path, global_step: int) -> Path:
    """Return the folder of one step."""
    return root / f"step-{global_step:08d}"


def latest_commit(root: Path) -> Path | None:
    """Return the folder that the pointer names, or None where nothing was committed.

    Raises:
        EvidenceError: The pointer names a folder whose marker is missing or another one.
    """
    try:
        pointer = json.loads((root / POINTER).read_bytes())
    except FileNotFoundError:
        return None
    folder = root / str(pointer["folder"])
    if not (folder / MARKER).is_file() or sha256_file(folder / MARKER) != pointer["commit_sha256"]:
        raise EvidenceError(
            f"the pointer of {root.name}/ names {folder.name}, whose commit marker is missing or changed; restore it or name an earlier step"
        )
    return folder


def read_commit(folder: Path) -> Commit:
    """Return what was committed, after comparing every file with its digest.

    Raises:
        EvidenceError: There is no marker (the writer was killed before the commit), or a file differs; the message names it.
    """
    try:
        commit = Commit.model_validate_json((folder / MARKER).read_bytes())
    except FileNotFoundError as error:
        raise EvidenceError(
            f"{folder.name} has no {MARKER}: it was never committed, its writer ended before; load the step that {POINTER} names"
        ) from error
    for name, digest in commit.files.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != digest:
            raise EvidenceError(
                f"{folder.name}/{name} is missing or differs from its SHA-256 in {MARKER}; load an earlier step"
            )
    return commit


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Commit:
    """Load a committed step into model and optimizer, in place.

    Parameters keep their storage, so a DDP wrapper around the model stays valid; the optimizer gets tensors of its own, since
    `load_state_dict` keeps the very tensors it is given.

    Raises:
        EvidenceError: The step is not committed or a file differs.
    """
    commit = read_commit(folder)
    state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return commit


def generator_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's generators as plain data and tensors."""
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment, unused-ignore]
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy_key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_rest": [int(numpy_state["state"]["pos"]), int(numpy_state["has_gauss"]), float(numpy_state["gauss"])],
        "random": [version, list(words), gauss_next],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_generators(folder: Path, rank: int, device: torch.device) -> bool:
    """Put back the generators of `rank`; False where the commit was made with fewer ranks and has none for it."""
    ranks = torch.load(folder / GENERATORS_FILE, map_location="cpu", weights_only=True)["ranks"]
    if rank >= len(ranks):
        return False
    state = ranks[rank]
    torch.set_rng_state(state["torch"])
    place, has_gauss, gauss = state["numpy_rest"]
    np.random.set_state(("MT19937", state["numpy_key"].numpy().astype(np.uint32), place, has_gauss, gauss))
    version, words, gauss_next = state["random"]
    random.setstate((version, tuple(words), gauss_next))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    return True


def _write_tensors(path: Path, content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with path.open("wb") as stream:
        stream.write(buffer.getbuffer())
        stream.flush()
        os.fsync(stream.fileno())
