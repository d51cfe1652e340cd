"""Unpacks gzip files into the cache folder: compressed files cannot be read at an offset."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import zlib
from pathlib import Path

from headway.core.errors import DataError, HeadwayError
from headway.core.files import open_regular
from headway.storage.addresses import get_cache_folder

GZIP_MAGIC = b"\x1f\x8b"
"""First bytes of a gzip file."""


def unpack_gzip(path: Path) -> Path:
    """Unpacks a gzip file into the cache folder, if it is not there yet, and returns the unpacked file.

    Unpacked files of older versions of the same file are removed.

    Raises DataError if it is damaged, and HeadwayError if the cache folder cannot be written.
    """
    path = path.absolute()
    status = path.stat()
    folder = get_cache_folder() / "unpacked" / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    # Size and modification time identify the version, so a file that changed is unpacked again.
    target = (
        folder / f"{status.st_size:x}-{status.st_mtime_ns:x}" / path.name.removesuffix(".gz").replace(".tgz", ".tar")
    )
    if target.is_file():
        return target
    # In the same folder, so that the rename is atomic.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if folder.is_dir():
            for older in folder.iterdir():
                if older != target.parent:
                    shutil.rmtree(older, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open_regular(path) as raw, gzip.open(raw, "rb") as packed, temporary.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            # Two processes may unpack at once; the later rename replaces equal content.
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError("the compressed file is damaged or cut", where=str(path), fix="Copy it again.") from error
    except OSError as error:
        what = f"{path.name} cannot be unpacked ({error.strerror})"
        raise HeadwayError(what, where=str(folder), fix="Make room there, or set HEADWAY_CACHE.") from error
    return target
