"""Folders of checkpoints: on a disk here, at a URL that fsspec writes to in `remote.py`.

A checkpoint is a folder `step-NNNNNNNN`. Until it is complete it is a draft, under a name that no reader opens.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, final

from headway.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, FileEntry, Manifest
from headway.checkpoint.tensors_file import TensorsFile
from headway.core.errors import HeadwayError
from headway.core.files import read_regular, sync_folder, write_and_sync, write_atomically

if TYPE_CHECKING:
    from headway.checkpoint.remote import CheckpointUrl

LATEST = "latest"

# On a shared file system a rank sees the folder that rank 0 has just made after up to a second (NFS caches names).
MAX_DRAFT_LOOKS = 5
DRAFT_LOOK_PAUSE_S = 0.2

StopCheck = Callable[[], None]
"""A function that raises once the save has been given up."""


Location: TypeAlias = "Path | CheckpointUrl"
"""One checkpoint on a disk or at a URL. It has a `name`; `str` gives its full name for messages."""


class CheckpointDraft(ABC):
    """A checkpoint that is being written, by one rank or several."""

    token: str
    """Unique name of the draft, by which other ranks join it."""

    @abstractmethod
    def put(self, name: str, tensors: TensorsFile, check: StopCheck) -> FileEntry:
        """Writes and syncs a file of tensors, and returns its entry in the manifest.

        Raises OSError or HeadwayError if it cannot be written.
        """

    @abstractmethod
    def publish(self, manifest: Manifest, confirm: Callable[[], None]) -> Location:
        """Turns the draft into a checkpoint: removes files that the manifest does not name, and moves `latest` last.

        Args:
            confirm: called right before the checkpoint becomes visible; if it raises, it never does.

        Returns:
            the checkpoint.
        """

    @abstractmethod
    def discard(self) -> None:
        """Removes the draft as far as possible, without an error."""


class CheckpointFolder(ABC):
    """The folder or URL that holds the checkpoints of a run."""

    shown: str
    """Name of the folder in messages."""

    @abstractmethod
    def paths(self) -> list[Location]:
        """Returns the checkpoints, damaged ones too, the newest first."""

    @abstractmethod
    def begin_draft(self, step: int) -> CheckpointDraft:
        """Begins a new checkpoint, and removes unfinished drafts."""

    @abstractmethod
    def join_draft(self, step: int, token: str) -> CheckpointDraft | None:
        """Opens the draft that rank 0 began; returns None if this rank cannot see it."""

    @abstractmethod
    def remove(self, path: Location) -> None:
        """Removes a checkpoint in such a way that no reader ever finds half of it."""


def format_name(step: int) -> str:
    """Returns the name of a step's folder."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Returns the step in a folder's name, or None if the name is not a checkpoint's."""
    # A name that does not parse is a draft, or a file of the user, and is left alone.
    number = name.removeprefix("step-")
    return int(number) if number != name and number.isdecimal() else None


def sort_newest_first(paths: list[Location]) -> list[Location]:
    """Returns the checkpoints sorted by their steps, the latest first."""
    return sorted(paths, key=lambda path: parse_step(path.name) or 0, reverse=True)


def has_later_checkpoint(name: str, names: Collection[str], read_manifest: Callable[[str], bytes]) -> bool:
    """Returns True if a later step has a checkpoint with a valid manifest; `latest` then stays with that one.

    Args:
        name: name of a checkpoint.
        names: names in its folder.
        read_manifest: returns the manifest of a checkpoint, by name.
    """
    step = parse_step(name) or 0
    for candidate in names:
        if (parse_step(candidate) or 0) > step:
            # A damaged checkpoint does not count: `latest` has to name one that can be read.
            with suppress(OSError, ValueError, KeyError, TypeError, HeadwayError):
                Manifest.from_json(read_manifest(candidate), candidate)
                return True
    return False


# Checkpoints that threads of this process are reading, each with the number of its readers.
_reader_counts: Counter[str] = Counter()
_readers_lock = threading.Lock()


@contextmanager
def hold(path: Location) -> Iterator[None]:
    """Keeps a checkpoint from being removed by this process while it is read."""
    with _readers_lock:
        _reader_counts[_get_path_key(path)] += 1
    try:
        yield
    finally:
        with _readers_lock:
            _reader_counts[_get_path_key(path)] -= 1


