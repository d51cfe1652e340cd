"""Transport: one attempt to read bytes of a remote file, by HTTP or through fsspec.

http and https are implemented here, over connections that stay open: fsspec's HTTP gives all bytes of a range or none,
while here a cut answer keeps the bytes that came, and the next request begins after them. Everything else goes through
fsspec, in pieces, so that a cut costs one piece.

With urllib3 2.8 this file had 316 lines instead of 317, and failed 4 of 38 tests: its `readinto` drops the bytes that
came before a cut. To wake a waiting thread (`stop`), to keep a password from redirects and to leave their bodies
unread, it needed subclasses of its connections and a redirect loop of our own.
"""

from __future__ import annotations

import base64
import http.client
import math
import socket
import ssl
import threading
import urllib.parse
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from headway.core.errors import DataError, UsageError
from headway.core.files import describe_os_error
from headway.core.retry_after import parse_retry_after
from headway.storage.addresses import redact_url

_PIECE_BYTES = 4 << 20
_REDIRECTS = 5
_SIZE_DIGITS, _TAG_CHARACTERS = 18, 1024
"""Limits of a server's claims about a file."""
_TRANSIENT_STATUSES = frozenset({408, 425, 429, *range(500, 600)})


class StoppedError(Exception):
    """The RemoteFolder was closed during a read."""


class FileVersion(NamedTuple):
    """A file's size in bytes and its entity tag or time (empty if unknown): it changes when the file does."""

    size: int
    tag: str


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """Result of one attempt: the number of bytes that came, and why it ended early (empty if it did not)."""

    count: int
    reason: str = ""
    version: FileVersion | None = None
    pause_s: float = 0.0
    """The pause that the server asks for before the next attempt."""


