"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from headway.core.errors import UsageError


def writable(*files: Path | None) -> None:
    """Raises UsageError: a file that is asked for cannot be written there. It is called before the work, not after."""
    for path in files:
        if path is None:
            continue
        folder = path.resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError("nothing can be written there", where=str(path), fix="Name another place.")


def write_whole(path: Path, data: bytes | str) -> None:
    """Writes a file aside (text as UTF-8), brings it to the disk, and renames it into place.

    Raises OSError; nothing is left aside then, and what was at `path` stays. Threads, processes and hosts may write the
    same file at once: one of them wins.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_synced(aside, data)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_synced(path: Path, data: bytes | str) -> None:
    """Writes a file and brings it to the disk."""
    with path.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
