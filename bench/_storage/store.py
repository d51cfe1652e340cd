"""Places that hold objects by name: a folder, or an address. Each can be sent to another process."""

from __future__ import annotations

import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from headway.core.errors import UsageError, suggest_nearest
from headway.storage.addresses import is_url, parse_local_path, redact_url
from headway.storage.remote_folder import RemoteFolder

FOLDER = "headway-storage-bench"
"""Everything that the bench writes lies in a folder of this name below its target."""


class Store(ABC):
    """Objects by name."""

    is_read_only = False
    # Where the objects lie, for messages.
    place: str

    @abstractmethod
    def measure(self, name: str) -> int | None:
        """Bytes of an object; None: there is none."""

    @abstractmethod
    def read(self, name: str, nbytes: int) -> int:
        """Reads a whole object of this size. Returns the bytes that came."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Writes a whole object, until it is safe. Nobody ever reads a part of it."""

    @abstractmethod
    def list_names(self, folder: str) -> list[str]:
        """Names of the objects in a folder; empty if there is none."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes an object, or a folder with all that is in it; empty: everything. It may be absent."""


def open_store(target: str) -> Store:
    """Opens the bench's own folder below a folder that exists, or below an address.

    Raises UsageError if there is no such folder, or it cannot be written.
    """
    if is_url(target):
        address = Address(f"{target.rstrip('/')}/{FOLDER}")
        # Here, before any work: the package that reads such a URL may be missing.
        address.connect()
        return address
    path = parse_local_path(target, "")
    if path.is_file():
        raise UsageError("this is a file, not a folder", where=str(path), fix="Name the folder that is to be measured.")
    if not path.is_dir():
        # A folder made for a mistyped name would lie on another disk than the one that is meant.
        beside = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = suggest_nearest(path.name, beside, only_close=True)
        raise UsageError("there is no such folder", where=str(path), fix=f"{hint} Make it, or name another.".strip())
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError("this folder cannot be written", where=str(path), fix="Name another, or change its rights.")
    return Folder(path / FOLDER)


@final
class Folder(Store):
    """Files of a folder. The page cache forgets what was read or written: the disk is measured, not the memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = str(path)

    def measure(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, name: str, nbytes: int) -> int:
        handle = os.open(self.path / name, os.O_RDONLY)
        try:
            found = 0
            while part := os.read(handle, max(1, nbytes)):
                found += len(part)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            return found
        finally:
            os.close(handle)

    def write(self, name: str, content: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole, as another client may read it at any time.
        partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        partial.rename(path)

    def list_names(self, folder: str) -> list[str]:
        path = self.path / folder
        return sorted(child.name for child in path.iterdir()) if path.is_dir() else []

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            # Another client may remove the same files.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@final
class Address(Store):
    """Objects under a URL, read as Headway reads them. Each process opens its own connections.

    An http server takes no writes.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.place = redact_url(self.url)
        self.is_read_only = self.url.lower().startswith(("http://", "https://"))
        self._folder: RemoteFolder | None = None

    def __getstate__(self) -> dict[str, object]:
        # Connections stay in their process.
        return {**vars(self), "_folder": None}

    def measure(self, name: str) -> int | None:
        try:
            return self.connect().read_version(name).size
        except FileNotFoundError:
            return None

    def read(self, name: str, nbytes: int) -> int:
        return len(self.connect().read(name, 0, nbytes))

    def write(self, name: str, content: bytes) -> None:
        with self._explain_refusal():
            self._open_for_writing().pipe_file(f"{self.url}/{name}", content)

    def list_names(self, folder: str) -> list[str]:
        try:
            found = self._open_for_writing().ls(f"{self.url}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name).rpartition("/")[2] for name in found)

    def remove(self, name: str) -> None:
        with self._explain_refusal(), suppress(FileNotFoundError):
            self._open_for_writing().rm(f"{self.url}/{name}".rstrip("/"), recursive=True)

    def connect(self) -> RemoteFolder:
        """Opens connections for reading. Raises UsageError if nothing installed reads such a URL."""
        if self._folder is None:
            self._folder = RemoteFolder(self.url)
        return self._folder

    @contextmanager
    def _explain_refusal(self) -> Iterator[None]:
        try:
            yield
        # Each of fsspec's file systems has errors of its own.
        except Exception as error:
            what = f"it cannot be written ({type(error).__name__}: {error})"
            raise UsageError(what, where=self.place, fix="Check the address, and your right to write there.") from error

    def _open_for_writing(self) -> Any:
        import fsspec

        # fsspec keeps listings; another client's files must show.
        system = fsspec.core.url_to_fs(self.url)[0]
        system.invalidate_cache()
        return system
