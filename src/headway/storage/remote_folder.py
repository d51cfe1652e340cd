"""Remote: files under one address that are read by ranges, whatever the network does meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.free_memory import read_free_memory_bytes
from headway.storage.addresses import redact_address
from headway.storage.transport import FileVersion, FsspecTransport, HttpTransport, StoppedError, Transport

TIMEOUT_S = 30.0
"""Longest silence: of a connection being made, and of an answer between two of its bytes."""
ATTEMPTS = 8
"""Attempts in a row that bring no byte, after which a read fails: with the pauses, about half a minute."""
PAUSE_S = 0.25
"""Before the second attempt; doubled for each further one."""
LONGEST_PAUSE_S = 10.0
UNCHECKED_BYTES = 64 << 20
"""Above it, what is free is asked for before memory is reserved; asking takes some 0.1 ms."""


@final
class RemoteFolder:
    """Files under `uri`, read by ranges from any number of threads.

    Args:
        uri: of a folder: http://, https://, or any that fsspec knows.
        sizes: bytes that files must have, by name, where that is known.
        timeout_s, attempts, pause_s: see TIMEOUT_S, ATTEMPTS, PAUSE_S.

    Attributes:
        shown: the address as sentences name it, without a password.

    Raises:
        UsageError: nothing installed can read such an address.
    """

    def __init__(
        self,
        uri: str,
        *,
        sizes: Mapping[str, int] | None = None,
        timeout_s: float = TIMEOUT_S,
        attempts: int = ATTEMPTS,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.uri = uri.rstrip("/")
        self.shown = redact_address(self.uri)
        self._sizes = dict(sizes or {})
        self._settings = {"timeout_s": timeout_s, "attempts": attempts, "pause_s": pause_s}
        self._attempts, self._pause_s = attempts, pause_s
        kind = HttpTransport if uri.partition("://")[0].lower() in ("http", "https") else FsspecTransport
        self._transport: Transport = kind(self.uri, timeout_s)
        self._versions: dict[str, FileVersion] = {}
        self._stopped = threading.Event()

    def reopen(self, sizes: Mapping[str, int]) -> RemoteFolder:
        """The same address with connections of its own, for files of these sizes."""
        other = RemoteFolder(self.uri, sizes=sizes, **self._settings)  # type: ignore[arg-type]
        other._versions.update(self._versions)
        return other

    def read_version(self, name: str) -> FileVersion:
        """A file's mark as it is now.

        Raises:
            FileNotFoundError: there is no such file.
            DataError: it cannot be reached, or it has changed since it was first read.
        """
        failed = 0
        while isinstance(found := self._transport.read_version(name), str):
            failed += 1
            self._pause(name, failed, found)
        self._check_unchanged(name, found)
        return found

    def read(self, name: str, start: int, length: int) -> NDArray[np.uint8]:
        """Bytes [start, start + length) of a file. What was cut is taken up again at the byte where it was cut.

        Raises:
            DataError: the file is not there, has changed, or cannot be read after `attempts` in a row without a byte.
            StoppedError: the Remote was closed meanwhile.
        """
        free = read_free_memory_bytes() if length > UNCHECKED_BYTES else length
        if length > free:  # as the server, or a column of it, claims: nothing is reserved on its word
            what = f"{length:,} bytes are to be read, and memory is free for {free:,}"
            raise DataError(what, where=self._get_path(name), fix="Check the file, or free memory.")
        out = np.empty(length, np.uint8)
        done = failed = 0
        while done < length:
            if self._stopped.is_set():
                raise StoppedError
            try:
                part = self._transport.read(name, start + done, out.data[done:])
                if part.mark is None and part.count and name not in self._versions:
                    self.read_version(name)
            except FileNotFoundError:
                raise DataError(
                    "there is no such file", where=self._get_path(name), fix="Copy it there again."
                ) from None
            if part.mark is not None:
                self._check_unchanged(name, part.mark)
            done += part.count
            failed = 0 if part.count else failed + 1
            if done < length and part.reason:
                self._pause(name, failed, part.reason, part.pause_s)
        return out

    def stop(self) -> None:
        """Ends reads that are under way in other threads: they raise StoppedError."""
        self._stopped.set()
        self._transport.stop()

    def close(self) -> None:
        """Closes the connections; no other thread may be reading. A later read opens new ones."""
        self._transport.close()

    def _get_path(self, name: str) -> str:
        return f"{self.shown}/{name}"

    def _check_unchanged(self, name: str, mark: FileVersion) -> None:
        size = self._sizes.get(name, mark.size)
        if size != mark.size:
            what = f"the file has {mark.size:,} bytes and should have {size:,}"
            raise DataError(what, where=self._get_path(name), fix="Copy it there again, or pack again.")
        before = self._versions.setdefault(name, mark)
        if before != mark:
            versions = f"before: {_describe_version(before)}; now: {_describe_version(mark)}"
            what = f"the file changed while it was in use ({versions})"
            raise DataError(
                what, where=self._get_path(name), fix="Put changed data at another address, and start again."
            )

    def _pause(self, name: str, failed: int, reason: str, asked_s: float = 0.0) -> None:
        if failed >= self._attempts:
            what = f"the file cannot be read: {reason} ({failed} attempts)"
            raise DataError(what, where=self._get_path(name), fix="Check the network and the server, and start again.")
        pause_s = max(asked_s, self._pause_s * 2 ** max(0, failed - 1) * random.uniform(0.5, 1.0))
        if self._stopped.wait(min(LONGEST_PAUSE_S, pause_s)):
            raise StoppedError


def _describe_version(mark: FileVersion) -> str:
    return f"{mark.size:,} bytes" + (f", {mark.tag}" if mark.tag else "")
