"""The command `dualtrack`: run the workbook, freeze, verify, replay, promote, roll back."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dualtrack.facts.errors import MigrationError
from dualtrack.facts.project import Project, find_project
from dualtrack.facts.records import STAGES, RunSummary
from dualtrack.facts.settings import FreezeSettings
from dualtrack.running.runner import EXIT_FAILED, EXIT_USAGE

ROOT_OPTION = click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Project root; default: found upward by its marker.",
)


class _Commands(click.Group):
    """Turns our own errors into one clear line and a documented exit code."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command; bad input exits with 2, a broken promise with 1."""
        try:
            return super().invoke(context)
        except MigrationError as error:
            click.echo(f"dualtrack: {error}", err=True)
            sys.exit(EXIT_FAILED)
        except ValueError as error:
            click.echo(f"dualtrack: {error}", err=True)
            sys.exit(EXIT_USAGE)


@click.group(cls=_Commands)
@click.version_option(package_name="dualtrack")
def main() -> None:
    """Move a PyTorch training system to a new data path in stages, and prove each stage."""


@main.command()
@ROOT_OPTION
@click.option("--workload", help="Bundled name or package.module:factory; default: the project's.")
@click.option(
    "--size",
    type=click.Choice(["small", "full"]),
    default="small",
    show_default=True,
    help="Size of a bundled workload.",
)
@click.option(
    "-p",
    "--parameter",
    "assignments",
    multiple=True,
    metavar="[STAGE.]NAME=VALUE",
    help="Set a stage's parameter; repeatable.",
)
@click.option("--device", default=None, help="auto, cpu, cuda or cuda:n.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="latest",
    default=None,
    metavar="[RUN]",
    help="Go on with an earlier run; finished stages are verified and kept.",
)
@click.option(
    "--stage-timeout", default=3600.0, show_default=True, help="Longest that one cell of a stage may run, in seconds."
)
def run(
    root: Path | None,
    workload: str | None,
    size: str,
    assignments: tuple[str, ...],
    device: str | None,
    resume: str | None,
    stage_timeout: float,
) -> None:
    """Run the five notebooks in sequence and build the report.

    Exit codes: 0 all gates passed; 1 a gate failed or its tools broke; 2 bad usage, nothing was started; 3 complete, but a gate is
    inconclusive or not measured; 4 incomplete (a crash, a timeout, an interrupt).
    """
    from dualtrack.running.parameters import collect_parameters
    from dualtrack.running.runner import WorkbookRun
    from dualtrack.running.workload_sizes import sized_workload

    project = find_project(root)
    chosen, presets = sized_workload(workload or project.workload, size)
    shared: dict[str, Any] = {**presets, "workload": chosen}
    if device is not None:
        shared["device"] = device
    parameters = collect_parameters(assignments, shared)
    folder = _find_run(project, resume) if resume else None
    workbook = WorkbookRun(
        project, chosen, parameters, folder=folder, stage_timeout_seconds=stage_timeout, say=click.echo
    )
    sys.exit(workbook.execute())


@main.command()
@ROOT_OPTION
@click.option("--workload", help="Bundled name or package.module:factory; default: the project's.")
@click.option("--reason", default="", help="Why; required where something is frozen already.")
@click.option(
    "--recipe",
    is_flag=True,
    help="Keep digests only (large or private data); the legacy loader runs again at every load.",
)
@click.option(
    "-p",
    "--parameter",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a parameter of stage 0, for example seed=7.",
)
@click.option("--yes", is_flag=True, help="Do not ask before writing.")
def freeze(
    root: Path | None, workload: str | None, reason: str, recipe: bool, assignments: tuple[str, ...], yes: bool
) -> None:
    """Freeze the legacy loader's first epoch and record the baseline of this hardware."""
    from dualtrack.running.parameters import parse_assignments
    from dualtrack.stages.freeze_command import freeze_project

    project = find_project(root)
    given = {"workload": workload or project.workload, "mode": "recipe" if recipe else "stored"}
    settings = FreezeSettings.parse({**given, **parse_assignments(assignments)})
    for line in freeze_project(project, settings, reason, None if yes else click.confirm):
        click.echo(line)


@main.command()
@ROOT_OPTION
@click.argument("run", default="latest")
def verify(root: Path | None, run: str) -> None:
    """Recompute every digest and every verdict of a run from its raw records."""
    from dualtrack.reporting.verify import verify_run

    folder = Path(run) if (Path(run) / "manifest.json").is_file() else _find_run(find_project(root), run)
    result = verify_run(folder)
    click.echo(result.text() if hasattr(result, "text") else str(result))
    sys.exit(0 if result.ok else EXIT_FAILED)


@main.command()
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--repeats", default=5, show_default=True, help="How often the frozen sample is run again.")
def replay(bundle: Path, repeats: int) -> None:
    """Compare a divergence's recorded bytes again and rerun its frozen sample in an isolated process."""
    from dualtrack.stages.replay import replay as replay_bundle

    click.echo(str(replay_bundle(bundle, repeats)))


