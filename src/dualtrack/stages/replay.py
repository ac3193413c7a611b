"""Replay a divergence: compare its recorded bytes again, then send the recorded legacy batch through the new path again and again.

All of it happens in an isolated fresh process: `python -I`, an environment of its own and a temporary folder, so that nothing but the
installed packages and a copy of the bundle takes part. A race need not recur: how often it did is reported, and is no verdict.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dualtrack.facts.errors import EvidenceError, MigrationError, TrialError
from dualtrack.facts.observations import Fact
from dualtrack.loading.batch_compare import compare_batches
from dualtrack.loading.divergence_bundle import Bundle, Recomparison, load_bundle, recompare
from dualtrack.loading.pooled_loader import PooledLoader
from dualtrack.loading.stream_prefetcher import CUDADataPrefetcher
from dualtrack.stages.pool_sizes import LEAF_ALIGNMENT_BYTES, PAGE_BYTES

RESULT_NAME = "result.json"
START_SECONDS = 120.0  # importing torch on a busy machine
REPEAT_SECONDS = 5.0
NUM_WORKERS = 2
NUM_SLOTS = 12  # two workers with two batches each ahead, the consumer's, and those in flight
KEPT_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PATH")


class ReplayResult(Fact):
    """What a replay found."""

    bundle: str
    recomparison: Recomparison
    device: str
    """Where the sample was run again."""
    num_repeats: int
    num_reproduced: int
    """Repeats that differed at the recorded leaf."""
    num_other_differences: int
    """Repeats that differed elsewhere."""
    note: str = ""
    """What kept the sample from being run as it was recorded."""

    @property
    def bytes_agree(self) -> bool:
        """True when the recorded bytes, compared again, give the recorded difference."""
        return self.recomparison.same_verdict

    def __str__(self) -> str:
        """Return the result for a terminal."""
        seen, found = self.recomparison.recorded, self.recomparison.found
        context = self.recomparison.context
        was, now = self.recomparison.versions_recorded, self.recomparison.versions_now
        names = sorted(was.keys() | now.keys())
        versions = ", ".join(
            f"{name} {now.get(name)}" + ("" if was.get(name) == now.get(name) else f" (recorded with {was.get(name)})")
            for name in names
        )
        again = (
            "the same difference"
            if self.bytes_agree
            else "NOT the recorded difference" + (f": {found.where}" if found else ": they are equal")
        )
        lines = [
            f"bundle          {self.bundle}: {context.shadow}, epoch {context.epoch}, step {context.step}, on {context.device}",
            f"recorded        {seen.where}: legacy {seen.legacy}, candidate {seen.candidate}",
            f"compared again  {again}",
            f"run again       {self.num_reproduced} of {self.num_repeats} reproduced, {self.num_other_differences} other differences, on {self.device}",
            f"versions        {versions}",
        ]
        return "\n".join([*lines, f"note            {self.note}"] if self.note else lines)


def replay(bundle: Path, num_repeats: int = 5) -> ReplayResult:
    """Replay a bundle in an isolated process.

    Args:
        bundle: Folder of a divergence bundle; it is copied, never changed.
        num_repeats: How often the recorded legacy batch goes through the new path.

    Raises:
        ValueError: `num_repeats` is below 1.
        EvidenceError: The folder is no intact bundle.
        TrialError: The isolated process failed or passed its deadline; the message carries its last lines.
    """
    if num_repeats < 1:
        raise ValueError(f"expected num_repeats of at least 1, got {num_repeats}")
    load_bundle(bundle)
    with tempfile.TemporaryDirectory(prefix="dualtrack-replay-") as scratch:
        folder = Path(scratch)
        shutil.copytree(bundle, folder / "bundle")
        _run_isolated(folder, num_repeats, START_SECONDS + REPEAT_SECONDS * num_repeats)
        try:
            result = ReplayResult.model_validate_json((folder / RESULT_NAME).read_bytes())
        except (OSError, ValueError) as error:
            raise TrialError(f"the replay of {bundle.name} left no result; its process ended early: {error}") from error
    return result.model_copy(update={"bundle": bundle.name})


def _run_isolated(folder: Path, num_repeats: int, deadline_seconds: float) -> None:
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    environment |= {"HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"}
    command = [sys.executable, "-I", "-m", "dualtrack.stages.replay", str(folder), str(num_repeats)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(timeout=deadline_seconds)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its loader workers too
            process.wait(timeout=10)
    if exit_code != 0:
        how = (
            f"passed its deadline of {deadline_seconds:.0f} s"
            if exit_code is None
            else f"ended with exit code {exit_code}"
        )
        said = (folder / "output").read_text(errors="replace")[-2000:]
        raise TrialError(
            f"the replay's isolated process {how}; is dualtrack installed for {Path(sys.executable).name}, not only on a path?\n{said}"
        )


def replay_here(folder: Path, num_repeats: int) -> ReplayResult:
    """Compare and run the bundle under `folder` in this process; `replay` calls it in the isolated one."""
    bundle = load_bundle(folder / "bundle")
    again = recompare(folder / "bundle")
    wanted = torch.device(bundle.record.context.device.split(":")[0]).type
    device = torch.device("cuda" if wanted == "cuda" and torch.cuda.is_available() else "cpu")
    notes = [] if device.type == wanted else [f"recorded on {wanted}, and there is no {wanted} device here"]
    if not bundle.record.is_whole_batch:
        notes.append("the bundle keeps only part of the batch")
    try:
        leaves = run_sample_again(bundle, device, num_repeats)
    except MigrationError as error:
        leaves, notes = [], [*notes, f"the sample could not be run again: {type(error).__name__}: {error}"]
    recorded = bundle.record.difference.leaf
    return ReplayResult(
        bundle="bundle", recomparison=again, device=str(device), num_repeats=len(leaves), note="; ".join(notes),
        num_reproduced=sum(leaf == recorded for leaf in leaves), num_other_differences=sum(leaf not in (None, recorded) for leaf in leaves),
    )  # fmt: skip


def run_sample_again(bundle: Bundle, device: torch.device, num_repeats: int) -> list[str | None]:
    """Send the recorded legacy batch through pool and prefetcher, and compare each delivery with the legacy copy of it.

    Returns:
        For each repeat the path of the leaf that differs, or None where all bytes agree.

    Raises:
        EvidenceError: The bundle holds no tensor.
        CapacityError: The machine has no room for the pool.
    """
    sample = _sample_of(bundle)
    names = sorted(sample)
    size = sum(tensor.numel() * tensor.element_size() + LEAF_ALIGNMENT_BYTES for tensor in sample.values())
    slot_bytes = -(-size // PAGE_BYTES) * PAGE_BYTES
    batches: Any = [[sample[name] for name in names]] * num_repeats
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None, num_workers=NUM_WORKERS)
    found: list[str | None] = []
    with PooledLoader(
        loader, device=device, cap_bytes=NUM_SLOTS * slot_bytes, slot_bytes=slot_bytes, name="replay"
    ) as pooled:
        with CUDADataPrefetcher(pooled, device, deadline_seconds=START_SECONDS) as prefetcher:
            for delivered in prefetcher:
                first = compare_batches([sample[name].to(device) for name in names], delivered).first
                place = re.match(r"\[(\d+)\]", first.leaf) if first is not None else None
                found.append(None if first is None else names[int(place[1])] if place is not None else first.leaf)
    return found


def _sample_of(bundle: Bundle) -> dict[str, torch.Tensor]:
    """Return the legacy side's tensors by path; of one whose bytes were not kept, zeros of its form."""
    entries = [entry for entry in bundle.legacy if entry.kind == "tensor"]
    if not entries:
        raise EvidenceError("expected a tensor in the bundle, found none; there is nothing to run again")
    return {
        entry.path: torch.zeros_like(entry.content, device="cpu") if entry.content.is_meta else entry.content.clone()
        for entry in entries
    }


def main() -> None:
    """Run in the isolated process: folder and number of repeats are the arguments."""
    folder, num_repeats = Path(sys.argv[1]), int(sys.argv[2])
    (folder / RESULT_NAME).write_text(replay_here(folder, num_repeats).model_dump_json())


if __name__ == "__main__":
    main()
