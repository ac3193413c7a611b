"""Checkpoints: whole or absent, whatever kills the writer."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dualtrack.facts.errors import EvidenceError
from dualtrack.training.checkpoint import (
    MARKER,
    STATE_FILE,
    Position,
    generator_state,
    latest_commit,
    load_checkpoint,
    load_generators,
    read_commit,
    save_checkpoint,
    step_folder,
)

CPU = torch.device("cpu")


def job(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def commit(root: Path, step: int, seed: int = 0) -> Path:
    model, optimizer = job(seed)
    position = Position(global_step=step, world_size=1, plan_digest="p", seed=0, parameters_digest="d")
    return save_checkpoint(root, position, model, optimizer, [generator_state(CPU)])


def test_a_step_comes_back_bit_for_bit_with_its_position(tmp_path: Path) -> None:
    model, optimizer = job(3)
    folder = commit(tmp_path, 5, seed=3)
    fresh, fresh_optimizer = job(4)
    assert load_checkpoint(folder, fresh, fresh_optimizer).position.global_step == 5
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    moments = (
        [state["exp_avg"] for state in optimizer.state.values()],
        [state["exp_avg"] for state in fresh_optimizer.state.values()],
    )
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True))


def test_loading_keeps_the_storage_that_a_wrapper_holds(tmp_path: Path) -> None:
    folder = commit(tmp_path, 1)
    model, optimizer = job(9)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    load_checkpoint(folder, model, optimizer)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_a_saved_step_is_not_rewritten_by_further_training(tmp_path: Path) -> None:
    model, optimizer = job()
    position = Position(global_step=1, world_size=1, plan_digest="p", seed=0, parameters_digest="d")
    folder = save_checkpoint(tmp_path, position, model, optimizer, [])
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    load_checkpoint(folder, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept, strict=True))


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    folder = commit(tmp_path, 1)
    expected = torch.rand(3).tolist(), float(np.random.rand()), random.random()
    torch.rand(5)
    np.random.rand(5)
    random.random()
    assert load_generators(folder, 0, CPU)
    assert (torch.rand(3).tolist(), float(np.random.rand()), random.random()) == expected
    assert not load_generators(folder, 1, CPU)


def test_the_pointer_names_the_newest_commit(tmp_path: Path) -> None:
    assert latest_commit(tmp_path) is None
    commit(tmp_path, 2)
    commit(tmp_path, 4)
    assert latest_commit(tmp_path) == step_folder(tmp_path, 4)


def test_a_commit_is_never_replaced(tmp_path: Path) -> None:
    commit(tmp_path, 2)
    with pytest.raises(FileExistsError, match="step 2"):
        commit(tmp_path, 2)


def test_a_changed_byte_is_refused_and_the_file_is_named(tmp_path: Path) -> None:
    folder = commit(tmp_path, 2)
    content = bytearray((folder / STATE_FILE).read_bytes())
    content[-1] ^= 1
    (folder / STATE_FILE).write_bytes(content)
    with pytest.raises(EvidenceError, match=STATE_FILE):
        load_checkpoint(folder, *job())


def test_a_pointer_to_a_lost_commit_is_refused(tmp_path: Path) -> None:
    (commit(tmp_path, 2) / MARKER).unlink()
    with pytest.raises(EvidenceError, match="marker is missing"):
        latest_commit(tmp_path)


@pytest.mark.parametrize("killed_in", ["_write_tensors", "write_atomically"])
def test_a_writer_killed_before_its_commit_leaves_the_previous_one(tmp_path: Path, killed_in: str) -> None:
    commit(tmp_path, 2)
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_checkpoint as mine
from dualtrack.training import checkpoint
from pathlib import Path
real = getattr(checkpoint, {killed_in!r})
def killed(path, *rest, **more):
    if path.name in ("generators.pt", "COMMIT.json"):
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, *rest, **more)
setattr(checkpoint, {killed_in!r}, killed)
mine.commit(Path({str(tmp_path)!r}), 4)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == -9
    assert latest_commit(tmp_path) == step_folder(tmp_path, 2)
    read_commit(step_folder(tmp_path, 2))
    with pytest.raises(EvidenceError, match="was never committed"):
        read_commit(step_folder(tmp_path, 4))
    assert commit(tmp_path, 4) == latest_commit(tmp_path)
