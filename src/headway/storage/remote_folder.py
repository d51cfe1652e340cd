"""RemoteFolder: files under one address, read by ranges, with retries."""

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
"""Longest silence while connecting, or between two bytes of an answer."""
ATTEMPTS = 8
"""A read fails after so many attempts in a row without a byte: about half a minute with the pauses."""
PAUSE_S = 0.25
"""Pause before the second attempt; doubled for each further one."""
LONGEST_PAUSE_S = 10.0
UNCHECKED_BYTES = 64 << 20
"""For longer reads, the free memory is checked before memory is reserved; the check takes some 0.1 ms."""


@final
class RemoteFolder:
    """Files under `uri`, read by ranges from any number of threads.

    Args:
        uri: of a folder: http://, https://, or any that fsspec knows.
        sizes: bytes that files must have, by name, if known.
        timeout_s, attempts, pause_s: see TIMEOUT_S, ATTEMPTS, PAUSE_S.

    Attributes:
        display_uri: the address for messages, without a password.

    Raises:
        UsageError: no installed package can read such an address.
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
        self.display_uri = redact_address(self.uri)
        self._sizes = dict(sizes or {})
        self._settings = {"timeout_s": timeout_s, "attempts": attempts, "pause_s": pause_s}
        self._attempts, self._pause_s = attempts, pause_s
        # fsspec reads http as well, but a cut would cost the whole range.
        kind = HttpTransport if uri.partition("://")[0].lower() in ("http", "https") else FsspecTransport
        self._transport: Transport = kind(self.uri, timeout_s)
        self._versions: dict[str, FileVersion] = {}
        self._stopped = threading.Event()

    def reopen(self, sizes: Mapping[str, int]) -> RemoteFolder:
        """Returns the same address with connections of its own, for files of these sizes."""
        other = RemoteFolder(self.uri, sizes=sizes, **self._settings)  # type: ignore[arg-type]
        # The copy refuses a file that has changed since the first opening, too.
        other._versions.update(self._versions)
        return other

    def read_version(self, name: str) -> FileVersion:
        """Returns the present version of a file.

        Raises:
            FileNotFoundError: there is no such file.
            DataError: it cannot be reached, or it has changed since it was first read.
        """
        failed = 0
        while isinstance(version := self._transport.read_version(name), str):
            failed += 1
            self._pause(name, failed, version)
        self._check_unchanged(name, version)
        return version

    def read(self, name: str, start: int, length: int) -> NDArray[np.uint8]:
        """Reads bytes [start, start + length) of a file. A read that was cut continues where it was cut.

        Raises:
            DataError: the file is missing, has changed, or `attempts` in a row brought no byte.
            StoppedError: the RemoteFolder was closed meanwhile.
        """
        free = read_free_memory_bytes() if length > UNCHECKED_BYTES else length
        # The length comes from the server or from a column: no memory is reserved on its word.
        if length > free:
            what = f"{length:,} bytes must be read, and {free:,} bytes of memory are free"
            raise DataError(what, where=self._get_path(name), fix="Check the file, or free memory.")
        out = np.empty(length, np.uint8)
        done = failed = 0
        while done < length:
            if self._stopped.is_set():
                raise StoppedError
            try:
                part = self._transport.read(name, start + done, out.data[done:])
                # fsspec does not tell the version with the bytes, so it is asked for once a file.
                if part.version is None and part.count and name not in self._versions:
                    self.read_version(name)
            except FileNotFoundError:
                raise DataError(
                    "there is no such file", where=self._get_path(name), fix="Copy it there again."
                ) from None
            if part.version is not None:
                self._check_unchanged(name, part.version)
            done += part.count
            # Any progress resets the count: a slow network is not a broken one.
            failed = 0 if part.count else failed + 1
            if done < length and part.reason:
                self._pause(name, failed, part.reason, part.pause_s)
        return out

    def stop(self) -> None:
        """Ends the reads of other threads, which raise StoppedError."""
        self._stopped.set()
        self._transport.stop()

    def close(self) -> None:
        """Closes the connections; no other thread may be reading. A later read opens new ones."""
        self._transport.close()

    def _get_path(self, name: str) -> str:
        return f"{self.display_uri}/{name}"

    def _check_unchanged(self, name: str, version: FileVersion) -> None:
        size = self._sizes.get(name, version.size)
        if size != version.size:
            what = f"the file has {version.size:,} bytes and should have {size:,}"
            raise DataError(what, where=self._get_path(name), fix="Copy it there again, or pack again.")
        # Bytes of two versions of a file must never be mixed.
        before = self._versions.setdefault(name, version)
        if before != version:
            then, now = _describe_version(before), _describe_version(version)
            what = f"the file changed while it was in use (before: {then}; now: {now})"
            raise DataError(
                what, where=self._get_path(name), fix="Put changed data at another address, and start again."
            )

    def _pause(self, name: str, failed: int, reason: str, asked_s: float = 0.0) -> None:
        if failed >= self._attempts:
            what = f"the file cannot be read: {reason} ({failed} attempts)"
            raise DataError(what, where=self._get_path(name), fix="Check the network and the server, and start again.")
        # The random factor keeps many clients from returning at the same moment.
        pause_s = max(asked_s, self._pause_s * 2 ** max(0, failed - 1) * random.uniform(0.5, 1.0))
        if self._stopped.wait(min(LONGEST_PAUSE_S, pause_s)):
            raise StoppedError


def _describe_version(version: FileVersion) -> str:
    return f"{version.size:,} bytes" + (f", {version.tag}" if version.tag else "")
