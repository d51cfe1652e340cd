"""Files of a store in the making: folders that are staged, locks, and digests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headway.core.errors import DataError, HeadwayError
from headway.core.files import describe_os_error, open_regular, sync_folder
from headway.data.store_address import OBJECTS, VERSIONS

STAGING, LOCKS = "staging", "locks"
_COPY_BYTES = 1 << 22


def make_folders(store: Path) -> None:
    """Creates the folders of a store, so that their entries are on the disk. Raises OSError."""
    for name in (OBJECTS, VERSIONS, STAGING, LOCKS):
        (store / name).mkdir(parents=True, exist_ok=True)
    for folder in ((store / OBJECTS).parent, store):
        sync_folder(folder)


@contextmanager
def stage(store: Path) -> Iterator[Path]:
    """Yields an empty folder on the disk of the store; it is removed at the end of the block.

    After a kill it stays, out of sight, until the garbage collection removes it.
    """
    folder = store / STAGING / secrets.token_hex(8)
    try:
        folder.mkdir(parents=True)
        # The kernel lets go of it when the process ends, in whatever way.
        with _hold(folder, fcntl.LOCK_SH):
            yield folder
    except OSError as error:
        place = Path(error.filename or store)
        what = "the store cannot be written" if place.is_relative_to(store) else "this file cannot be used"
        what = f"{what} ({describe_os_error(error)})"
        raise HeadwayError(what, where=str(place), fix="Then try again: nothing was changed.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_abandoned(folder: Path) -> bool:
    """Returns True if the process that has made a folder by `stage` is no more."""
    try:
        with _hold(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return True
    except OSError:
        return False


@contextmanager
def lock_name(store: Path, name: str, *, wait: bool = True) -> Iterator[bool]:
    """Keeps other processes, and other threads, out of blocks with the same name, such as that of a data set.

    Args:
        wait: False: yields False at once if somebody else is in such a block. It yields True otherwise.

    Raises OSError.
    """
    path = store / LOCKS / name
    # A store of an earlier version has no such folder.
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with ExitStack() as held:
        try:
            held.enter_context(_hold(path, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)))
            is_locked = True
        except BlockingIOError:
            is_locked = False
        yield is_locked


@contextmanager
def _hold(path: Path, operation: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, operation)
        yield
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file. Raises OSError."""
    digest = hashlib.sha256()
    with open_regular(path, buffering=0) as file:
        while piece := file.read(_COPY_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def copy_and_hash(source: Path, target: Path) -> str:
    """Copies a file to the disk (fsync), and returns the SHA-256 of what was copied.

    Raises:
        DataError: the source cannot be read.
        OSError: the target cannot be written.
    """
    digest = hashlib.sha256()
    try:
        read = open_regular(source)
    except OSError as error:
        raise DataError(f"the shard cannot be read ({describe_os_error(error)})", where=str(source)) from error
    with read, target.open("wb") as written:
        while piece := read.read(_COPY_BYTES):
            digest.update(piece)
            written.write(piece)
        written.flush()
        os.fsync(written.fileno())
    return digest.hexdigest()


def is_older(path: Path, age_s: float) -> bool:
    """Returns True if nobody has touched a file or folder for so long."""
    try:
        return time.time() - path.stat().st_mtime >= age_s
    except FileNotFoundError:
        return False
