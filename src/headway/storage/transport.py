"""Transport: one attempt at the bytes of a remote file, by HTTP or through fsspec.

http and https are spoken here, over connections that are kept: a cut answer keeps the bytes that came, so the next
request begins after them. Everything else goes through fsspec, whose reads give all bytes or none; they are asked for
in pieces, so that a cut costs one piece.
"""

from __future__ import annotations

import base64
import http.client
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
from headway.storage.addresses import redact_address

_PIECE_BYTES = 4 << 20
_REDIRECTS = 5
_SIZE_DIGITS, _TAG_CHARACTERS = 18, 1024
"""Most of what a server may say of a file."""
_TRANSIENT_STATUSES = frozenset({408, 425, 429, *range(500, 600)})


class StoppedError(Exception):
    """The Remote was closed while it read."""


class FileVersion(NamedTuple):
    """What changes when a file does: its size in bytes, and its entity tag or time; empty where there is none."""

    size: int
    tag: str


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """What one attempt brought: so many bytes, then why it ended early (empty: it did not)."""

    count: int
    reason: str = ""
    mark: FileVersion | None = None
    pause_s: float = 0.0
    """The server's wish before the next attempt."""


class Transport(ABC):
    """One way to reach files. An error that no later attempt would mend is raised as DataError or UsageError."""

    @abstractmethod
    def read_version(self, name: str) -> FileVersion | str:
        """The mark of a file now, or why this attempt failed. Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str, start: int, into: memoryview) -> ReadAttempt:
        """One attempt at the bytes of a file from `start` on. Raises FileNotFoundError."""

    @abstractmethod
    def stop(self) -> None:
        """Ends what other threads are waiting for, where that can be done."""

    @abstractmethod
    def close(self) -> None:
        """Closes connections; no other thread may be reading."""


@final
class HttpTransport(Transport):
    """Ranges over HTTP/1.1; each thread has its own connections, which are kept."""

    def __init__(self, uri: str, timeout_s: float) -> None:
        self._folder, self._timeout_s = urllib.parse.urlsplit(uri), timeout_s
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._all: set[http.client.HTTPConnection] = set()
        self._stopped = False
        weakref.finalize(self, _close_all, self._all)

    def read_version(self, name: str) -> FileVersion | str:
        """Returns the mark of a file; see `Transport.read_version`."""
        part = self.read(name, 0, memoryview(bytearray(1)))
        return part.mark or part.reason

    def read(self, name: str, start: int, into: memoryview) -> ReadAttempt:
        """Reads bytes of a file; see `Transport.read`."""
        count, mark = 0, None
        try:
            answer = self._send_request(self._build_url(name), start, start + len(into) - 1)
            if answer.status in _TRANSIENT_STATUSES:
                self._drop()
                return ReadAttempt(
                    0, f"the server answered {answer.status} {answer.reason}", pause_s=_read_retry_after(answer)
                )
            mark = self._parse_version(answer, name, start)
            while count < len(into) and (got := answer.readinto(into[count:])):
                count += got
            if count == len(into) and not answer.isclosed():  # it holds more than was asked for
                self._drop()
        except ssl.SSLCertVerificationError as error:
            what = f"the server's certificate is refused ({error.verify_message})"
            fix = "Install the one that signed it."
            raise DataError(what, where=redact_address(self._build_url(name).geturl()), fix=fix) from None
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            if isinstance(error, FileNotFoundError):
                raise
            return ReadAttempt(count, _describe_error(error), mark)
        if count < len(into):
            self._drop()
            return ReadAttempt(count, "the connection was cut", mark)
        return ReadAttempt(count, "", mark)

    def stop(self) -> None:
        """Closes the connections, which ends reads in other threads."""
        with self._lock:
            self._stopped = True
            for connection in self._all:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            _close_all(self._all)

    def _build_url(self, name: str) -> urllib.parse.SplitResult:
        return self._folder._replace(path=f"{self._folder.path.rstrip('/')}/{urllib.parse.quote(name)}")

    def _send_request(self, url: urllib.parse.SplitResult, first: int, last: int) -> http.client.HTTPResponse:
        for _ in range(_REDIRECTS):
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
                continue  # the server has closed a connection that lay idle
            where = answer.getheader("Location")
            if answer.status not in (301, 302, 303, 307, 308) or not where:
                return answer
            self._drop()  # not its body, which may have no end
            url = urllib.parse.urlsplit(urllib.parse.urljoin(url.geturl(), where))
        fix = "Give the address that it means."
        raise DataError("the server redirects without end", where=redact_address(url.geturl()), fix=fix)

    def _get_connection(self, scheme: str, host: str) -> tuple[http.client.HTTPConnection, bool]:
        """This thread's connection to a host, and whether it was open before."""
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
            if self._stopped:  # meanwhile; `stop` has not seen it
                raise StoppedError
        return connection, used

    def _drop(self) -> None:
        """Closes the connection that this thread used last; it connects anew when it is used again."""
        for part in (self._mine.__dict__.pop("answer", None), self._mine.last):
            if part is not None:  # an answer that ends its connection owns the socket
                part.close()

    def _parse_version(self, answer: http.client.HTTPResponse, name: str, start: int) -> FileVersion:
        where = redact_address(self._build_url(name).geturl())
        tag = answer.getheader("ETag") or answer.getheader("Last-Modified") or ""
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
        import fsspec.asyn  # here, since most programs read no remote files
        import fsspec.core

        try:
            self._files, self._root = fsspec.core.url_to_fs(uri)
        except (ImportError, ValueError) as error:
            scheme = uri.partition("://")[0]
            package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(scheme)
            fix = f"pip install {package}." if package else "Install the package of fsspec that reads it."
            raise UsageError(
                f"nothing installed reads {scheme}:// ({error})", where=redact_address(uri), fix=fix
            ) from None
        self._timeout_s = timeout_s
        self._sync = fsspec.asyn.sync

    def read_version(self, name: str) -> FileVersion | str:
        """Returns the mark of a file; see `Transport.read_version`."""
        try:
            self._files.invalidate_cache()
            found = self._call_fsspec("info", f"{self._root}/{name}")
        except (FileNotFoundError, PermissionError) as error:
            raise self._convert_error(name, error) from None
        except Exception as error:  # each file system has errors of its own
            return _describe_error(error)
        keys = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
        return FileVersion(int(found["size"]), next((str(found[key]) for key in keys if found.get(key)), ""))

    def read(self, name: str, start: int, into: memoryview) -> ReadAttempt:
        """Reads bytes of a file; see `Transport.read`."""
        asked = min(len(into), _PIECE_BYTES)
        try:
            data = self._call_fsspec("cat_file", f"{self._root}/{name}", start=start, end=start + asked)
        except (FileNotFoundError, PermissionError) as error:
            raise self._convert_error(name, error) from None
        except Exception as error:  # each file system has errors of its own
            return ReadAttempt(0, _describe_error(error))
        if len(data) > asked:
            what = f"{len(data):,} bytes came where {asked:,} were asked for"
            raise DataError(what, where=f"{self._root}/{name}", fix="Serve it from a store that answers ranges.")
        into[: len(data)] = data
        if data:
            return ReadAttempt(len(data))
        now = self.read_version(name)  # it may have become shorter
        return ReadAttempt(0, "no bytes came") if isinstance(now, str) else ReadAttempt(0, "no bytes came", now)

    def stop(self) -> None:
        """A call that is under way ends by itself."""

    def close(self) -> None:
        """Connections are kept by fsspec."""

    def _call_fsspec(self, name: str, path: str, **arguments: Any) -> Any:
        if self._files.async_impl:  # the others have no time limit of ours, and are local or have their own
            function = getattr(self._files, f"_{name}")
            return self._sync(self._files.loop, function, path, timeout=self._timeout_s, **arguments)
        return getattr(self._files, name)(path, **arguments)

    def _convert_error(self, name: str, error: OSError) -> Exception:
        if isinstance(error, FileNotFoundError):
            return error
        where, fix = f"{self._root}/{name}", "Check the address and the right to read it."
        return DataError("the file may not be read", where=where, fix=fix)


def _build_auth_header(url: urllib.parse.SplitResult) -> dict[str, str]:
    """What USER:PASSWORD@ in an address means; a redirection to another address does not carry it on."""
    if url.username is None:
        return {}
    pair = f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _close_all(connections: set[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()
    connections.clear()


def _read_retry_after(answer: http.client.HTTPResponse) -> float:
    text = answer.getheader("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def _describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError) or type(error).__name__ == "FSTimeoutError":
        return "no answer came in time"
    if isinstance(error, (http.client.RemoteDisconnected, http.client.IncompleteRead)):
        return "the connection was cut"
    text = describe_os_error(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
