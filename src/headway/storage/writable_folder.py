"""WritableFolder: writes, lists and deletes files under one URL through fsspec, with retries."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import sync_folder
from headway.storage.addresses import redact_url
from headway.storage.remote_folder import RemoteFolder

# The pause doubles with each attempt: 0.5 + 1 + 2 + 4 + 8 s, so an outage of 15 s does no harm.
MAX_ATTEMPTS = 6
FIRST_RETRY_PAUSE_S = 0.5

Check = Callable[[], None]


@final
class WritableFolder:
    """Files under `uri`; names have slashes in them. Object stores need no folders, and ignore `make_folder`.

    Args:
        uri: URL that fsspec writes to: s3://, gs://, memory://, ...
        content: plural noun of what is kept there, for messages, such as `checkpoints`.

    Attributes:
        display_uri: the URL for messages, without a password.

    Raises:
        UsageError: no installed package writes to such a URL.
    """

    def __init__(self, uri: str, content: str) -> None:
        self.uri = uri.rstrip("/")
        self.display_uri = redact_url(self.uri)
        self._content = content
        if uri.partition("://")[0].lower() in ("http", "https"):
            fix = "Name a folder, or an address such as s3://bucket/folder."
            raise UsageError(f"{content} cannot be written over HTTP", where=self.display_uri, fix=fix)
        # Raises the sentence that names a missing package, before fsspec raises its own.
        RemoteFolder(self.uri).close()
        # Imported here, since most programs write no remote files.
        import fsspec.core
        from fsspec.implementations.local import LocalFileSystem

        self._file_system, root = fsspec.core.url_to_fs(self.uri)
        self._root = str(root).rstrip("/")
        self._is_local = isinstance(self._file_system, LocalFileSystem)

    def list_names(self, folder: str = "") -> list[str]:
        """Returns the names in a folder; an empty list if there is no such folder."""
        # fsspec caches listings, and other processes write here too.
        self._file_system.invalidate_cache()
        try:
            paths = self._call("ls", f"{self._root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, name: str, most_bytes: int) -> bytes:
        """Returns the first bytes of a file. Raises FileNotFoundError if there is none."""
        return bytes(self._call("cat_file", f"{self._root}/{name}", start=0, end=most_bytes))

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file; it is on the disk then."""
        self._call("pipe_file", f"{self._root}/{name}", data)
        self._sync(name)

    def upload(self, path: Path, name: str, check: Check = lambda: None) -> None:
        """Uploads a file, which is on the disk then; `check` is called before each further attempt."""
        self._call("put_file", str(path), f"{self._root}/{name}", check=check)
        self._sync(name)

    def make_folder(self, name: str = "") -> None:
        """Makes a folder, where the file system has folders."""
        self._call("makedirs", f"{self._root}/{name}".rstrip("/"), exist_ok=True)

    def delete(self, name: str) -> None:
        """Deletes a file, if it exists."""
        with suppress(FileNotFoundError):
            self._call("rm_file", f"{self._root}/{name}")

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder and the files in it."""
        for name in self.list_names(folder):
            self.delete(f"{folder}/{name}")
        # Some file systems have folders; in object stores this one is gone with its last object.
        with suppress(Exception):
            self._file_system.rmdir(f"{self._root}/{folder}")

    def _sync(self, name: str) -> None:
        """Syncs a file, and the folders up to `uri`, to disk. Raises HeadwayError."""
        # An object store answers when an object is safe. fsspec leaves a local file in the memory of the system.
        if not self._is_local:
            return
        path, root = Path(self._root, name), Path(self._root)
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            while path != root:
                path = path.parent
                sync_folder(path)
        except OSError as error:
            raise self._build_error(error, 1) from error

    def _call(self, method: str, *args: Any, check: Check = lambda: None, **kwargs: Any) -> Any:
        """Calls a method of the file system, again while the network fails, and returns its result.

        Args:
            check: called before each further attempt.

        Raises:
            FileNotFoundError: there is no such file.
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
                    raise self._build_error(error, attempt) from error
            check()
            time.sleep(pause_s)
            attempt, pause_s = attempt + 1, 2 * pause_s

    def _build_error(self, error: Exception, attempt: int) -> HeadwayError:
        attempts = f" ({attempt} attempts)" if attempt > 1 else ""
        what = f"the {self._content} cannot be reached: {str(error) or type(error).__name__}{attempts}"
        fix = "Check the address, the network and the right to write there."
        return HeadwayError(what, where=self.display_uri, fix=fix)
