"""Checkpoints at an address that fsspec writes to: s3://, gs://, memory://, ...

Such stores know no renaming and no syncing, but an object is there whole or not at all. So the manifest, which comes
after everything it names, makes the checkpoint; a folder without one is a Draft, and is removed by the next.
"""

from __future__ import annotations

import errno
import secrets
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import fsspec.core

from headway.checkpoint.locations import (
    LATEST,
    Check,
    Draft,
    Location,
    Place,
    is_passed,
    name_of,
    newest_first,
    step_of,
)
from headway.checkpoint.manifest import MANIFEST, MANIFEST_BYTES, File, Manifest
from headway.checkpoint.tensors_file import TensorsFile
from headway.core.errors import HeadwayError, UsageError
from headway.data.tiers.remote import Remote
from headway.data.tiers.transport import shown

ATTEMPTS = 6
PAUSE_S = 0.5
"""Before the second attempt; doubled for each further one, so that an outage of 15 s does no harm."""

_DRAFT = ".draft-"


@final
@dataclass(frozen=True)
class Url:
    """Address of a checkpoint; `str` shows it without a password."""

    uri: str

    @property
    def name(self) -> str:
        """Name of the checkpoint: the last part of the address."""
        return self.uri.rpartition("/")[2]

    def __str__(self) -> str:
        return shown(self.uri)

    def read(self, name: str, limit: int) -> bytes:
        """Bytes of one of its files.

        Raises:
            FileNotFoundError: there is none.
            OSError: it has more than `limit` bytes.
            DataError: it cannot be reached, which says nothing about the checkpoint.
        """
        remote = Remote(self.uri)
        try:
            size = remote.mark(name).size
            if size > limit:
                raise OSError(errno.EFBIG, f"it has {size:,} bytes, and should have at most {limit:,}", name)
            return remote.read(name, 0, size).tobytes()
        finally:
            remote.close()


@final
class RemotePlace(Place):
    """A folder at an address.

    Raises:
        UsageError: nothing installed writes to such an address.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.shown = shown(self.uri)
        if uri.partition("://")[0].lower() in ("http", "https"):
            fix = "Name a folder, or an address such as s3://bucket/folder."
            raise UsageError("checkpoints cannot be written over HTTP", where=self.shown, fix=fix)
        Remote(self.uri).close()  # says which package is missing
        self._files, root = fsspec.core.url_to_fs(self.uri)
        self._root = str(root).rstrip("/")

    def paths(self) -> list[Location]:
        """Lists the checkpoints that have a manifest, the newest first."""
        whole = [name for name in self.names() if step_of(name) is not None and MANIFEST in self.names(name)]
        return newest_first([Url(f"{self.uri}/{name}") for name in whole])

    def draft(self, step: int) -> Draft:
        """Begins a new checkpoint and removes unfinished ones."""
        for name in self.names():
            if name.startswith(_DRAFT):
                self.delete(name)
            elif step_of(name) is not None and MANIFEST not in self.names(name):
                self.delete_folder(name)
        draft = _RemoteDraft(self, step, secrets.token_hex(8))
        self.call("makedirs", self._root, exist_ok=True)
        self.write(f"{_DRAFT}{draft.token}", b"")
        return draft

    def joined(self, step: int, token: str) -> Draft | None:
        """Finds the draft of another rank, or returns None."""
        return _RemoteDraft(self, step, token) if f"{_DRAFT}{token}" in self.names() else None

    def remove(self, path: Location) -> None:
        """Removes a checkpoint, its manifest first."""
        self.delete(f"{path.name}/{MANIFEST}")
        self.delete_folder(path.name)

    def names(self, folder: str = "") -> list[str]:
        """Names in a folder; none where there is no such folder."""
        self._files.invalidate_cache()
        try:
            found = self.call("ls", f"{self._root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def write(self, name: str, data: bytes) -> None:
        """Writes a small object."""
        self.call("pipe_file", f"{self._root}/{name}", data)

    def read_manifest(self, folder: str) -> bytes:
        """Reads the manifest of a checkpoint, of bounded size. Raises as `Url.read`."""
        return Url(f"{self.uri}/{folder}").read(MANIFEST, MANIFEST_BYTES)

    def upload(self, path: Path, name: str, check: Check) -> None:
        """Uploads a file; `check` is called before each further attempt."""
        self.call("put_file", str(path), f"{self._root}/{name}", check=check)

    def make_folder(self, name: str) -> None:
        """Makes a folder, where the file system has folders."""
        self.call("makedirs", f"{self._root}/{name}", exist_ok=True)

    def delete(self, name: str) -> None:
        """Deletes an object, if it exists."""
        with suppress(FileNotFoundError):
            self.call("rm_file", f"{self._root}/{name}")

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder and the objects in it."""
        for name in self.names(folder):
            self.delete(f"{folder}/{name}")
        with suppress(Exception):  # some file systems have folders; in others this one is gone with its last object
            self._files.rmdir(f"{self._root}/{folder}")

    def call(self, method: str, *arguments: Any, check: Check = lambda: None, **more: Any) -> Any:
        """One call of the file system, repeated while the network fails.

        Raises:
            FileNotFoundError: as the file system does. HeadwayError: it may not be done, or it cannot be.
        """
        attempt, pause_s = 1, PAUSE_S
        while True:
            try:
                return getattr(self._files, method)(*arguments, **more)
            except FileNotFoundError:
                raise
            except Exception as error:  # each file system has errors of its own
                if attempt == ATTEMPTS or isinstance(error, PermissionError):
                    tried = f" ({attempt} attempts)" if attempt > 1 else ""
                    what = f"the checkpoints cannot be reached: {str(error) or type(error).__name__}{tried}"
                    fix = "Check the address, the network and the right to write there."
                    raise HeadwayError(what, where=self.shown, fix=fix) from error
            check()
            time.sleep(pause_s)
            attempt, pause_s = attempt + 1, 2 * pause_s


