"""Tables that a notebook shows of a record: conditions, gate lines, trials. Frames only; they judge nothing."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from IPython.display import display

from dualtrack.facts.derivations import table_rows
from dualtrack.facts.records import StageRecord
from dualtrack.reporting.stage_figures import stage_figures


def conditions_frame(record: StageRecord) -> pd.DataFrame:
    """Return the recorded conditions, one row a fact; what was not collected says so."""
    rows: list[tuple[str, str, str]] = []
    for group, content in record.conditions.get("before", {}).items():
        if group in ("sources", "environment"):
            continue  # long lists; they stand in the record
        facts: Mapping[str, Any] = content if isinstance(content, Mapping) else {"": content}
        rows += [(group, name, str(value)) for name, value in facts.items()]
    return pd.DataFrame(rows, columns=["group", "fact", "value"]).set_index(["group", "fact"])


def gate_frame(record: StageRecord) -> pd.DataFrame:
    """Return the gate's lines: what, state, statistic, limit, n; the primary line is marked."""
    rows = [
        {
            "line": line.what,
            "state": line.state.value,
            "statistic": line.statistic,
            "limit": line.limit,
            "n": line.num,
            "rank": "primary" if line.primary else "advisory" if line.advisory else "",
        }
        for line in record.verdict.lines
    ]
    return pd.DataFrame(rows).set_index("line")


def numeric_words(record: StageRecord) -> str:
    """Return the lines that must repeat from run to run, as stable text that a committed output can be compared with."""
    stable = {line.observation: line for line in record.verdict.lines if line.observation in record.stable_keys}
    return "\n".join(f"{key}: {stable[key].state.value}, {stable[key].statistic}" for key in sorted(stable))


def result_frame(records: Mapping[str, StageRecord]) -> pd.DataFrame:
    """Return the result table: stage x (core change, MFU, pinned peak, step latency, crash rate), each cell in words with its n."""
    return pd.DataFrame([row.in_words() for row in table_rows(list(records.values()))]).set_index("stage")


def show_figures(records: Mapping[str, StageRecord], kind: str) -> None:
    """Display the figures of one kind, `memory` or `throughput`, of every stage that has them."""
    for record in records.values():
        for name, figure, _ in stage_figures(record):
            if name == f"{record.stage}-{kind}":
                display(figure)
