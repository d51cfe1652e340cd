"""Atomic writes, and safe reads of files from outside, which may be named pipes, devices or endless."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headway.core.errors import UsageError

# Limit for text files from outside: a recipe, a list of files, a profile.
TEXT_BYTES = 64 << 20

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | bytes | os.PathLike[str], *, buffering: int = -1) -> BinaryIO:
    """Opens a regular file from outside for reading, without ever blocking.

    Raises:
        OSError: the file cannot be opened, or is a folder, a named pipe, a socket or a device.
    """
    # Opening a device may have an effect (a tape rewinds), so the kind is checked before. It is checked again on the
    # descriptor, since the path may have been replaced meanwhile.
    _expect_regular(os.stat(path), path)
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _expect_regular(os.fstat(number), path)
        return open(number, "rb", buffering=buffering)
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Returns the bytes of a regular file from outside.

    Args:
        limit: largest size in bytes; None: the free memory.

    Raises:
        OSError: see `open_regular`; EFBIG if the file is too large.
    """
    # Imported here so that `headway --help` does not import psutil.
    from headway.core.free_memory import read_free_memory_bytes

    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        most = read_free_memory_bytes() if limit is None else limit
        if size > most:
            why = "more than memory is free for" if limit is None else f"more than the {limit:,} that are read"
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, {why}", os.fspath(path))
        # One byte more than the size: a file that grows, or one of /proc with size 0, is read to its end below.
        data = file.read(size + 1)
        while len(data) > size and (more := file.read(1 << 20)):
            data += more
            if len(data) > most:
                raise OSError(errno.EFBIG, "it grows while it is read", os.fspath(path))
    return data


def read_text(path: str | os.PathLike[str], limit: int = TEXT_BYTES) -> str:
    """Returns the text of a UTF-8 file from outside, without a byte order mark and with `\\n` as its line end.

    Raises:
        OSError: see `read_regular`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_regular(path, limit).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def describe_os_error(error: Exception) -> str:
    """Returns the reason of a failed read or write without the file's name; it may be empty."""
    return getattr(error, "strerror", None) or str(error)


def expect_inside(folder: Path, name: str) -> None:
    """Raises OSError if a file of a folder from outside is a link out of that folder."""
    root = os.path.realpath(folder)
    if os.path.dirname(os.path.realpath(folder / name)) != root:
        raise OSError(errno.EINVAL, "it is a link that leads out of its folder", os.fspath(folder / name))


def is_plain_name(name: object) -> bool:
    """Returns True if this is the name of a file: no path, no `..`, no control character."""
    return (
        isinstance(name, str)
        # Printable text has no unpaired surrogate, so `encode` below succeeds.
        and name.isprintable()
        and "/" not in name
        and name not in ("", ".", "..")
        and len(name.encode()) <= 255
    )


def _expect_regular(status: os.stat_result, path: str | bytes | os.PathLike[str]) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(path))
    kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "nothing known")
    raise OSError(errno.EINVAL, f"it is {kind}, and no file", os.fsdecode(path))


def expect_writable(*files: Path | None) -> None:
    """Raises UsageError if a requested output file cannot be written. Call it before the work, not after."""
    for path in files:
        if path is None:
            continue
        folder = path.resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError("nothing can be written there", where=str(path), fix="Name another place.")


def expect_empty_folder(folder: Path, option: str, unfinished: tuple[str, ...] = ()) -> None:
    """Checks a folder to create: it does not exist, or holds no file. Call it before the work, not after.

    Args:
        option: the option or argument that names the folder, for the message.
        unfinished: names of files that do not count. Their process was killed before the folder was complete, and may
            have left them, or their temporary files.

    Raises:
        UsageError: it is a file, or holds other files.
    """
    fix = f"Name another one with {option}"
    if folder.exists() and not folder.is_dir():
        raise UsageError("this is a file, not a folder", where=str(folder), fix=fix)
    # Those of `write_atomically` begin with a dot.
    names = (*unfinished, *(f".{name}." for name in unfinished))
    for path in folder.rglob("*"):
        # Never write beside files of other programs, nor beside a half-deleted run.
        if not path.is_dir() and not (path.parent == folder and path.name.startswith(names)):
            raise UsageError("this folder is not empty", where=str(folder), fix=fix)


def write_atomically(path: Path, data: bytes | str, *, mode: int | None = None) -> None:
    """Writes a temporary file (text as UTF-8), syncs it to disk, and renames it to `path`.

    Several threads, processes or hosts may write the same file at once: one of them wins.

    Args:
        mode: permissions of the file, such as 0o600; None: those of every new file.

    Raises:
        OSError: writing failed. The previous file stays, and the temporary file is removed.
    """
    with open_atomically(path, mode=mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def open_atomically(path: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing. At the end of the block it is synced to disk, and renamed to `path`.

    If the block fails, the previous file stays, and the temporary file is removed. `mode` and errors are those of
    `write_atomically`.
    """
    # In the same folder, because a rename is atomic only within a file system. The random ending keeps several writers
    # apart.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        if mode is not None:
            # Before the content: nobody else reads it in between.
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        # After Ctrl-C too.
        aside.unlink(missing_ok=True)
        raise


def write_and_sync(path: Path, data: bytes | str) -> None:
    """Writes a file and syncs it to disk."""
    with path.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk, so that a renamed file survives a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