def prune(folder: CheckpointFolder, before: list[Location], newest: Location, keep: int) -> None:
    """Keeps the newest `keep` checkpoints up to `newest`, and those that are being read; removes the older ones.

    Checkpoints of later steps stay: they come from another process, which may be the right one.

    Args:
        before: the checkpoints when the save began, the newest first. A process that slept in a save does not remove
            those that others have saved since.
        newest: the checkpoint that the save has written.
    """
    step = parse_step(newest.name) or 0
    earlier = [path for path in before if (parse_step(path.name) or 0) < step]
    # A damaged checkpoint counts like any other, and goes once the run has passed it.
    for path in earlier[keep - 1 :]:
        # Under the lock, so that no reader begins between the check and the removal.
        with _readers_lock, suppress(FileNotFoundError):
            if not _reader_counts[_get_path_key(path)]:
                folder.remove(path)


def _get_path_key(path: Location) -> str:
    return os.path.abspath(path) if isinstance(path, Path) else str(path)


@final
class LocalCheckpointFolder(CheckpointFolder):
    """A folder on a local or mounted file system, made at the first save."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder, str(folder)

    def paths(self) -> list[Location]:
        """Returns the checkpoints, the newest first."""
        return sort_newest_first([path for path in self.folder.glob("step-*") if parse_step(path.name) is not None])

    def begin_draft(self, step: int) -> CheckpointDraft:
        """Begins a new checkpoint and removes unfinished ones."""
        # Drafts of processes that were killed. At most one run writes here.
        for stale_draft in self.folder.glob(".step-*"):
            shutil.rmtree(stale_draft, ignore_errors=True)
        for stale_file in self.folder.glob(f".{LATEST}.*"):
            stale_file.unlink(missing_ok=True)
        draft = _LocalDraft(self.folder, step, secrets.token_hex(8))
        draft.draft_folder.mkdir(parents=True)
        return draft

    def join_draft(self, step: int, token: str) -> CheckpointDraft | None:
        """Opens the draft that rank 0 began; returns None if this rank cannot see it."""
        draft = _LocalDraft(self.folder, step, token)
        for look in range(MAX_DRAFT_LOOKS):
            if look:
                time.sleep(DRAFT_LOOK_PAUSE_S)
            if draft.draft_folder.is_dir():
                return draft
        return None

    def remove(self, path: Location) -> None:
        """Removes a checkpoint in such a way that no reader ever finds half of it."""
        hidden = self.folder / f".{path.name}.{secrets.token_hex(8)}"
        # Renamed first, since removing takes many calls: a reader on another host sees all of it or nothing.
        os.replace(self.folder / path.name, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


@final
class _LocalDraft(CheckpointDraft):
    """A hidden folder with a unique name, so that a process that was suspended cannot write into a later draft."""

    def __init__(self, folder: Path, step: int, token: str) -> None:
        self._folder, self.token = folder, token
        self._final = folder / format_name(step)
        self.draft_folder = folder / f".{self._final.name}.{token}"

    def put(self, name: str, tensors: TensorsFile, check: StopCheck) -> FileEntry:
        with (self.draft_folder / name).open("wb") as file:
            sha256 = tensors.write(file)
            file.flush()
            os.fsync(file.fileno())
        return FileEntry(name, tensors.length, sha256)

    def publish(self, manifest: Manifest, confirm: Callable[[], None]) -> Location:
        file_names = {file.name for file in manifest.files}
        for path in self.draft_folder.iterdir():
            if path.name not in file_names:
                path.unlink()
        # All bytes reach the disk before the rename that makes them a checkpoint.
        write_and_sync(self.draft_folder / MANIFEST, manifest.to_json())
        sync_folder(self.draft_folder)
        # A run that was resumed further back saves this step again: the old checkpoint moves aside.
        replaced = self.draft_folder.with_name(f"{self.draft_folder.name}.replaced")
        # The last moment to stop: after the rename every reader sees the checkpoint.
        confirm()
        if self._final.exists():
            os.replace(self._final, replaced)
        try:
            os.replace(self.draft_folder, self._final)
        except OSError:
            # This process was suspended, and others have removed its draft and saved the step themselves. Theirs stays;
            # if there is none, the checkpoint that was there before comes back.
            with suppress(OSError):
                os.replace(replaced, self._final)
            if self._final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            raise
        sync_folder(self._folder)
        # `latest` only moves forward: a process that was suspended must not point it at its older step.
        names = [path.name for path in self._folder.glob("step-*")]
        if not has_later_checkpoint(self._final.name, names, self._read_manifest):
            write_atomically(self._folder / LATEST, self._final.name + "\n")
        shutil.rmtree(replaced, ignore_errors=True)
        return self._final

    def _read_manifest(self, name: str) -> bytes:
        # The file is untrusted: a named pipe would block the save for ever, a sparse file would fill the memory.
        return read_regular(self._folder / name / MANIFEST, MAX_MANIFEST_BYTES)

    def discard(self) -> None:
        shutil.rmtree(self.draft_folder, ignore_errors=True)
