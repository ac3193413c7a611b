"""What a distributed launch is asked for: one JSON file that the launcher, torchrun and every rank read."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.observations import Fact
from dualtrack.training.rank_faults import RankFault

SPEC_FILE = "launch.json"


class LaunchSpec(Fact):
    """A task for many ranks, with every bound stated."""

    task: str
    """`package.module:function`; it is called as `function(context, **arguments)` on every rank and returns plain data."""
    arguments: dict[str, Any] = {}
    world_size: int = Field(ge=1)
    timeout_seconds: float = Field(gt=0)
    """Explicit timeout of the process group: rendezvous and every collective."""
    backend: Literal["gloo", "nccl"] = "gloo"
    device: Literal["cpu", "cuda"] = "cpu"
    endpoint: str = "127.0.0.1:0"
    """Rendezvous of the agent; port 0 takes a free one."""
    faults: tuple[RankFault, ...] = ()

    @property
    def deadline_seconds(self) -> float:
        """How long a rank may go without progress, in any phase, before it is killed.

        An explicit timeout alone does not bound initialisation or teardown: a port that accepts and never answers held a client for
        more than 120 s with a timeout of 5 s.
        """
        return 3 * self.timeout_seconds + 10

    def save(self, folder: Path) -> Path:
        """Write the spec into a launch folder and return the file."""
        path = folder / SPEC_FILE
        write_atomically(path, self.model_dump_json(indent=1).encode())
        return path

    @classmethod
    def load(cls, path: Path) -> "LaunchSpec":
        """Read a spec from its file or from the launch folder that holds it."""
        return cls.model_validate_json((path / SPEC_FILE if path.is_dir() else path).read_bytes())
