"""Going back down the ladder, for real: every rung's rollback is the rung before it, executed from its own commit and compared bit for bit.

On the way the commit of the rung above is continued too, with fewer ranks; its float64 losses must stay those of the single process.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualtrack.facts.observations import Equality, Observation, Unmeasured, Value
from dualtrack.facts.records import Rollback
from dualtrack.stages.expansion_counting import compare, merge, relative, within
from dualtrack.stages.expansion_curves import mean_losses
from dualtrack.stages.expansion_rung import Rung
from dualtrack.stages.expansion_runs import ExpansionRuns
from dualtrack.training.data_plan import DataPlan
from dualtrack.training.rank_tasks import ResumeSpec


@dataclass(frozen=True, kw_only=True)
class Return:
    """One executed step down the ladder."""

    rollback: Rollback
    bit_equal: Equality
    """The resumed steps against the undisturbed run of the same number of ranks (V19)."""
    other_world_size: Observation
    """The commit of the rung above, continued with fewer ranks, against the single process (V20)."""


def return_down(runs: ExpansionRuns, rungs: Mapping[int, Rung], top: int) -> list[Return]:
    """Go back from `top` to the single process, rung by rung.

    Args:
        runs: The stage's launches.
        rungs: The verified rungs by number of ranks.
        top: The rung that was reached, verified or not.

    Raises:
        LaunchError: A launch on the way failed.
    """
    way = [*sorted((size for size in rungs if size < top), reverse=True), 1]
    returns, upper = [], top
    # a rung that failed may not have committed; then the way down starts from the highest verified one
    root = runs.commit_root("float64", top if top in rungs else way[0])
    for lower in way:
        root_of_own = runs.commit_root("float32", lower)
        back = runs.folder / f"back-{lower}"
        specs = [
            ResumeSpec(job=runs.job(), root=str(root_of_own), num_steps=runs.settings.num_resumed_steps, float64=False)
        ]
        has_float64 = runs.legacy(runs.device(lower)).float64_error is None
        if has_float64:
            specs.append(
                ResumeSpec(
                    job=runs.job(),
                    root=str(root),
                    num_steps=runs.settings.num_resumed_steps,
                    float64=True,
                    commit_root=str(back),
                )
            )
            root = back
        started = time.monotonic()
        results = runs.resume(lower, specs)
        undisturbed = rungs[lower].results if lower in rungs else (runs.single(runs.device(lower)),)
        returns.append(_judge(runs, upper, lower, results, undisturbed, time.monotonic() - started))
        upper = lower
    return returns


def _judge(
    runs: ExpansionRuns,
    upper: int,
    lower: int,
    results: Sequence[Any],
    undisturbed: Sequence[dict[str, Any]],
    seconds: float,
) -> Return:
    own = [result[0] for result in results]
    seen = compare_with_undisturbed(own, undisturbed, runs.plan)
    what = "float64 losses continued from a commit of another number of ranks"
    if len(results[0]) > 1:
        single = runs.single(runs.device(lower))
        other: Observation = continued(
            what, [result[1] for result in results], single, runs.plan, runs.settings.curve64_tolerance
        )
    else:
        other = Unmeasured(what=what, reason=runs.legacy(runs.device(lower)).float64_error or "the ranks computed none")
    read_back = own[0]["world_size"]
    rollback = Rollback(
        from_path=_words(upper), to_path=_words(lower), active_path_read_back=_words(read_back), num_steps_compared=seen.num_compared,
        num_steps_equal=seen.num_equal, seconds=round(seconds, 3),
        detail=f"{_words(lower)} resumed their own commit of step {own[0]['start_step']} in a new launch; samples, losses and parameters compared bit for bit",
    )  # fmt: skip
    return Return(rollback=rollback, bit_equal=seen, other_world_size=other)


def compare_with_undisturbed(
    resumed: Sequence[dict[str, Any]], undisturbed: Sequence[dict[str, Any]], plan: DataPlan
) -> Equality:
    """V19: a resumed run against the run that was not disturbed: loaded and final parameters, losses of every rank, and sample ids."""
    pairs: list[tuple[str, Any, Any]] = []
    for rank, (mine, theirs) in enumerate(zip(resumed, undisturbed, strict=True)):
        start, curve = mine["start_step"], mine["curve"]
        digests = {int(step): digest for step, digest in theirs["curve32"]["parameter_digests"].items()}
        pairs.append(
            (
                f"rank {rank}, parameters as committed after step {start}",
                mine["committed_digest"],
                mine["loaded_digest"],
            )
        )
        for offset, loss in enumerate(curve["losses"]):
            pairs.append(
                (f"rank {rank}, loss of step {start + offset}", theirs["curve32"]["losses"][start + offset], loss)
            )
            ids = plan.rank_ids(start + offset, rank, len(resumed)).tolist()
            pairs.append((f"rank {rank}, samples of step {start + offset}", ids, mine["ids"][offset]))
        last = start + len(curve["losses"])
        final = {int(step): digest for step, digest in curve["parameter_digests"].items()}
        pairs.append((f"rank {rank}, parameters after step {last}", digests.get(last), final.get(last)))
    return compare("resumed run against the undisturbed one", pairs)


def continued(
    what: str, resumed: Sequence[dict[str, Any]], single: dict[str, Any], plan: DataPlan, tolerance: float
) -> Equality:
    """V20: float64 training that goes on with another number of ranks: losses of the single process, the very samples that come next."""
    start = resumed[0]["start_step"]
    means = mean_losses([{"curve": item["curve"]} for item in resumed], "curve")
    expected = single["curve64"]["losses"]
    errors = [(f"step {start + offset}", relative(loss, expected[start + offset])) for offset, loss in enumerate(means)]
    samples = compare(
        what,
        [
            (
                f"samples of step {start + offset}",
                plan.step_ids(start + offset).tolist(),
                [sample for item in resumed for sample in item["ids"][offset]],
            )
            for offset in range(len(means))
        ],
    )
    joined = merge([within(what, errors, tolerance), samples])
    assert isinstance(joined, Equality)
    return joined


def verified(returns: Sequence[Return]) -> Value:
    """Return whether every step down was executed and checked."""
    return Value(
        what="rollback from rung to rung down to the single process executed and checked",
        value=bool(returns) and all(item.rollback.verified for item in returns),
    )


def _words(world_size: int) -> str:
    return "single process" if world_size == 1 else f"{world_size} ranks"
