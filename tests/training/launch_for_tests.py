"""Start a launch that goes on for a minute, and print the process group to be watched; a test kills this process."""

from dualtrack.training.ddp_launch import RankLauncher
from dualtrack.training.launch_spec import LaunchSpec
from dualtrack.training.rank_faults import RankFault

if __name__ == "__main__":
    with RankLauncher() as launcher:
        print(launcher.agent_pid, flush=True)  # noqa: T201 (the test reads it)
        sleep = RankFault(kind="sleep", rank=1, phase="forward", step=1, section=1, seconds=60.0)
        launcher.launch(
            LaunchSpec(task="rank_task_examples:toy_training", world_size=2, timeout_seconds=60, faults=(sleep,))
        )
