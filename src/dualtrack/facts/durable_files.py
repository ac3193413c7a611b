"""Files that are whole or absent: a reader never sees half of a record, whatever kills the writer."""

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes, overwrite: bool = False) -> None:
    """Write `content` to `path` so that a kill at any moment leaves the old file or the new one.

    The bytes go to a temporary file in the same folder, are flushed to the disk, and are then renamed.

    Raises:
        FileExistsError: `path` exists and `overwrite` is false; evidence is never replaced by accident.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        if overwrite:
            Path(temporary).replace(path)
        else:
            os.link(temporary, path)  # fails when the target exists, unlike a rename
    finally:
        Path(temporary).unlink(missing_ok=True)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
