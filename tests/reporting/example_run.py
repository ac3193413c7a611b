"""Run folders as the runner leaves them, for tests of the page: passed, failed, CPU only, waived, crashed."""

from datetime import timedelta
from pathlib import Path

import nbformat
from example_records import example_records
from example_trials import START
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from dualtrack.facts.digests import canonical_json, sha256_file, sha256_json
from dualtrack.facts.durable_files import write_atomically
from dualtrack.facts.ledger import CleanEpochs, Ledger, Waiver
from dualtrack.facts.observations import State, Value
from dualtrack.facts.records import STAGES, RunSummary, StageRecord
from dualtrack.reporting.notebook_html import notebook_to_html

WAIVER = Waiver(
    at=START - timedelta(days=1),
    stage="1_pinned_pool",
    observation="step_latency_ratio",
    who="Ada",
    why="the faster host arrives in April",
    until=START + timedelta(days=30),
)
KINDS = ("passed", "cpu only", "failed gate", "slow", "waived", "tool error", "crashed")


def write_example_run(reports: Path, kind: str = "passed") -> Path:
    """Write a run folder without its page and return it.

    Args:
        reports: Where the run's folder goes.
        kind: `passed` ran on CUDA; `cpu only` passed without GPU figures; in `failed gate` stage 2 delivered a wrong byte; in
            `slow` stage 1 missed its latency limit and in `waived` somebody answers for that; in `tool error` a measurement of stage 1 broke; in
            `crashed` the kernel of stage 2 was killed.
    """
    records = {
        "passed": lambda: example_records("cuda"),
        "cpu only": lambda: example_records("cpu"),
        "failed gate": lambda: example_records("cpu", failing="divergence"),
        "slow": lambda: example_records("cuda", failing="slow"),
        "waived": lambda: example_records("cuda", failing="slow but waived"),
        "tool error": lambda: example_records("cpu", failing="tool error"),
        "crashed": lambda: {stage: record for stage, record in example_records("cpu").items() if stage[0] in "014"},
    }[kind]()
    run = reports / f"20260314T092653Z-{kind.replace(' ', '-')}"
    for stage, record in records.items():
        record.save(run / "records" / f"{stage}.json")
        mark = {
            "stage": stage,
            "record_sha256": sha256_file(run / "records" / f"{stage}.json"),
            "state": record.verdict.state,
        }
        write_atomically(run / "records" / f"{stage}.completed.json", canonical_json(mark))
        _write_notebook(run, stage, record)
    states = {stage: records[stage].verdict.state.value if stage in records else "not run" for stage in STAGES}
    if kind == "crashed":
        states["2_stream_prefetcher"] = "crashed at cell 6: signal 9 (SIGKILL)"
    _write_summary(run, states, records)
    _write_ledger(run, records, (WAIVER,) if kind == "waived" else ())
    return run


def _write_ledger(run: Path, records: dict[str, StageRecord], waivers: tuple[Waiver, ...]) -> None:
    """Write what the stages enter: the clean epochs that stage 2 claims, beside waivers."""
    ledger = Ledger(run / "ledger.jsonl")
    for waiver in waivers:
        ledger.append(waiver)
    claimed = records["2_stream_prefetcher"].observations["clean_epochs"] if "2_stream_prefetcher" in records else None
    if isinstance(claimed, Value):
        ledger.append(CleanEpochs(at=START, key=sha256_json("key"), num_epochs=int(claimed.value)))


def _write_summary(run: Path, states: dict[str, str], records: dict[str, StageRecord]) -> None:
    settled = {state.value for state in State}
    complete = all(state in settled for state in states.values())
    summary = RunSummary(
        run=run.name,
        workload="digits",
        started_at=START - timedelta(seconds=3),
        ended_at=START + timedelta(seconds=228),
        stages=states,
        seconds=dict.fromkeys(records, 38.0),
        complete=complete,
        exit_code=0 if set(states.values()) == {"passed"} else 1 if complete else 4,
        stable_digest=sha256_json({stage: record.stable_digest for stage, record in records.items()}),
    )
    write_atomically(run / "run.json", summary.model_dump_json(indent=1).encode())


def _write_notebook(run: Path, stage: str, record: StageRecord) -> None:
    text = f"{stage}: {record.verdict.state} ({record.verdict.scope})\n"
    cells = [
        new_markdown_cell(f"# Stage {stage[0]}\n\nWhat changes, and what must hold.", id="title"),
        new_code_cell("seed = 20260101", execution_count=1, metadata={"tags": ["parameters"]}, id="parameters"),
        new_code_cell(
            "record = run_stage()",
            execution_count=2,
            outputs=[new_output("stream", name="stdout", text=text)],
            id="run",
        ),
    ]
    notebook = new_notebook(cells=cells, metadata={"language_info": {"name": "python", "pygments_lexer": "ipython3"}})
    path = run / "notebooks" / f"{stage}.ipynb"
    write_atomically(path, nbformat.writes(notebook).encode())
    notebook_to_html(path, run / "html" / f"{stage}.html")
