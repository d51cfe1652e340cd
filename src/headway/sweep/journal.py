"""The journal of a sweep: `decisions.jsonl` in its folder, one record a line, each with a checksum and synced to disk.

One process at a time writes it. A line that a crash left incomplete is removed on open; it can only be the last one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error, read_regular, sync_folder
from headway.core.mounts import find_mount
from headway.core.system_errors import FIXES, FULL
from headway.core.untrusted_json import JsonError, parse_object
from headway.sweep.budget import Plan
from headway.sweep.records import Planned, Record, UnknownRecordError, decode_record, encode_record
from headway.sweep.state import RecordError, State, fold
from headway.sweep.sweep_folder import describe_sweep_resume

LOG = logging.getLogger("headway.sweep")

NAME = "decisions.jsonl"

# The checksum is a JSON entry as well, so that other programs can read the lines. It is that of the object without it.
_LINE = re.compile(rb'(\{"kind": .*), "crc32": "([0-9a-f]{8})"\}')


@final
class Journal:
    """A sweep's journal, open for writing. Use `open_journal`.

    Attributes:
        path: the file.
        state: the state after its last record.
        guard: called before records are written; it raises if another process runs the sweep by now.
    """

    def __init__(self, path: Path, handle: int, size: int, state: State) -> None:
        self.path, self.state = path, state
        self._handle, self._size = handle, size
        self.guard: Callable[[], None] = lambda: None

    def append(self, *records: Record) -> None:
        """Writes records one by one. Each is on disk before the next, and before `state` has it.

        Raises:
            RecordError: a record does not fit those before it; nothing of it is written.
            HeadwayError: the disk is full or fails. The records before it are kept, and you may append again.
        """
        self.guard()
        for record in records:
            state = fold(self.state, [record])
            self._size = _write(self.path, self._handle, self._size, record)
            self.state = state


@contextmanager
def open_journal(folder: Path, plan: Plan, *, is_shared: bool = False) -> Iterator[Journal]:
    """Opens the journal of a sweep, or begins it with its plan, and locks it for the duration of the block.

    The kernel releases the lock of a killed process. A forked child shares it, a started program does not.

    Args:
        is_shared: the folder may lie on a network file system: `expect_no_coordinator` and `guard` help its locks.

    Raises:
        UsageError: another process runs this sweep, the journal is of another plan, or the folder does not exist or
            lies on a file system whose locks do not hold.
        HeadwayError: the journal is damaged, or cannot be read or written.
    """
    path = folder / NAME
    with _lock(folder, is_shared):
        with _explain(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            with _explain(path):
                content = read_regular(path)
                state, size = _parse(path, content)
                if size < len(content):
                    LOG.info("%s: removed its last line, which a crash has left incomplete.", path)
                    os.ftruncate(handle, size)
                    os.fsync(handle)
            if state is None:
                size = _write(path, handle, 0, Planned(plan))
                with _explain(path):
                    sync_folder(folder)
            elif state.plan != plan:
                what = f"the sweep was begun with another {_find_difference(state.plan, plan)}"
                raise UsageError(what, where=str(folder), fix="Set it back in sweep.yaml, or begin a new sweep")
            yield Journal(path, handle, size, state or State(plan))
        finally:
            os.close(handle)


def read_journal(folder: Path) -> State:
    """Returns the state of a sweep, also while another process runs it.

    Raises:
        UsageError: the folder has no journal.
        HeadwayError: it is damaged, or cannot be read.
    """
    return read_history(folder)[0]


def read_history(folder: Path) -> tuple[State, list[Record]]:
    """Returns the state of a sweep and its records in their order; see `read_journal`."""
    path = folder / NAME
    if not path.exists():
        raise UsageError(f"this is not the folder of a sweep (it has no {NAME})", where=str(folder))
    records = list[Record]()
    with _explain(path):
        state, _ = _parse(path, read_regular(path), records)
    if state is None:
        raise UsageError("this sweep was stopped before its first decision", where=str(folder), fix="Start it again")
    return state, records


@contextmanager
def _lock(folder: Path, is_shared: bool) -> Iterator[None]:
    if not folder.is_dir():
        raise UsageError("there is no such folder of a sweep", where=str(folder))
    fix = "Name a folder on a disk of this machine, or add --joinable to a new sweep, which then needs no locks"
    # Some of these accept a lock and do not enforce it between machines, so the call alone shows nothing.
    if not is_shared and (mount := find_mount(folder)) is not None and mount.is_network:
        what = f"the journal of a sweep needs locks, and those of a network file system ({mount.kind}) may not hold"
        raise UsageError(what, where=str(folder), fix=fix)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what, fix = "another process runs this sweep", "Wait for it, or stop it"
            raise UsageError(what, where=str(folder), fix=fix) from None
        except OSError as error:
            if is_shared:
                yield
                return
            what = f"the journal of a sweep needs locks, which this file system refuses ({describe_os_error(error)})"
            raise UsageError(what, where=str(folder), fix=fix) from None
        yield
    finally:
        os.close(handle)


@contextmanager
def _explain(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        resume = f"Then go on: {describe_sweep_resume(path.parent)}"
        if error.errno in FULL:
            what, fix = "the disk is full", f"Nothing before it is lost: make room. {resume}"
        else:
            what = f"the journal cannot be read or written ({describe_os_error(error)})"
            fix = f"{FIXES.get(error.errno or 0, 'Mend it.')} {resume}"
        raise HeadwayError(what, where=str(path), fix=fix) from error


def _write(path: Path, handle: int, size: int, record: Record) -> int:
    """Writes a line at offset `size` and returns the new size; if that fails, the file is as before."""
    line = _encode(record)
    with _explain(path):
        try:
            # What an earlier failure left behind, if removing it failed too, would be damage in the middle.
            if os.fstat(handle).st_size != size:
                os.ftruncate(handle, size)
            written = 0
            while written < len(line):
                count = os.pwrite(handle, line[written:], size + written)
                if count == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                written += count
            os.fsync(handle)
        except BaseException:
            # After Ctrl-C too: the state does not have this record.
            os.ftruncate(handle, size)
            raise
    return size + len(line)


def _encode(record: Record) -> bytes:
    text = json.dumps(encode_record(record), allow_nan=False)
    return f'{text[:-1]}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def _parse(path: Path, content: bytes, records: list[Record] | None = None) -> tuple[State | None, int]:
    """Returns the state and the size of all whole lines; None and 0 if there is none. Adds them to `records`."""
    state, size = None, 0
    *lines, _ = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            text = _check(line)
        except JsonError as error:
            # Blocks of a line may reach the disk in any order, so the last one can be torn in its middle too.
            if size + len(line) + 1 == len(content):
                break
            raise _build_damage(path, number, str(error)) from None
        # A line whose checksum is right was written whole, so it is never removed.
        try:
            record = decode_record(parse_object(text))
            if state is not None:
                state = fold(state, [record])
            elif isinstance(record, Planned):
                state = State(record.plan)
            else:
                raise RecordError("the sweep was not planned before")
        except UnknownRecordError as error:
            fix = "Use the version of Headway that began this sweep, or a newer one"
            raise HeadwayError(f"line {number} cannot be read: {error}", where=str(path), fix=fix) from None
        except (JsonError, RecordError) as error:
            raise _build_damage(path, number, str(error)) from None
        size += len(line) + 1
        if records is not None:
            records.append(record)
    return state, size


def _check(line: bytes) -> bytes:
    """Returns the JSON text of a line without its checksum. Raises JsonError if it is not the one that was written."""
    found = _LINE.fullmatch(line)
    if found is None:
        raise JsonError("it is no record with a checksum")
    text = found[1] + b"}"
    if int(found[2], 16) != zlib.crc32(text):
        raise JsonError("its checksum is wrong")
    return text


def _build_damage(path: Path, number: int, why: str) -> HeadwayError:
    quoted, kept = shlex.quote(str(path)), shlex.quote(f"{path}.kept")
    fix = "Copy the file from a backup, or begin a new sweep"
    if number > 1:
        cut = f"head -n {number - 1} {quoted} > {kept} && mv {kept} {quoted}"
        fix = f"Copy the file from a backup, or remove this line and all after it, which are then decided again: {cut}"
    return HeadwayError(f"line {number} is damaged: {why}", where=str(path), fix=fix)


def _find_difference(old: Plan, new: Plan) -> str:
    names = ("method", "budget", "eta", "higher_is_better", "seed", "brackets")
    name = next(name for name in names if getattr(old, name) != getattr(new, name))
    words = {"higher_is_better": "direction of the score", "brackets": "choice of trials and rungs"}
    return f"{words.get(name, name)} ({getattr(old, name)})" if name not in words else words[name]