class Transport(ABC):
    """One way to reach files. Errors that no later attempt can mend are raised as DataError or UsageError."""

    @abstractmethod
    def read_version(self, name: str) -> FileVersion | str:
        """Returns the present version of a file, or why this attempt failed. Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str, start: int, into: memoryview) -> ReadAttempt:
        """Makes one attempt to read the bytes of a file from `start` on. Raises FileNotFoundError."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the waits of other threads, if possible."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections; no other thread may be reading."""


@final
class HttpTransport(Transport):
    """Range requests over HTTP/1.1; each thread keeps its own connections."""

    def __init__(self, uri: str, timeout_s: float) -> None:
        self._folder, self._timeout_s = urllib.parse.urlsplit(uri), timeout_s
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._all: set[http.client.HTTPConnection] = set()
        self._stopped = False
        weakref.finalize(self, _close_all, self._all)

    def read_version(self, name: str) -> FileVersion | str:
        """Returns the version of a file; see `Transport.read_version`."""
        part = self.read(name, 0, memoryview(bytearray(1)))
        return part.version or part.reason

    def read(self, name: str, start: int, into: memoryview) -> ReadAttempt:
        """Reads bytes of a file; see `Transport.read`."""
        count, version = 0, None
        try:
            # The range ends with the buffer, so one request never brings more than asked.
            answer = self._send_request(self._build_url(name), start, start + len(into) - 1)
            # These may pass: timeouts, too many requests, and errors of the server.
            if answer.status in _TRANSIENT_STATUSES:
                self._drop()
                pause_s = parse_retry_after(answer.getheader("Retry-After", ""), math.inf)
                return ReadAttempt(0, f"the server answered {answer.status} {answer.reason}", pause_s=pause_s)
            version = self._parse_version(answer, name, start)
            # Bytes go straight into the buffer of the caller.
            while count < len(into) and (received := answer.readinto(into[count:])):
                count += received
            # The answer has more bytes than the range: reusing the connection would read them.
            if count == len(into) and not answer.isclosed():
                self._drop()
        except ssl.SSLCertVerificationError as error:
            what = f"the server's certificate is refused ({error.verify_message})"
            fix = "Install the one that signed it."
            raise DataError(what, where=redact_url(self._build_url(name).geturl()), fix=fix) from None
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            if isinstance(error, FileNotFoundError):
                raise
            return ReadAttempt(count, _describe_error(error), version)
        if count < len(into):
            self._drop()
            return ReadAttempt(count, "the connection was cut", version)
        return ReadAttempt(count, "", version)

    def stop(self) -> None:
        """Closes the connections, which ends reads in other threads."""
        with self._lock:
            self._stopped = True
            for connection in self._all:
                if connection.sock is not None:
                    with suppress(OSError):
                        # Closing alone would not wake the thread that waits for it.
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            _close_all(self._all)

    def _build_url(self, name: str) -> urllib.parse.SplitResult:
        return self._folder._replace(path=f"{self._folder.path.rstrip('/')}/{urllib.parse.quote(name)}")

    def _send_request(self, url: urllib.parse.SplitResult, first: int, last: int) -> http.client.HTTPResponse:
        for _ in range(_REDIRECTS):
            # A compressed answer would have other offsets.
            headers = {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"} | _build_auth_header(url)
            connection, used = self._get_connection(url.scheme, url.netloc.rpartition("@")[2])
            target = urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
            try:
                connection.request("GET", target, headers=headers)
                answer = self._mine.answer = connection.getresponse()
            except (ConnectionError, http.client.HTTPException):
                self._drop()
                if not used:
                    raise
                # The server closed a connection that was idle: try again with a new one.
                continue
            where = answer.getheader("Location")
            if answer.status not in (301, 302, 303, 307, 308) or not where:
                return answer
            # Closed without reading the body, which may be endless.
            self._drop()
            url = urllib.parse.urlsplit(urllib.parse.urljoin(url.geturl(), where))
        fix = "Give the final address."
        raise DataError("the server redirects in a circle", where=redact_url(url.geturl()), fix=fix)

    def _get_connection(self, scheme: str, host: str) -> tuple[http.client.HTTPConnection, bool]:
        """Returns this thread's connection to a host, and True if it was open already."""
        mine: dict[tuple[str, str], http.client.HTTPConnection] = self._mine.__dict__.setdefault("connections", {})
        connection = mine.get((scheme, host))
        if connection is None:
            kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            connection = mine[scheme, host] = kind(host, timeout=self._timeout_s)
        self._mine.last, used = connection, connection.sock is not None
        if not used:
            connection.connect()
        with self._lock:
            self._all.add(connection)
            # `stop` ran meanwhile and has not seen this connection.
            if self._stopped:
                raise StoppedError
        return connection, used

    def _drop(self) -> None:
        """Closes the connection that this thread used last; its next use connects again."""
        for part in (self._mine.__dict__.pop("answer", None), self._mine.last):
            # An answer that ends its connection owns the socket, so both are closed.
            if part is not None:
                part.close()

    def _parse_version(self, answer: http.client.HTTPResponse, name: str, start: int) -> FileVersion:
        where = redact_url(self._build_url(name).geturl())
        tag = answer.getheader("ETag") or answer.getheader("Last-Modified") or ""
        # A server that ignores the range answers 200 with the whole file.
        held = answer.getheader("Content-Range", "")
        size = held.rpartition("/")[2]
        if answer.status == 206 and held.startswith(f"bytes {start}-") and size.isdecimal():
            if len(size) > _SIZE_DIGITS or len(tag) > _TAG_CHARACTERS:
                what = f"the server claims a size of {len(size)} digits and a tag of {len(tag)} characters"
                raise DataError(what, where=where, fix="Serve the folder with another server.")
            return FileVersion(int(size), tag)
        self._drop()
        if answer.status in (404, 410):
            raise FileNotFoundError(where)
        if answer.status == 416:
            what = f"the file ends before byte {start:,} (it has {size} bytes)"
            raise DataError(what, where=where, fix="Copy it there again, or pack again.")
        if answer.status in (200, 206):
            fix = "Serve the folder with one that does: any object store, nginx, Caddy."
            raise UsageError("the server does not answer range requests", where=where, fix=fix)
        fix = "Check the address and the right to read it."
        raise DataError(f"the server answered {answer.status} {answer.reason}", where=where, fix=fix)


