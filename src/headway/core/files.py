"""Files that are there whole or not at all, and files from outside, which may be anything."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from headway.core.errors import UsageError

TEXT_BYTES = 64 << 20
"""Most that is read of a text that people or programs write: a recipe, a list of files, a profile."""

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | bytes | os.PathLike[str], *, buffering: int = -1) -> BinaryIO:
    """Opens a regular file that comes from outside, for reading; never blocks, whatever lies there.

    Raises OSError: it cannot be opened, or it is a folder, a named pipe, a socket or a device.
    """
    # Opening a device may do something (a tape rewinds), so it is looked at before; and after, as it may have changed.
    _expect_regular(os.stat(path), path)
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _expect_regular(os.fstat(number), path)
        return open(number, "rb", buffering=buffering)
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """The bytes of a regular file that comes from outside.

    Args:
        limit: most bytes that it may have; None: as many as memory is free for.

    Raises OSError: see `open_regular`; or it is too large (EFBIG).
    """
    from headway.core.free_memory import read_free_memory_bytes  # here: psutil is not loaded for `headway --help`

    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        most = read_free_memory_bytes() if limit is None else limit
        if size > most:
            why = "more than memory is free for" if limit is None else f"more than the {limit:,} that are read"
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, {why}", os.fspath(path))
        # One byte more than there were: a file that grows, or one of /proc that says 0, is read to its end below.
        data = file.read(size + 1)
        while len(data) > size and (more := file.read(1 << 20)):
            data += more
            if len(data) > most:
                raise OSError(errno.EFBIG, "it grows while it is read", os.fspath(path))
    return data


def read_text(path: str | os.PathLike[str], limit: int = TEXT_BYTES) -> str:
    """The text of a regular file that comes from outside, UTF-8 with or without a mark at its beginning.

    Lines end in a newline, whatever they end in there.

    Raises OSError: see `read_regular`. UnicodeDecodeError.
    """
    return read_regular(path, limit).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def describe_os_error(error: Exception) -> str:
    """Returns why a file or an address cannot be read or written, without its name; it may be empty."""
    return getattr(error, "strerror", None) or str(error)


def expect_inside(folder: Path, name: str) -> None:
    """Raises OSError: a file of a folder from outside is a link to one that lies elsewhere."""
    root = os.path.realpath(folder)
    if os.path.dirname(os.path.realpath(folder / name)) != root:
        raise OSError(errno.EINVAL, "it is a link that leads out of its folder", os.fspath(folder / name))


def is_plain_name(name: object) -> bool:
    """Whether this names a file in a folder and nothing else: no path, no `..`, no control character."""
    return (
        isinstance(name, str)
        and name.isprintable()  # so it has no half of a surrogate pair, and can be encoded
        and "/" not in name
        and name not in ("", ".", "..")
        and len(name.encode()) <= 255
    )


def _expect_regular(found: os.stat_result, path: str | bytes | os.PathLike[str]) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(path))
    kind = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), "nothing known")
    raise OSError(errno.EINVAL, f"it is {kind}, and no file", os.fsdecode(path))


def expect_writable(*files: Path | None) -> None:
    """Raises UsageError: a file that is asked for cannot be written there. It is called before the work, not after."""
    for path in files:
        if path is None:
            continue
        folder = path.resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError("nothing can be written there", where=str(path), fix="Name another place.")


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file aside (text as UTF-8), brings it to the disk, and renames it into place.

    Raises OSError; nothing is left aside then, and what was at `path` stays. Threads, processes and hosts may write the
    same file at once: one of them wins.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_and_sync(aside, data)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_and_sync(path: Path, data: bytes | str) -> None:
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
