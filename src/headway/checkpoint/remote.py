"""Checkpoints at a URL that fsspec writes to: s3://, gs://, memory://, ...

Object stores can neither rename nor sync, but an object appears whole or not at all. So the manifest, written after all
files that it names, completes a checkpoint. A folder without a manifest is a draft, which the next save removes.
"""

from __future__ import annotations

import errno
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import fsspec.core

from headway.checkpoint.locations import (
    LATEST,
    CheckpointDraft,
    CheckpointFolder,
    Location,
    StopCheck,
    format_name,
    has_later_checkpoint,
    parse_step,
    sort_newest_first,
)
from headway.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, FileEntry, Manifest
from headway.checkpoint.tensors_file import TensorsFile
from headway.core.errors import HeadwayError, UsageError
from headway.storage.addresses import redact_url
from headway.storage.remote_folder import RemoteFolder

# The pause doubles with each attempt: 0.5 + 1 + 2 + 4 + 8 s, so an outage of 15 s does no harm.
MAX_ATTEMPTS = 6
FIRST_RETRY_PAUSE_S = 0.5

_DRAFT_PREFIX = ".draft-"


@final
@dataclass(frozen=True)
class CheckpointUrl:
    """URL of a checkpoint; `str` shows it without a password."""

    uri: str

    @property
    def name(self) -> str:
        """Name of the checkpoint: the last part of the URL."""
        return self.uri.rpartition("/")[2]

    def __str__(self) -> str:
        return redact_url(self.uri)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Returns the bytes of one of the checkpoint's files.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: it has more than `max_bytes`.
            DataError: the URL cannot be reached; the checkpoint may be intact.
        """
        return b"".join(self.read_in_chunks(name, max_bytes, max_bytes))

    def read_in_chunks(self, name: str, max_bytes: int, chunk_bytes: int) -> Iterator[bytes]:
        """Reads a file from its begin to its end, `chunk_bytes` at a time. Raises as `read` does."""
        remote = RemoteFolder(self.uri)
        try:
            size = remote.read_version(name).size
            # A damaged or hostile object may have any size, so it is checked before the bytes are fetched.
            if size > max_bytes:
                raise OSError(errno.EFBIG, f"it has {size:,} bytes, and should have at most {max_bytes:,}", name)
            for start in range(0, size, chunk_bytes):
                yield remote.read(name, start, min(chunk_bytes, size - start)).tobytes()
        finally:
            remote.close()


@final
class RemoteCheckpointFolder(CheckpointFolder):
    """A folder of checkpoints at a URL.

    Raises:
        UsageError: no installed package writes to such a URL.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.shown = redact_url(self.uri)
        if uri.partition("://")[0].lower() in ("http", "https"):
            fix = "Name a folder, or an address such as s3://bucket/folder."
            raise UsageError("checkpoints cannot be written over HTTP", where=self.shown, fix=fix)
        # Raises the sentence that names a missing package, before fsspec raises its own.
        RemoteFolder(self.uri).close()
        self._file_system, root = fsspec.core.url_to_fs(self.uri)
        self._root = str(root).rstrip("/")

    def paths(self) -> list[Location]:
        """Returns the checkpoints that have a manifest, the newest first."""
        names = [name for name in self.list_names() if parse_step(name) is not None]
        complete = [name for name in names if MANIFEST in self.list_names(name)]
        return sort_newest_first([CheckpointUrl(f"{self.uri}/{name}") for name in complete])

    def begin_draft(self, step: int) -> CheckpointDraft:
        """Begins a new checkpoint and removes unfinished ones."""
        # Markers of drafts and folders without a manifest are left by processes that were killed.
        for name in self.list_names():
            if name.startswith(_DRAFT_PREFIX):
                self.delete(name)
            elif parse_step(name) is not None and MANIFEST not in self.list_names(name):
                self.delete_folder(name)
        draft = _RemoteDraft(self, step, secrets.token_hex(8))
        self.call("makedirs", self._root, exist_ok=True)
        self.write(f"{_DRAFT_PREFIX}{draft.token}", b"")
        return draft

    def join_draft(self, step: int, token: str) -> CheckpointDraft | None:
        """Opens the draft that rank 0 began; returns None if this rank cannot see it."""
        return _RemoteDraft(self, step, token) if f"{_DRAFT_PREFIX}{token}" in self.list_names() else None

    def remove(self, path: Location) -> None:
        """Removes a checkpoint, its manifest first: without it no reader takes the rest for a checkpoint."""
        self.delete(f"{path.name}/{MANIFEST}")
        self.delete_folder(path.name)

    def list_names(self, folder: str = "") -> list[str]:
        """Returns the names in a folder; an empty list if there is no such folder."""
        # fsspec caches listings, and other processes write here too.
        self._file_system.invalidate_cache()
        try:
            paths = self.call("ls", f"{self._root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def write(self, name: str, data: bytes) -> None:
        """Writes a small object."""
        self.call("pipe_file", f"{self._root}/{name}", data)

    def read_manifest(self, folder: str) -> bytes:
        """Returns the bytes of a checkpoint's manifest, up to its size limit. Raises as `CheckpointUrl.read` does."""
        return CheckpointUrl(f"{self.uri}/{folder}").read(MANIFEST, MAX_MANIFEST_BYTES)

    def upload(self, path: Path, name: str, check: StopCheck) -> None:
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
        for name in self.list_names(folder):
            self.delete(f"{folder}/{name}")
        # Some file systems have folders; in object stores this one is gone with its last object.
        with suppress(Exception):
            self._file_system.rmdir(f"{self._root}/{folder}")

    def call(self, method: str, *args: Any, check: StopCheck = lambda: None, **kwargs: Any) -> Any:
        """Calls a method of the file system, again while the network fails, and returns its result.

        Args:
            check: called before each further attempt.

        Raises:
            FileNotFoundError: there is no such object.
            HeadwayError: there is no permission, or all attempts failed.
        """
        attempt, pause_s = 1, FIRST_RETRY_PAUSE_S
        while True:
            try:
                return getattr(self._file_system, method)(*args, **kwargs)
            except FileNotFoundError:
                raise
            # Each file system raises errors of its own.
            except Exception as error:
                if attempt == MAX_ATTEMPTS or isinstance(error, PermissionError):
                    attempts = f" ({attempt} attempts)" if attempt > 1 else ""
                    what = f"the checkpoints cannot be reached: {str(error) or type(error).__name__}{attempts}"
                    fix = "Check the address, the network and the right to write there."
                    raise HeadwayError(what, where=self.shown, fix=fix) from error
            check()
            time.sleep(pause_s)
            attempt, pause_s = attempt + 1, 2 * pause_s


@final
class _RemoteDraft(CheckpointDraft):
    """Files with the draft's token in their names, so that a process that was suspended cannot overwrite later ones."""

    def __init__(self, folder: RemoteCheckpointFolder, step: int, token: str) -> None:
        self._folder, self.token, self._name = folder, token, format_name(step)

    def put(self, name: str, tensors: TensorsFile, check: StopCheck) -> FileEntry:
        stem, _, suffix = name.rpartition(".")
        name = f"{stem}.{self.token}.{suffix}"
        # A temporary file without a name disappears with the process, even with kill -9.
        with tempfile.TemporaryFile(prefix="headway-") as temporary_file:
            try:
                sha256 = tensors.write(temporary_file)
                temporary_file.flush()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                what = "the disk is full that holds a checkpoint until it is uploaded"
                fix = "Make room there, or set TMPDIR to another folder."
                raise HeadwayError(what, where=tempfile.gettempdir(), fix=fix) from error
            self._folder.make_folder(self._name)
            # `put_file` of fsspec needs a path, which a file without a name has only here.
            self._folder.upload(Path(f"/proc/self/fd/{temporary_file.fileno()}"), f"{self._name}/{name}", check)
        return FileEntry(name, tensors.length, sha256)

    def publish(self, manifest: Manifest, confirm: Callable[[], None]) -> Location:
        # The manifest makes the checkpoint visible, so this is the last moment to stop.
        confirm()
        self._folder.write(f"{self._name}/{MANIFEST}", manifest.to_json())
        # `latest` comes after the manifest: it never names a checkpoint that is not complete.
        if not has_later_checkpoint(self._name, self._folder.list_names(), self._folder.read_manifest):
            self._folder.write(LATEST, f"{self._name}\n".encode())
        self._delete_files({MANIFEST, *(file.name for file in manifest.files)})
        return CheckpointUrl(f"{self._folder.uri}/{self._name}")

    def discard(self) -> None:
        with suppress(HeadwayError, OSError):
            names = self._folder.list_names(self._name)
            if MANIFEST in names and self.token.encode() in self._folder.read_manifest(self._name):
                # The manifest had arrived before the failure: the checkpoint is complete.
                return
            self._delete_files({name for name in names if f".{self.token}." not in name})

    def _delete_files(self, kept: Collection[str]) -> None:
        """Deletes all files of the checkpoint's folder but those `kept`, and the marker of the draft."""
        for name in self._folder.list_names(self._name):
            if name not in kept:
                self._folder.delete(f"{self._name}/{name}")
        self._folder.delete(f"{_DRAFT_PREFIX}{self.token}")
