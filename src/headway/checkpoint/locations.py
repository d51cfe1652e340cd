"""Where checkpoints lie: a folder, or an address that fsspec writes to (remote_checkpoints.py).

A checkpoint is a folder `step-NNNNNNNN`. Until it is whole it is a Draft, which nobody takes for a checkpoint.
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

from headway.checkpoint.manifest import MANIFEST, MANIFEST_BYTES, File, Manifest
from headway.checkpoint.tensors_file import TensorsFile
from headway.core.errors import HeadwayError
from headway.core.files import read_regular, sync_folder, write_and_sync, write_atomically

if TYPE_CHECKING:
    from headway.checkpoint.remote import Url

LATEST = "latest"
LOOKS, LOOK_S = 5, 0.2
"""How often, and how far apart, a rank looks for the folder that rank 0 has just made on a shared file system."""

Check = Callable[[], None]
"""Raises once the save is given up."""


Location: TypeAlias = "Path | Url"
"""One checkpoint, on a disk or at an address: it has a `name`, and `str` names it in a sentence."""


class Draft(ABC):
    """A checkpoint that is being written, by one rank or several."""

    token: str
    """What a rank needs to join it; no two drafts have the same."""

    @abstractmethod
    def put(self, name: str, tensors: TensorsFile, check: Check) -> File:
        """Writes a file of tensors and brings it to the disk. Raises OSError or HeadwayError."""

    @abstractmethod
    def publish(self, manifest: Manifest, confirm: Callable[[], None]) -> Location:
        """Makes a checkpoint of it: files that the manifest does not name go, `latest` moves last.

        Args:
            confirm: called at the last moment before it can be opened; what it raises keeps it from being so.
        """

    @abstractmethod
    def discard(self) -> None:
        """Removes it, as far as that can be done."""


class Place(ABC):
    """The folder or address that holds the checkpoints of a run."""

    shown: str
    """As sentences name it."""

    @abstractmethod
    def paths(self) -> list[Location]:
        """Those that are there, damaged ones too; the newest first."""

    @abstractmethod
    def draft(self, step: int) -> Draft:
        """Begins a new one; what is left of drafts that nobody finished goes."""

    @abstractmethod
    def joined(self, step: int, token: str) -> Draft | None:
        """The draft that another rank has begun; None where it cannot be seen from here."""

    @abstractmethod
    def remove(self, path: Location) -> None:
        """Removes a checkpoint; at no moment it looks like a damaged one."""


def name_of(step: int) -> str:
    """Returns the name of a step's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None where it is no checkpoint's."""
    number = name.removeprefix("step-")
    return int(number) if number != name and number.isdecimal() else None


def newest_first(paths: list[Location]) -> list[Location]:
    """Sorts checkpoints by their steps, the latest first."""
    return sorted(paths, key=lambda path: step_of(path.name) or 0, reverse=True)


def is_passed(name: str, names: Collection[str], manifest: Callable[[str], bytes]) -> bool:
    """Tells whether a later step has a checkpoint with a valid manifest, which `latest` names then.

    Args:
        names: in the place. manifest: reads the one of a name.
    """
    step = step_of(name) or 0
    for other in names:
        if (step_of(other) or 0) > step:
            with suppress(OSError, ValueError, KeyError, TypeError, HeadwayError):
                Manifest.from_json(manifest(other), other)
                return True
    return False


_held: Counter[str] = Counter()
_holding = threading.Lock()


@contextmanager
def held(path: Location) -> Iterator[None]:
    """Keeps a checkpoint from being removed by this process while it is read."""
    with _holding:
        _held[_key(path)] += 1
    try:
        yield
    finally:
        with _holding:
            _held[_key(path)] -= 1


def prune(place: Place, before: list[Location], newest: Location, keep: int) -> None:
    """Removes all but the newest `keep` up to `newest`, and those that are being read.

    Those of later steps stay, whatever they are: a run that is at an earlier step has not come from them, and may be
    the one that is wrong. One that is damaged is passed over by whoever reads, and goes when the run has passed it.

    Args:
        before: what was there when the save began. Whoever sleeps in a save, and wakes when others have gone on, does
            not remove what these have saved since.
    """
    step = step_of(newest.name) or 0
    earlier = [path for path in before if (step_of(path.name) or 0) < step]
    kept = {path.name for path in earlier[: keep - 1]}
    for path in earlier:
        if path.name not in kept:
            with _holding, suppress(FileNotFoundError):
                if not _held[_key(path)]:
                    place.remove(path)


def _key(path: Location) -> str:
    return os.path.abspath(path) if isinstance(path, Path) else str(path)


@final
class LocalPlace(Place):
    """A folder, made at the first save."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder, str(folder)

    def paths(self) -> list[Location]:
        """Lists the checkpoints, the newest first."""
        return newest_first([path for path in self.folder.glob("step-*") if step_of(path.name) is not None])

    def draft(self, step: int) -> Draft:
        """Begins a new checkpoint and removes unfinished ones."""
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        for left in self.folder.glob(f".{LATEST}.*"):
            left.unlink(missing_ok=True)
        draft = _LocalDraft(self.folder, step, secrets.token_hex(8))
        draft.aside.mkdir(parents=True)
        return draft

    def joined(self, step: int, token: str) -> Draft | None:
        """Finds the draft of another rank, or returns None."""
        draft = _LocalDraft(self.folder, step, token)
        for look in range(LOOKS):
            if look:
                time.sleep(LOOK_S)
            if draft.aside.is_dir():
                return draft
        return None

    def remove(self, path: Location) -> None:
        """Removes a checkpoint; readers see all of it or nothing."""
        hidden = self.folder / f".{path.name}.{secrets.token_hex(8)}"
        os.replace(self.folder / path.name, hidden)  # a reader elsewhere sees all of it or nothing
        shutil.rmtree(hidden, ignore_errors=True)


