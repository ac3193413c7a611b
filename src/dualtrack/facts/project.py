"""Where a project lives: its root, its frozen inputs, its runs, its ledger."""

import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

MARKER = "dualtrack.toml"


@dataclass(frozen=True, kw_only=True)
class Project:
    """The folders of one project; nothing is created by looking."""

    root: Path
    workload: str

    @property
    def frozen_inputs(self) -> Path:
        """Folder with one sub-folder of frozen inputs a workload."""
        return self.root / "frozen_inputs"

    def frozen_folder(self, workload: str) -> Path:
        """Return the folder of one workload's frozen inputs: the bare name, or `module_factory`."""
        return self.frozen_inputs / workload.replace(":", "_").replace(".", "_").replace("/", "_")

    @property
    def reports(self) -> Path:
        """Folder with one sub-folder a run."""
        return self.root / "reports"

    @property
    def notebooks(self) -> Path:
        """Folder of the stage notebooks."""
        return self.root / "notebooks"

    @property
    def ledger(self) -> Path:
        """The project's own ledger; only `dualtrack promote`, `rollback` and `waive` write it."""
        return self.root / "ledger.jsonl"

    def new_run_folder(self, label: str = "run") -> Path:
        """Create a folder of its own under `reports/`; two runs in one second get two folders."""
        self.reports.mkdir(exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        for attempt in range(1000):
            folder = self.reports / (f"{stamp}-{label}" if attempt == 0 else f"{stamp}-{label}-{attempt}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
        raise FileExistsError(f"expected a free name for {stamp}-{label} under reports/, found 1000 taken")


def find_project(root: str | Path | None = None) -> Project:
    """Find the project: `root` if given, else the nearest folder upward with the marker, else the checkout dualtrack is installed from.

    Raises:
        ValueError: There is no marker file.
    """
    if root is not None:
        candidates = [Path(root).resolve()]
    else:
        here = Path.cwd().resolve()
        candidates = [here, *here.parents, Path(__file__).resolve().parents[3]]
    for folder in candidates:
        marker = folder / MARKER
        if marker.is_file():
            settings = tomllib.loads(marker.read_text())
            return Project(root=folder, workload=str(settings.get("workload", "digits")))
    where = f"in {Path(root).name!r}" if root is not None else "here or in a folder above"
    raise ValueError(
        f'expected the marker {MARKER} {where}, found none; create it there with a line workload = "package.module:factory", or pass --root'
    )
