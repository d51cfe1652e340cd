"""Checkpoints at a URL that fsspec writes to: s3://, gs://, memory://, ...

Object stores can neither rename nor sync, but an object appears whole or not at all. So the manifest, written after all
files that it names, completes a checkpoint. A folder without a manifest is a draft, which the next save removes.
"""

from __future__ import annotations

import errno
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

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
from headway.core.errors import HeadwayError
from headway.storage.addresses import redact_url
from headway.storage.remote_folder import RemoteFolder
from headway.storage.writable_folder import WritableFolder

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
        self.files = WritableFolder(uri, "checkpoints")
        self.uri, self.shown = self.files.uri, self.files.display_uri

    def paths(self) -> list[Location]:
        """Returns the checkpoints that have a manifest, the newest first."""
        names = [name for name in self.files.list_names() if parse_step(name) is not None]
        complete = [name for name in names if MANIFEST in self.files.list_names(name)]
        return sort_newest_first([CheckpointUrl(f"{self.uri}/{name}") for name in complete])

    def begin_draft(self, step: int) -> CheckpointDraft:
        """Begins a new checkpoint and removes unfinished ones."""
        # Markers of drafts and folders without a manifest are left by processes that were killed.
        for name in self.files.list_names():
            if name.startswith(_DRAFT_PREFIX):
                self.files.delete(name)
            elif parse_step(name) is not None and MANIFEST not in self.files.list_names(name):
                self.files.delete_folder(name)
        draft = _RemoteDraft(self, step, secrets.token_hex(8))
        self.files.make_folder()
        self.files.write(f"{_DRAFT_PREFIX}{draft.token}", b"")
        return draft

    def join_draft(self, step: int, token: str) -> CheckpointDraft | None:
        """Opens the draft that rank 0 began; returns None if this rank cannot see it."""
        return _RemoteDraft(self, step, token) if f"{_DRAFT_PREFIX}{token}" in self.files.list_names() else None

    def remove(self, path: Location) -> None:
        """Removes a checkpoint, its manifest first: without it no reader takes the rest for a checkpoint."""
        self.files.delete(f"{path.name}/{MANIFEST}")
        self.files.delete_folder(path.name)

    def read_manifest(self, folder: str) -> bytes:
        """Returns the bytes of a checkpoint's manifest, up to its size limit. Raises as `CheckpointUrl.read` does."""
        return CheckpointUrl(f"{self.uri}/{folder}").read(MANIFEST, MAX_MANIFEST_BYTES)


@final
class _RemoteDraft(CheckpointDraft):
    """Files with the draft's token in their names, so that a process that was suspended cannot overwrite later ones."""

    def __init__(self, folder: RemoteCheckpointFolder, step: int, token: str) -> None:
        self._folder, self._files = folder, folder.files
        self.token, self._name = token, format_name(step)

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
            self._files.make_folder(self._name)
            # `put_file` of fsspec needs a path, which a file without a name has only here.
            self._files.upload(Path(f"/proc/self/fd/{temporary_file.fileno()}"), f"{self._name}/{name}", check)
        return FileEntry(name, tensors.length, sha256)

    def publish(self, manifest: Manifest, confirm: Callable[[], None]) -> Location:
        # The manifest makes the checkpoint visible, so this is the last moment to stop.
        confirm()
        self._files.write(f"{self._name}/{MANIFEST}", manifest.to_json())
        # `latest` comes after the manifest: it never names a checkpoint that is not complete.
        if not has_later_checkpoint(self._name, self._files.list_names(), self._folder.read_manifest):
            self._files.write(LATEST, f"{self._name}\n".encode())
        self._delete_files({MANIFEST, *(file.name for file in manifest.files)})
        return CheckpointUrl(f"{self._folder.uri}/{self._name}")

    def discard(self) -> None:
        with suppress(HeadwayError, OSError):
            names = self._files.list_names(self._name)
            if MANIFEST in names and self.token.encode() in self._folder.read_manifest(self._name):
                # The manifest had arrived before the failure: the checkpoint is complete.
                return
            self._delete_files({name for name in names if f".{self.token}." not in name})

    def _delete_files(self, kept: Collection[str]) -> None:
        """Deletes all files of the checkpoint's folder but those `kept`, and the marker of the draft."""
        for name in self._files.list_names(self._name):
            if name not in kept:
                self._files.delete(f"{self._name}/{name}")
        self._files.delete(f"{_DRAFT_PREFIX}{self.token}")
