"""Compare what a path delivered and computed with the frozen baseline: structure first, then every tensor and every step, bit for bit."""

from collections.abc import Sequence
from typing import Any

from dualtrack.facts.frozen_inputs import Baseline, FrozenBatch, FrozenManifest
from dualtrack.facts.observations import Divergence, Equality
from dualtrack.training.frozen_run import EqualityTrace


def compare_batches(what: str, manifest: FrozenManifest, delivered: Sequence[FrozenBatch]) -> Equality:
    """Count the frozen tensors that were delivered again bit for bit.

    A missing batch counts each of its tensors as a mismatch, a batch too many counts as one, and so does another structure.
    """
    num_compared = num_equal = 0
    first: Divergence | None = None
    for place, frozen in enumerate(manifest.batches):
        batch = delivered[place] if place < len(delivered) else None
        same_structure = batch is not None and batch.structure == frozen.structure
        for name, digest in frozen.tensors.items():
            num_compared += 1
            found = batch.tensors.get(name) if batch is not None and same_structure else None
            num_equal += found == digest
            if found != digest and first is None:
                seen = "no batch" if batch is None else "another structure" if not same_structure else str(found)[:16]
                first = Divergence(where=f"epoch 0, step {place}, {name}", legacy=digest[:16], candidate=seen)
    extra = max(0, len(delivered) - len(manifest.batches))
    if extra and first is None:
        first = Divergence(
            where=f"epoch 0, step {len(manifest.batches)}", legacy="end of epoch", candidate=f"{extra} batches more"
        )
    num_mismatched = num_compared - num_equal + extra
    return Equality(
        what=what,
        num_compared=num_compared + extra,
        num_equal=num_equal,
        num_mismatched=num_mismatched,
        first_divergence=first,
    )


def compare_traces(baseline: Baseline, trace: EqualityTrace) -> Equality:
    """Count the steps whose loss and gradient norm equal the baseline bit for bit, and compare the parameters before and after."""
    expected: list[tuple[str, Any]] = [("initial parameters", baseline.initial_parameters_digest)]
    found: list[Any] = [trace.initial_parameters_digest]
    for step in range(max(len(baseline.losses), len(trace.losses))):
        expected.append((f"step {step} (loss, gradient norm)", _at(baseline.losses, baseline.gradient_norms, step)))
        found.append(_at(trace.losses, trace.gradient_norms, step))
    expected.append(("final parameters", baseline.final_parameters_digest))
    found.append(trace.final_parameters_digest)
    differing = [
        (where, want, got)
        for (where, want), got in zip(expected, found, strict=True)
        if want is None or got is None or want != got
    ]
    first = (
        Divergence(where=differing[0][0], legacy=str(differing[0][1]), candidate=str(differing[0][2]))
        if differing
        else None
    )
    return Equality(
        what=f"training on the {trace.path} path against the legacy baseline", num_compared=len(expected),
        num_equal=len(expected) - len(differing), num_mismatched=len(differing), first_divergence=first,
    )  # fmt: skip


def _at(losses: Sequence[float], norms: Sequence[float], step: int) -> tuple[float, float] | None:
    return (losses[step], norms[step]) if step < len(losses) else None
