"""Errors of the workbook: one parent, so that a trainer can catch every broken promise with one clause.

Bad input is a `ValueError`; a promise broken at run time is a child of `MigrationError`. A message says what was expected,
what was found and what to do.
"""


class MigrationError(Exception):
    """A promise of the migration was broken at run time."""


class EvidenceError(MigrationError):
    """Recorded evidence is missing, changed or contradicts itself."""


class FrozenInputError(EvidenceError):
    """A frozen input differs from its manifest, or a batch could not be frozen without loss."""


class CapacityError(MigrationError):
    """A memory cap cannot be honoured: it is below one batch, or above what the machine has."""


class PoolError(MigrationError):
    """The pinned pool was used against its rules, or a wait for a slot passed its deadline."""


class LoaderError(MigrationError):
    """A loader cannot be preserved, or a worker process died or fell silent."""


class PrefetchError(MigrationError):
    """The copy of a batch failed, or did not come within its deadline."""


class DivergenceError(MigrationError):
    """Candidate and legacy delivered different batches."""


class StageRefused(MigrationError):
    """A stage may not run here, for example stage 1 inside a process group."""


class LaunchError(MigrationError):
    """A distributed launch failed, or a phase of it passed the parent's deadline."""


class TrialError(MigrationError):
    """A fresh-process trial crashed, was killed or passed its deadline."""


class LedgerError(EvidenceError):
    """The ledger is broken, or an entry was refused."""


class NonFiniteLoss(MigrationError):
    """A training step gave a loss that is NaN or infinite."""
