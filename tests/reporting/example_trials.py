"""Trials as fresh processes leave them: noise within and between runs, rare slow steps, memory that rises and stays."""

import random
from datetime import UTC, datetime, timedelta

from dualtrack.facts.records import Measured, MemorySamples, Outcome, Trial

START = datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC)
CAP_BYTES = 64 * 2**20
NO_CUDA = "no CUDA device"
STEP_SECONDS = {
    "cpu": {
        "legacy": 6.12e-3,
        "pooled": 2.31e-3,
        "prefetched": 2.33e-3,
        "cached": 1.74e-3,
        "single": 2.4e-3,
        "ddp": 3.3e-3,
    },
    "cuda": {
        "legacy": 18.7e-3,
        "pooled": 12.1e-3,
        "prefetched": 11.7e-3,
        "cached": 11.6e-3,
        "single": 11.7e-3,
        "ddp": 12.4e-3,
    },
}
BATCH_SIZE = 64
FLOPS_PER_STEP = {"cpu": 2.1e8, "cuda": 3.1e12}


def example_trials(
    stage: str, device: str, plan: list[tuple[str, str, int, int]], factor: float = 1.0
) -> tuple[Trial, ...]:
    """Return trials in order of execution.

    Args:
        stage: Seeds the noise and names the trials.
        device: `cpu` or `cuda`.
        plan: Block, track, pair and world size of each trial.
        factor: Slows every track but `legacy` and `single`.
    """
    noise = random.Random(stage)
    trials = []
    for position, (block, track, pair, world_size) in enumerate(plan):
        slower = 1.0 if track in ("legacy", "single") else factor
        base = STEP_SECONDS[device][track] * slower * noise.gauss(1, 0.012) * (1 + 0.12 * (world_size > 4))
        steps = tuple(base * (1 + abs(noise.gauss(0, 0.05)) + 3 * (noise.random() < 0.01)) for _ in range(120))
        trials.append(_trial(stage, device, position, (block, track, pair, world_size), steps))
    return tuple(trials)


def _trial(stage: str, device: str, position: int, place: tuple[str, str, int, int], steps: tuple[float, ...]) -> Trial:
    block, track, pair, world_size = place
    has_pool = track in ("pooled", "prefetched")
    median = sorted(steps)[len(steps) // 2]
    peaks = {
        "pinned_peak_bytes": _on_cuda(device, 41.5 * 2**20 if has_pool else 96.0 * 2**20, "bytes"),
        "device_peak_bytes": _on_cuda(device, 3.1 * 2**30, "bytes"),
    }
    if has_pool:
        peaks["pool_peak_bytes"] = Measured(value=41.5 * 2**20, unit="bytes")
    return Trial(
        name=f"{stage}-{position:03d}-{track}",
        block=block,  # type: ignore[arg-type]
        track=track,
        pair=pair,
        position=position,
        started_at=START + timedelta(seconds=2 * position),
        outcome=Outcome(state="completed", exit_code=0, seconds=1.9),
        world_size=world_size,
        data_fraction=0.1 if stage.startswith("3") else 1.0,
        batch_size=BATCH_SIZE,
        num_warmup_steps=10,
        num_steps=len(steps),
        step_seconds=steps,
        data_wait_seconds=tuple(step * (0.6 if track == "legacy" else 0.05) for step in steps),
        samples_per_second=BATCH_SIZE * len(steps) / sum(steps),
        flops_per_step=Measured(value=FLOPS_PER_STEP[device], unit="FLOP"),
        mfu=_on_cuda(device, FLOPS_PER_STEP["cuda"] / median / 989e12, "fraction"),
        peaks=peaks,
        memory=_memory_samples(position, has_pool, device) if block == "extra" else None,
        loader_stats={"cap_bytes": CAP_BYTES, "pool_peak_bytes": int(41.5 * 2**20)} if has_pool else {},
        load_average=1.1,
    )


def _memory_samples(seed: int, has_pool: bool, device: str) -> MemorySamples:
    noise = random.Random(seed)
    steps = range(130)
    rising = [min(1.0, (step + 4) / 20) for step in steps]
    pss = tuple(
        int((410 if has_pool else 520) * 2**20 * (0.8 + 0.2 * share) + noise.random() * 4e6) for share in rising
    )
    pool = (
        tuple(int(2**19 * round(min(83, 83 * share * noise.uniform(0.6, 1.0)))) for share in rising)
        if has_pool
        else None
    )
    on_device = tuple(int(2.9 * 2**30 * (0.9 + 0.1 * share)) for share in rising) if device == "cuda" else None
    return MemorySamples(
        seconds=tuple(0.006 * step for step in steps), pss_bytes=pss, pool_bytes=pool, device_bytes=on_device
    )


def _on_cuda(device: str, value: float, unit: str) -> Measured:
    return Measured(value=value, unit=unit) if device == "cuda" else Measured(value=None, unit=unit, reason=NO_CUDA)


def abba_plan(
    candidate: str, num_pairs: int, reference: str = "legacy", world_size: int = 1
) -> list[tuple[str, str, int, int]]:
    """Return `num_pairs` pairs in ABBA order, in the shape that `example_trials` takes."""
    plan = []
    for pair in range(num_pairs):
        both = [("paired", reference, pair, 1), ("paired", candidate, pair, world_size)]
        plan += both if pair % 2 == 0 else both[::-1]
    return plan