@final
class FsspecTransport(Transport):
    """Any file system of fsspec."""

    def __init__(self, uri: str, timeout_s: float) -> None:
        # Imported here, since most programs read no remote files.
        import fsspec.asyn
        import fsspec.core

        try:
            self._files, self._root = fsspec.core.url_to_fs(uri)
        except (ImportError, ValueError) as error:
            scheme = uri.partition("://")[0]
            package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(scheme)
            fix = f"pip install {package}." if package else "Install the package of fsspec that reads it."
            raise UsageError(f"nothing installed reads {scheme}:// ({error})", where=redact_url(uri), fix=fix) from None
        # Some connect here, and each raises errors of its own.
        except Exception as error:
            what = f"the address cannot be reached ({_describe_error(error)})"
            fix = "Check the address, the network and the password."
            raise DataError(what, where=redact_url(uri), fix=fix) from error
        self._timeout_s = timeout_s
        self._sync = fsspec.asyn.sync

    def read_version(self, name: str) -> FileVersion | str:
        """Returns the version of a file; see `Transport.read_version`."""
        try:
            # fsspec caches listings, which would hide that a file has changed.
            self._files.invalidate_cache()
            info = self._call_fsspec("info", f"{self._root}/{name}")
        except (FileNotFoundError, PermissionError) as error:
            raise self._convert_error(name, error) from None
        except Exception as error:
            # Each file system raises errors of its own.
            return _describe_error(error)
        keys = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
        return FileVersion(int(info["size"]), next((str(info[key]) for key in keys if info.get(key)), ""))

    def read(self, name: str, start: int, into: memoryview) -> ReadAttempt:
        """Reads bytes of a file; see `Transport.read`."""
        # fsspec returns all bytes of a call or none.
        asked = min(len(into), _PIECE_BYTES)
        try:
            data = self._call_fsspec("cat_file", f"{self._root}/{name}", start=start, end=start + asked)
        except (FileNotFoundError, PermissionError) as error:
            raise self._convert_error(name, error) from None
        except Exception as error:
            # Each file system raises errors of its own.
            return ReadAttempt(0, _describe_error(error))
        if len(data) > asked:
            what = f"{len(data):,} bytes came for a range of {asked:,}"
            raise DataError(what, where=f"{self._root}/{name}", fix="Serve it from a store that answers ranges.")
        into[: len(data)] = data
        if data:
            return ReadAttempt(len(data))
        # The file may have become shorter.
        now = self.read_version(name)
        return ReadAttempt(0, "no bytes came") if isinstance(now, str) else ReadAttempt(0, "no bytes came", now)

    def stop(self) -> None:
        """Does nothing: a running call ends by itself."""

    def close(self) -> None:
        """Does nothing: fsspec keeps its connections."""

    def _call_fsspec(self, name: str, path: str, **arguments: Any) -> Any:
        # File systems that are not asynchronous are local, or have time limits of their own.
        if self._files.async_impl:
            function = getattr(self._files, f"_{name}")
            return self._sync(self._files.loop, function, path, timeout=self._timeout_s, **arguments)
        return getattr(self._files, name)(path, **arguments)

    def _convert_error(self, name: str, error: OSError) -> Exception:
        if isinstance(error, FileNotFoundError):
            return error
        where, fix = f"{self._root}/{name}", "Check the address and the right to read it."
        return DataError("the file may not be read", where=where, fix=fix)


def _build_auth_header(url: urllib.parse.SplitResult) -> dict[str, str]:
    """Returns the header for USER:PASSWORD@ in an address; a redirect to another address does not carry it on."""
    if url.username is None:
        return {}
    pair = f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _close_all(connections: set[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()
    connections.clear()


def _describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError) or type(error).__name__ == "FSTimeoutError":
        return "no answer came in time"
    if isinstance(error, (http.client.RemoteDisconnected, http.client.IncompleteRead)):
        return "the connection was cut"
    # The first line is the message; some libraries add a page of XML.
    text = describe_os_error(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
