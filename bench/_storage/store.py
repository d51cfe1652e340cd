"""Places that hold objects by name: a folder, or an address. Each can be sent to another process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import final

from headway.storage.remote_folder import RemoteFolder


class Store(ABC):
    """Objects by name."""

    is_read_only = False

    @abstractmethod
    def measure(self, name: str) -> int | None:
        """Bytes of an object; None: there is none."""

    @abstractmethod
    def read(self, name: str, nbytes: int) -> int:
        """Reads a whole object of this size. Returns the bytes that came."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Writes a whole object, until it is safe."""


@final
class Folder(Store):
    """Files of a folder. The page cache forgets what was read or written: the disk is measured, not the memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@final
class Address(Store):
    """Objects under a URL, read as Headway reads them. Each process opens its own connections.

    An http server takes no writes.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.is_read_only = self.url.lower().startswith(("http://", "https://"))
        self._folder: RemoteFolder | None = None

    def __getstate__(self) -> dict[str, object]:
        # Connections stay in their process.
        return {**vars(self), "_folder": None}

    def measure(self, name: str) -> int | None:
        try:
            return self._open().read_version(name).size
        except FileNotFoundError:
            return None

    def read(self, name: str, nbytes: int) -> int:
        return len(self._open().read(name, 0, nbytes))

    def write(self, name: str, content: bytes) -> None:
        import fsspec

        fsspec.core.url_to_fs(self.url)[0].pipe_file(f"{self.url}/{name}", content)

    def _open(self) -> RemoteFolder:
        if self._folder is None:
            self._folder = RemoteFolder(self.url)
        return self._folder
