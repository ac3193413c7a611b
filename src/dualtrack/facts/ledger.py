"""The ledger: who promoted, rolled back or waived what, how many clean epochs there are, and which digest each run had.

One JSON object a line, appended and never changed. Each line carries its own digest and that of the line before, so a change anywhere
shows; a writer killed at any byte leaves at most an unfinished last line, which the next writer takes away before it appends. The chain
alone shows accidents, not intent: whoever may edit the file can compute it anew, so the root digest is also printed elsewhere.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from filelock import FileLock, Timeout
from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError, model_validator

from dualtrack.facts.digests import sha256_json
from dualtrack.facts.errors import LedgerError
from dualtrack.facts.hash_chain import Chain, make_line, read_chain
from dualtrack.facts.observations import Fact

LEGACY = "legacy"
REHEARSAL = "rehearsal"
"""Who stands in the entries of a rehearsed rollback; they grant nothing."""
LOCK_SECONDS = 30.0
PATH_AFTER = {
    "0_freeze_baseline": LEGACY,
    "1_pinned_pool": "pooled",
    "2_stream_prefetcher": "prefetched",
    "3_ddp_expansion": "prefetched",
}
"""The data path that is active once a stage is promoted; ranks of stage 3 train through the path of stage 2."""


class Promotion(Fact):
    """A stage was promoted: by a passed gate or by waivers, never by time."""

    kind: Literal["promotion"] = "promotion"
    at: AwareDatetime
    stage: str
    active_path: str
    who: str
    why: str
    """`passed gate`, or the waived observations."""
    run: str
    run_digest: str = ""
    """Digest of the run's manifest."""
    hardware_identity: str = ""
    frozen_inputs_digest: str = ""


class RollbackEntry(Fact):
    """A stage, and every later one, was rolled back."""

    kind: Literal["rollback"] = "rollback"
    at: AwareDatetime
    stage: str
    from_path: str
    to_path: str
    who: str
    why: str
    verified: bool | None = None
    """None: not checked yet; the check appends the entry again with its outcome."""


class Waiver(Fact):
    """Someone answers for a gate line that did not pass, until a date."""

    kind: Literal["waiver"] = "waiver"
    at: AwareDatetime
    stage: str
    observation: str
    """Key of the limit's observation."""
    who: str = Field(min_length=1)
    why: str = Field(min_length=1)
    until: AwareDatetime

    @model_validator(mode="after")
    def _ends_later(self) -> "Waiver":
        if self.until <= self.at:
            raise ValueError(f"expected a waiver that ends after it begins ({self.at}), got until={self.until}")
        return self


class CleanEpochs(Fact):
    """Dual-track epochs without a difference or an error, under their key; or a reset of that key's count."""

    kind: Literal["clean epochs"] = "clean epochs"
    at: AwareDatetime
    key: str
    """From `clean_epoch_key`; another key starts at 0."""
    num_epochs: int = Field(default=0, ge=0)
    reset_because: str | None = None
    """Set when an error or a difference ended the series; `num_epochs` are those since."""


class RunDigest(Fact):
    """A run came to its end with this manifest."""

    kind: Literal["run digest"] = "run digest"
    at: AwareDatetime
    run: str
    manifest_digest: str
    evidence_root: str


Entry = Annotated[Promotion | RollbackEntry | Waiver | CleanEpochs | RunDigest, Field(discriminator="kind")]
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


class Ledger:
    """A ledger file; nothing is created before the first `append`."""

    def __init__(self, path: Path) -> None:
        """Take `path`; it needs not exist."""
        self.path = Path(path)

    def append(self, entry: Entry) -> str:
        """Append an entry and return the new root digest; when this returns, the entry is on the disk.

        Raises:
            LedgerError: The ledger is broken, or another writer held its lock for 30 s.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock():
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                chain = self._chain()
                os.ftruncate(descriptor, chain.num_whole_bytes)
                line, root = make_line(entry.model_dump(mode="json"), len(chain.contents), chain.root)
                _write_all(descriptor, b"\n" + line if chain.lacks_newline else line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                _flush_folder(self.path.parent)
        return root

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, oldest first; an unfinished last line was never acknowledged and is left out.

        Raises:
            LedgerError: A line was changed, is missing or is no entry; the message names it.
        """
        return parse_entries(self._chain(), self.path.name)

    def root_digest(self) -> str:
        """Return the digest of the last line, which covers every line before it; 64 zeros for an empty ledger."""
        return self._chain().root

    def active_path(self) -> str:
        """Return the data path that the last promotion or rollback left active; `legacy` where there was none."""
        path = LEGACY
        for entry in self.entries():
            if isinstance(entry, Promotion):
                path = entry.active_path
            elif isinstance(entry, RollbackEntry):
                path = entry.to_path
        return path

    def promoted_stages(self) -> tuple[str, ...]:
        """Return the stages that are promoted now; a rollback takes its stage and every later one away."""
        stages: set[str] = set()
        for entry in self.entries():
            if isinstance(entry, Promotion):
                stages.add(entry.stage)
            elif isinstance(entry, RollbackEntry):
                stages = {stage for stage in stages if stage < entry.stage}
        return tuple(sorted(stages))

    def clean_epochs(self, key: str) -> int:
        """Return how many consecutive clean epochs there are under `key`, since its last reset."""
        count = 0
        for entry in self.entries():
            if isinstance(entry, CleanEpochs) and entry.key == key:
                count = entry.num_epochs if entry.reset_because is not None else count + entry.num_epochs
        return count

    def active_waivers(self, now: datetime, stage: str | None = None) -> tuple[Waiver, ...]:
        """Return the waivers that hold at `now`, of one stage or of all; an expired one holds no longer."""
        waivers = (entry for entry in self.entries() if isinstance(entry, Waiver))
        return tuple(waiver for waiver in waivers if waiver.at <= now < waiver.until and stage in (None, waiver.stage))

    def _chain(self) -> Chain:
        content = self.path.read_bytes() if self.path.exists() else b""
        return read_chain(content, self.path.name)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep other writers out; the operating system frees the lock of a killed one."""
        try:
            with FileLock(self.path.with_name(lock_name(self.path.name)), timeout=LOCK_SECONDS):
                yield
        except Timeout as error:
            raise LedgerError(
                f"{self.path.name}: expected its lock within {LOCK_SECONDS:.0f} s, another writer holds it; end that one, then try again"
            ) from error


def parse_entries(chain: Chain, name: str) -> tuple[Entry, ...]:
    """Return the entries of a chain that was read.

    Raises:
        LedgerError: A line is no entry of a known kind.
    """
    entries = []
    for number, content in enumerate(chain.contents, 1):
        try:
            entries.append(_ENTRY.validate_python(content))
        except ValidationError as error:
            raise LedgerError(f"{name}: line {number} is no entry of a kind this version knows: {error}") from error
    return tuple(entries)


def lock_name(ledger_name: str) -> str:
    """Return the name of a ledger's empty lock file, beside it."""
    return f".{ledger_name}.lock"


def clean_epoch_key(
    loading_source: str,
    settings_digest: str,
    frozen_inputs_digest: str,
    versions: dict[str, str],
    hardware_identity: str,
) -> str:
    """Return the key of a clean-epoch count: what may not change while it is counted.

    Args:
        loading_source: Digest of the source of the loading layer.
        settings_digest: Digest of the stage's settings.
        frozen_inputs_digest: Digest of the frozen inputs.
        versions: Package -> version.
        hardware_identity: As `provenance.hardware_identity` names it.
    """
    return sha256_json([loading_source, settings_digest, frozen_inputs_digest, versions, hardware_identity])


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