@final
class _LocalDraft(Draft):
    """A folder under a name of its own. A process that slept while others went on cannot write into their drafts."""

    def __init__(self, folder: Path, step: int, token: str) -> None:
        self._folder, self.token = folder, token
        self._final = folder / name_of(step)
        self.aside = folder / f".{self._final.name}.{token}"

    def put(self, name: str, tensors: TensorsFile, check: Check) -> File:
        with (self.aside / name).open("wb") as file:
            sha256 = tensors.write(file)
            file.flush()
            os.fsync(file.fileno())
        return File(name, tensors.length, sha256)

    def publish(self, manifest: Manifest, confirm: Callable[[], None]) -> Location:
        for path in self.aside.iterdir():
            if path.name not in {file.name for file in manifest.files}:
                path.unlink()
        write_and_sync(self.aside / MANIFEST, manifest.to_json())
        sync_folder(self.aside)
        replaced = self.aside.with_name(f"{self.aside.name}.replaced")
        confirm()
        if self._final.exists():
            os.replace(self._final, replaced)
        try:
            os.replace(self.aside, self._final)
        except OSError:  # others have gone on meanwhile, cleared this draft away, and saved the step themselves
            with suppress(OSError):  # theirs stays; else what was there before comes back
                os.replace(replaced, self._final)
            if self._final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            raise
        sync_folder(self._folder)
        if not is_passed(self._final.name, [path.name for path in self._folder.glob("step-*")], self._manifest):
            write_atomically(self._folder / LATEST, self._final.name + "\n")
        shutil.rmtree(replaced, ignore_errors=True)
        return self._final

    def _manifest(self, name: str) -> bytes:
        # Anything may lie there: a named pipe would block the save for ever, a sparse file would fill the memory.
        return read_regular(self._folder / name / MANIFEST, MANIFEST_BYTES)

    def discard(self) -> None:
        shutil.rmtree(self.aside, ignore_errors=True)
