"""Sizes of a pool from what was frozen: bytes of a slot, and a cap with room for what the legacy loader may have in flight."""

from typing import Self

from dualtrack.facts.frozen_inputs import FrozenManifest
from dualtrack.facts.observations import Fact

PAGE_BYTES = 4096
LEAF_ALIGNMENT_BYTES = 512
NUM_HELD_SLOTS = 2  # a worker: one batch at the consumer, one on its way to the device


class PoolSizes(Fact):
    """Slot and caps of a stage's pools."""

    slot_bytes: int
    cap_bytes: int
    eval_cap_bytes: int
    tight_cap_bytes: int
    """The smallest cap that works: one slot a worker, so that a slow consumer makes the producers wait."""

    @classmethod
    def choose(cls, manifest: FrozenManifest, cap_bytes: int = 0, eval_cap_bytes: int = 0) -> Self:
        """Return the sizes that were asked for; 0 takes a cap from the frozen batches and the legacy loader's workers.

        A slot holds the largest frozen batch with every leaf aligned, rounded up to whole pages.
        """
        leaves = max(len(batch.tensors) for batch in manifest.batches)
        slot_bytes = -(-(manifest.largest_batch_bytes + LEAF_ALIGNMENT_BYTES * leaves) // PAGE_BYTES) * PAGE_BYTES
        workers = max(1, int(manifest.loader.get("num_workers") or 0))
        in_flight = int(manifest.loader.get("prefetch_factor") or 2)
        cap = cap_bytes or workers * (in_flight + NUM_HELD_SLOTS) * slot_bytes
        return cls(
            slot_bytes=slot_bytes,
            cap_bytes=cap,
            eval_cap_bytes=eval_cap_bytes or cap,
            tight_cap_bytes=workers * slot_bytes,
        )