@final
class _RemoteDraft(Draft):
    """Its files have its token in their names: whoever slept while others went on cannot write over theirs."""

    def __init__(self, place: RemotePlace, step: int, token: str) -> None:
        self._place, self.token, self._folder = place, token, name_of(step)

    def put(self, name: str, tensors: TensorsFile, check: Check) -> File:
        stem, _, ending = name.rpartition(".")
        name = f"{stem}.{self.token}.{ending}"
        with tempfile.TemporaryFile(prefix="headway-") as staged:  # without a name, so that no kill leaves it behind
            try:
                sha256 = tensors.write(staged)
                staged.flush()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                what = "the disk is full, where a checkpoint lies until it is uploaded"
                fix = "Make room there, or set TMPDIR to another folder."
                raise HeadwayError(what, where=tempfile.gettempdir(), fix=fix) from error
            self._place.make_folder(self._folder)
            self._place.upload(Path(f"/proc/self/fd/{staged.fileno()}"), f"{self._folder}/{name}", check)
        return File(name, tensors.length, sha256)

    def publish(self, manifest: Manifest, confirm: Callable[[], None]) -> Location:
        confirm()
        self._place.write(f"{self._folder}/{MANIFEST}", manifest.to_json())
        if not is_passed(self._folder, self._place.names(), self._place.read_manifest):
            self._place.write(LATEST, f"{self._folder}\n".encode())
        self._clear({MANIFEST, *(file.name for file in manifest.files)})
        return Url(f"{self._place.uri}/{self._folder}")

    def discard(self) -> None:
        with suppress(HeadwayError, OSError):
            there = self._place.names(self._folder)
            if MANIFEST in there and self.token.encode() in self._place.read_manifest(self._folder):
                return  # the manifest had arrived, whatever failed after it
            self._clear({name for name in there if f".{self.token}." not in name})

    def _clear(self, kept: Collection[str]) -> None:
        for name in self._place.names(self._folder):
            if name not in kept:
                self._place.delete(f"{self._folder}/{name}")
        self._place.delete(f"{_DRAFT}{self.token}")