@main.command()
@ROOT_OPTION
def status(root: Path | None) -> None:
    """Say which path is active, which promotions stand, and how the latest run ended."""
    from dualtrack.stages.promotion_command import describe_status

    project = find_project(root)
    whole = [folder for folder in _runs(project) if (folder / "run.json").is_file()]
    for line in describe_status(project, whole[-1] if whole else None):
        click.echo(line)


@main.command()
@ROOT_OPTION
@click.argument("stage", type=click.Choice(STAGES[1:4]))
@click.option("--run", "run_name", default="latest", show_default=True, help="The run whose gate passed.")
@click.option("--who", required=True, help="Who promotes.")
@click.option("--why", required=True, help="Why now.")
@click.option("--allow-dirty", is_flag=True, help="Promote from a working tree with uncommitted changes.")
def promote(root: Path | None, stage: str, run_name: str, who: str, why: str, allow_dirty: bool) -> None:
    """Make a stage's path the active one; refused unless its gate passed, the run verifies and the stages before it are promoted."""
    from dualtrack.reporting.verify import verify_run
    from dualtrack.stages.promotion_command import Decision, promote_stage

    project = find_project(root)
    folder = _find_run(project, run_name)
    problem = verify_run(folder).first_difference
    click.echo(promote_stage(project, stage, folder, problem, Decision(who=who, why=why, allow_dirty=allow_dirty)))


@main.command()
@ROOT_OPTION
@click.option("--who", required=True, help="Who rolls back.")
@click.option("--why", required=True, help="Why.")
def rollback(root: Path | None, who: str, why: str) -> None:
    """Put the path before the active one back, and check it: read back, and a frozen epoch equal to the baseline bit for bit."""
    from dualtrack.stages.rollback_command import roll_back

    click.echo(roll_back(find_project(root), who=who, why=why))


@main.command()
@ROOT_OPTION
@click.argument("observation")
@click.option("--stage", required=True, type=click.Choice(STAGES[:4]))
@click.option("--who", required=True)
@click.option("--why", required=True)
@click.option("--until", required=True, help="Date on which the waiver ends, as 2027-01-31.")
def waive(root: Path | None, observation: str, stage: str, who: str, why: str, until: str) -> None:
    """Let one gate line stand open for a while; shown in red until it ends."""
    from dualtrack.stages.promotion_command import waive_line

    click.echo(waive_line(find_project(root), stage, observation, who=who, why=why, until=until))


@main.command()
@ROOT_OPTION
@click.argument("run", default="latest")
def report(root: Path | None, run: str) -> None:
    """Build the page of a run again from its records."""
    from dualtrack.reporting.manifest import write_manifest
    from dualtrack.reporting.report_page import write_page

    project = find_project(root)
    folder = _find_run(project, run)
    page = write_page(folder)
    click.echo(f"manifest        {write_manifest(folder)}")
    click.echo(f"report          {page.relative_to(project.root).as_posix()}")


@main.command()
@ROOT_OPTION
@click.argument("notebooks", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def store_outputs(root: Path | None, notebooks: tuple[Path, ...]) -> None:
    """Run notebooks on their defaults and store the outputs in place, for nbval to compare with later."""
    from dualtrack.running.notebook_execution import store_default_outputs

    project = find_project(root)
    for notebook in notebooks:
        ending = store_default_outputs(notebook, project.root)
        click.echo(f"{notebook.name}: {ending.kind} {ending.detail}")
        if ending.kind != "completed":
            sys.exit(EXIT_FAILED)


@main.command()
@ROOT_OPTION
@click.option("--all", "everything", is_flag=True, help="Remove complete runs too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clean(root: Path | None, everything: bool, yes: bool) -> None:
    """Remove runs of single notebooks and incomplete runs; complete runs stay."""
    project = find_project(root)
    doomed = [folder for folder in _runs(project) if everything or not _is_complete(folder)]
    if not doomed:
        click.echo("nothing to remove")
        return
    for folder in doomed:
        click.echo(f"  {folder.relative_to(project.root).as_posix()}")
    if yes or click.confirm(f"remove {len(doomed)} folders?"):
        for folder in doomed:
            shutil.rmtree(folder)


def _runs(project: Project) -> list[Path]:
    """Return run folders, oldest first; folders that git keeps as examples have no time stamp and are left alone."""
    return (
        sorted(folder for folder in project.reports.glob("2*Z-*") if folder.is_dir())
        if project.reports.is_dir()
        else []
    )


def _is_complete(folder: Path) -> bool:
    try:
        return RunSummary.model_validate_json((folder / "run.json").read_bytes()).complete
    except (FileNotFoundError, ValueError):
        return False


def _find_run(project: Project, name: str) -> Path:
    """Return the folder of a run by path, by name, or the latest.

    Raises:
        ValueError: There is none; the runs that exist are listed.
    """
    names: Callable[[], str] = lambda: ", ".join(folder.name for folder in _runs(project)[-5:]) or "none"  # noqa: E731
    if name == "latest":
        whole = [folder for folder in _runs(project) if (folder / "run.json").is_file()]
        if not whole:
            raise ValueError("expected a run under reports/, found none; start one with `dualtrack run`")
        return whole[-1]
    for folder in (Path(name), project.root / name, project.reports / name):
        if (folder / "run.json").is_file():
            return folder.resolve()
    raise ValueError(f"expected a run, found nothing called {name!r}; the latest are {names()}")
