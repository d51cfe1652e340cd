"""Writes a folder under a temporary name and renames it: after a crash it exists completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from headway.core.errors import HeadwayError
from headway.core.files import sync_folder
from headway.core.text_format import format_bytes


@contextlib.contextmanager
def stage_folder(dst: Path, *, needed_bytes: int | None, replace: bool) -> Iterator[Path]:
    """Yields a folder beside `dst` that becomes `dst` at the end of the block, or is removed if the block fails.

    Args:
        dst: resolved path; missing or an empty folder, or anything with `replace`.
        needed_bytes: expected size, for the message about a full disk; None if unknown.
        replace: replaces `dst` if it exists; the old folder is removed once the new one is in its place.

    Raises:
        HeadwayError: an OSError occurs in the block: the disk is full, or cannot be written.
    """
    staging = dst.parent / f".{dst.name}.packing-{os.getpid()}"
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        sync_folder(staging)
        # Everything is on the disk before the rename makes it visible.
        move_into_place(staging, dst, replace)
    except OSError as error:
        raise _build_write_error(error, dst, staging, needed_bytes) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def clear_leftovers(dst: Path) -> None:
    """Removes folders that killed processes left beside `dst`, and restores a `dst` that one had moved away.

    Raises HeadwayError if the folder that holds `dst` cannot be read or written.
    """
    pattern = re.compile(re.escape(f".{dst.name}.") + r"(packing|replaced)-(\d{1,9})")
    try:
        for entry in sorted(os.listdir(dst.parent)) if dst.parent.is_dir() else []:
            match = pattern.fullmatch(entry)
            # Our own process number: a process of an earlier container had it, since nothing is staged yet.
            if match is None or (int(match[2]) != os.getpid() and _is_alive(int(match[2]))):
                continue
            if match[1] == "replaced" and not dst.exists():
                os.rename(dst.parent / entry, dst)
            else:
                shutil.rmtree(dst.parent / entry)
    except OSError as error:
        raise HeadwayError(f"the folder cannot be written ({error.strerror})", where=str(dst)) from error


def move_into_place(staging: Path, dst: Path, replace: bool) -> None:
    """Renames the staged folder to `dst`; restores the old `dst` if that fails."""
    replaced = dst.parent / f".{dst.name}.replaced-{os.getpid()}"
    if replace and dst.exists():
        # rename(2) cannot replace a folder that has content, so the old one moves away first.
        os.rename(dst, replaced)
    try:
        os.rename(staging, dst)
    except BaseException:
        if replaced.exists() and not dst.exists():
            os.rename(replaced, dst)
        raise
    # The rename itself is on the disk before the old folder is removed.
    sync_folder(dst.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process belongs to another user, so it is alive.
        return True
    return True


def _build_write_error(error: OSError, dst: Path, staging: Path, needed_bytes: int | None) -> HeadwayError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return HeadwayError(f"the folder cannot be written ({error.strerror})", where=str(dst))
    written_bytes = sum(file.stat().st_size for file in staging.rglob("*") if file.is_file())
    needed = "" if needed_bytes is None else f" of about {format_bytes(needed_bytes)}"
    return HeadwayError(
        f"the disk is full: {format_bytes(written_bytes)}{needed} were written",
        where=str(dst.parent),
        fix="Free space there, or pack to another disk. What was written is removed.",
    )
