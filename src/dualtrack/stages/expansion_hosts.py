"""A rung over several hosts: prepare it in a shared folder, run it by torchrun on every host, judge what the ranks left there.

    python -m dualtrack.stages.expansion_hosts prepare SHARED --world-size 32 --ranks-per-host 8
    srun --nodes 4 --ntasks-per-node 1 python -m torch.distributed.run --nnodes 4 --nproc-per-node 8 --max-restarts 0 \
        --rdzv-backend c10d --rdzv-endpoint $HEAD:29400 --rdzv-id $SLURM_JOB_ID -m dualtrack.training.ddp_worker SHARED/rung-32
    python -m dualtrack.stages.expansion_hosts judge SHARED --world-size 32 --ranks-per-host 8

Without a scheduler, start the second line by hand on each host; where a host's name does not resolve to its address, add
`--local-addr ADDRESS --rdzv-conf is_host=1` on the one that $HEAD names and `is_host=0` on the others. No launching process watches over hosts; each rank's own guard ends it
after 3 x timeout + 10 s without progress, and the kernel ends it with its agent.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.expansion_settings import ExpansionSettings
from dualtrack.facts.observations import Observation
from dualtrack.stages.expansion import failing_checks
from dualtrack.stages.expansion_checks import check_rung
from dualtrack.stages.expansion_rung import Rung
from dualtrack.stages.expansion_runs import ExpansionRuns
from dualtrack.stages.stage_run import StageRun, open_stage
from dualtrack.training.rank_journal import read_result
from dualtrack.training.rank_tasks import VERIFY


def prepare_rung(runs: ExpansionRuns, world_size: int, num_steps: int) -> Path:
    """Compute the legacy gradients and the single process here, write the rung's launch file, and return its folder.

    Args:
        runs: Launches with a folder that all hosts share.
        world_size: Ranks over all hosts.
        num_steps: Steps of the loss curves.
    """
    device = runs.device(world_size)
    runs.single(device)  # commits where the rung's float64 run continues
    spec = runs.verify_spec(world_size, num_steps, None)
    folder = rung_folder(runs.folder, world_size)
    folder.mkdir(parents=True, exist_ok=True)
    runs.launch_spec(VERIFY, {"spec": spec.model_dump(mode="json")}, world_size, device).save(folder)
    return folder


def judge_rung(runs: ExpansionRuns, world_size: int) -> dict[str, Observation]:
    """Return the observations of a rung that torchrun has run.

    Raises:
        EvidenceError: A rank left no result.
    """
    folder, device = rung_folder(runs.folder, world_size), runs.device(world_size)
    try:
        results: tuple[dict[str, Any], ...] = tuple(read_result(folder, rank) for rank in range(world_size))
    except FileNotFoundError as error:
        raise EvidenceError(
            f"expected a result of each of {world_size} ranks in {folder.name}/, {Path(str(error.filename)).name} is missing; "
            "read the failure-*.json beside it, clear the rung's folder and run it again"
        ) from error
    rung = Rung(
        world_size=world_size, backend=runs.backend(world_size), results=results, folder=folder, legacy=runs.legacy(device),
        single=runs.single(device), probe=runs.expected_probe(device), plan=runs.plan,
    )  # fmt: skip
    return check_rung(rung, runs.settings)


def rung_folder(shared: Path, world_size: int) -> Path:
    """Return where launch file, journals and results of a rung lie."""
    return shared / f"rung-{world_size}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare or judge one rung; 0 when it is ready, or verified."""
    parser = argparse.ArgumentParser(
        prog="python -m dualtrack.stages.expansion_hosts",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("action", choices=("prepare", "judge"))
    parser.add_argument("shared", type=Path, help="folder that every host sees under the same path")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--ranks-per-host", type=int, required=True)
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="JSON of ExpansionSettings, the same in both calls"
    )
    parser.add_argument("--num-steps", type=int, default=30)
    asked = parser.parse_args(arguments)
    settings = ExpansionSettings.parse(
        {**asked.settings, "ladder": (asked.world_size,), "curve_steps": (asked.num_steps,)}
    )
    run = open_stage("3_ddp_expansion", settings, str(asked.shared / "stage"))
    with ExpansionRuns(run, asked.shared, asked.ranks_per_host) as runs:
        if asked.action == "prepare":
            sys.stdout.write(f"{prepare_rung(runs, asked.world_size, asked.num_steps)}\n")
            return 0
        return _report(run, judge_rung(runs, asked.world_size))


def _report(run: StageRun, observations: dict[str, Observation]) -> int:
    failing = failing_checks(observations, run.limits)
    for key, seen in observations.items():
        sys.stdout.write(f"{'failed' if key in failing else 'holds'}: {key}: {seen.what}\n")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
