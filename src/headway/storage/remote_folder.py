"""RemoteFolder: files under one URL, read by ranges, with retries."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.free_memory import read_free_memory_bytes
from headway.storage.addresses import expect_escaped, redact_url
from headway.storage.transport import FileVersion, FsspecTransport, HttpTransport, StoppedError, Transport

DEFAULT_TIMEOUT_S = 30.0
"""Longest wait for a connection, or between two bytes of a response."""
MAX_ATTEMPTS = 8
"""Attempts in a row without a byte after which a read fails: about half a minute with the pauses."""
FIRST_PAUSE_S = 0.25
"""Pause before the second attempt; doubled for each further one."""
MAX_PAUSE_S = 10.0
"""Longest pause between two attempts."""
MAX_UNCHECKED_BYTES = 64 << 20
"""For longer reads, the free memory is checked before memory is allocated; the check takes about 0.1 ms."""


@final
class RemoteFolder:
    """Files under `uri`, read by ranges from any number of threads.

    Args:
        uri: URL of the folder: http://, https://, or any that fsspec supports.
        sizes: expected size in bytes of files, by name; others are not checked.
        timeout_s, attempts, pause_s: see DEFAULT_TIMEOUT_S, MAX_ATTEMPTS, FIRST_PAUSE_S.

    Attributes:
        display_uri: the URL for messages, without a password.

    Raises:
        UsageError: no installed package can read such a URL, or its password is not escaped.
    """

    def __init__(
        self,
        uri: str,
        *,
        sizes: Mapping[str, int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        attempts: int = MAX_ATTEMPTS,
        pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        expect_escaped(uri)
        self.uri = uri.rstrip("/")
        self.display_uri = redact_url(self.uri)
        self._sizes = dict(sizes or {})
        self._settings = {"timeout_s": timeout_s, "attempts": attempts, "pause_s": pause_s}
        self._attempts, self._pause_s = attempts, pause_s
        # fsspec reads HTTP as well, but it repeats the whole range after a lost connection.
        transport_class = HttpTransport if uri.partition("://")[0].lower() in ("http", "https") else FsspecTransport
        self._transport: Transport = transport_class(self.uri, timeout_s)
        self._versions: dict[str, FileVersion] = {}
        self._stopped = threading.Event()

    def reopen(self, sizes: Mapping[str, int]) -> RemoteFolder:
        """Returns a RemoteFolder of the same URL with new connections, for files of these sizes."""
        copy = RemoteFolder(self.uri, sizes=sizes, **self._settings)  # type: ignore[arg-type]
        # The copy refuses a file that has changed since the first opening, too.
        copy._versions.update(self._versions)
        return copy

    def read_version(self, name: str) -> FileVersion:
        """Requests the current version of a file, and returns it.

        Raises:
            FileNotFoundError: there is no such file.
            DataError: it cannot be read after all attempts, or it has changed since it was first read.
        """
        num_failures = 0
        while isinstance(version := self._transport.read_version(name), str):
            num_failures += 1
            self._pause(name, num_failures, version)
        self._check_unchanged(name, version)
        return version

    def read(self, name: str, start: int, length: int) -> NDArray[np.uint8]:
        """Reads bytes [start, start + length) of a file. Continues after a lost connection.

        Returns:
            uint8 [length].

        Raises:
            DataError: the file is missing, has changed, or `attempts` in a row brought no byte.
            StoppedError: `stop` was called meanwhile.
        """
        free_bytes = read_free_memory_bytes() if length > MAX_UNCHECKED_BYTES else length
        # The length comes from the server or a column, and may be wrong: memory is allocated only if there is enough.
        if length > free_bytes:
            what = f"{length:,} bytes must be read, and {free_bytes:,} bytes of memory are free"
            raise DataError(what, where=self._get_path(name), fix="Check the file, or free memory.")
        out = np.empty(length, np.uint8)
        num_read = num_failures = 0
        while num_read < length:
            if self._stopped.is_set():
                raise StoppedError
            try:
                part = self._transport.read(name, start + num_read, out.data[num_read:])
                # fsspec returns no version with the bytes, so it is requested once for each file.
                if part.version is None and part.count and name not in self._versions:
                    self.read_version(name)
            except FileNotFoundError:
                raise DataError(
                    "there is no such file", where=self._get_path(name), fix="Copy it there again."
                ) from None
            if part.version is not None:
                self._check_unchanged(name, part.version)
            num_read += part.count
            # Any progress resets the count, so a slow network does not fail.
            num_failures = 0 if part.count else num_failures + 1
            if num_read < length and part.reason:
                self._pause(name, num_failures, part.reason, part.pause_s)
        return out

    def stop(self) -> None:
        """Makes the reads of other threads raise StoppedError."""
        self._stopped.set()
        self._transport.stop()

    def close(self) -> None:
        """Closes the connections; no other thread may be reading. A later read opens new ones."""
        self._transport.close()

    def _get_path(self, name: str) -> str:
        return f"{self.display_uri}/{name}"

    def _check_unchanged(self, name: str, version: FileVersion) -> None:
        """Raises DataError if a file differs from its expected size, or from the version that was read first."""
        size = self._sizes.get(name, version.size)
        if size != version.size:
            what = f"the file has {version.size:,} bytes and should have {size:,}"
            raise DataError(what, where=self._get_path(name), fix="Copy it there again, or pack again.")
        known_version = self._versions.setdefault(name, version)
        if known_version != version:
            known_text, new_text = _describe_version(known_version), _describe_version(version)
            what = f"the file changed while it was in use (before: {known_text}; now: {new_text})"
            raise DataError(
                what, where=self._get_path(name), fix="Put changed data at another address, and start again."
            )

    def _pause(self, name: str, num_failures: int, reason: str, retry_after_s: float = 0.0) -> None:
        if num_failures >= self._attempts:
            what = f"the file cannot be read: {reason} ({num_failures} attempts)"
            raise DataError(what, where=self._get_path(name), fix="Check the network and the server, and start again.")
        # The random factor keeps many clients from returning at the same moment.
        # The server may request a longer pause.
        pause_s = max(retry_after_s, self._pause_s * 2 ** max(0, num_failures - 1) * random.uniform(0.5, 1.0))
        if self._stopped.wait(min(MAX_PAUSE_S, pause_s)):
            raise StoppedError


def _describe_version(version: FileVersion) -> str:
    return f"{version.size:,} bytes" + (f", {version.tag}" if version.tag else "")
