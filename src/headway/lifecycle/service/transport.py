"""Transport: HTTP to a data service, with requests that are sent again until they are answered."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import logging
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final
from urllib.parse import quote, urlsplit

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error
from headway.core.retry_after import parse_retry_after
from headway.core.untrusted_json import JsonError, parse_object
from headway.http.listening import is_loopback

LOG = logging.getLogger("headway.lifecycle")

MAX_ANSWER_BYTES = 256 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
LONGEST_ASKED_S = 300.0
"""Most seconds of one pause that the server asks for with Retry-After."""
TOKEN_VARIABLE = "HEADWAY_TOKEN"
"""Environment variable with the token of a client that is given none."""
_TOKEN_FIX = f"Set {TOKEN_VARIABLE} to a token that headway data-token has printed."


@final
class ServiceError(HeadwayError):
    """The service has refused a request.

    Attributes:
        status: of HTTP.
        problem: the answer (RFC 9457).
        headers: of the answer, names in lower case.
    """

    def __init__(self, status: int, problem: Mapping[str, Any], headers: Mapping[str, str], where: str) -> None:
        self.status, self.problem, self.headers = status, problem, headers
        what = str(problem.get("what") or problem.get("detail") or f"the service answered {status}")
        found = problem.get("errors")
        errors = found[:5] if isinstance(found, list) else ()
        listed = "; ".join(f"{one.get('pointer')}: {one.get('detail')}" for one in errors if isinstance(one, dict))
        # A person has no headers to send.
        fix = _TOKEN_FIX if status == 401 else str(problem.get("fix") or "")
        super().__init__(f"{what} ({listed})" if listed else what, where=where, fix=fix)

    @property
    def retry_after_s(self) -> float:
        """Seconds that the service asks the client to wait; at most LONGEST_ASKED_S."""
        return parse_retry_after(self.headers.get("retry-after", ""), LONGEST_ASKED_S)


@final
@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        headers: names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """Returns the body. Raises HeadwayError if it is no JSON object."""
        try:
            return parse_object(self.body)
        except JsonError as error:
            raise HeadwayError(f"the service has answered what is no JSON: {error}") from error


@final
class Transport:
    """Sends requests to one server.

    Args:
        url, token, timeout_s, patience_s: as `Client`.

    Attributes:
        url: of the server.
        patience_s: seconds for which a server that cannot be reached is tried again.

    Raises:
        UsageError: the URL is none of HTTP, or the token cannot be sent.
    """

    def __init__(self, url: str, token: str | None, timeout_s: float, patience_s: float) -> None:
        # Not quoted in the message: it may be a password.
        if found := sorted({"@", "?", "#"} & set(url)):
            what = f"the address of the server holds {' and '.join(found)}: no user name, password or query is sent"
            fix = f"Write for example http://127.0.0.1:8080, and set {TOKEN_VARIABLE} to the token."
            raise UsageError(what, fix=fix)
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            # As the socket does it later.
            is_host = bool(host.encode("idna")) and not any(letter.isspace() for letter in host)
        # Such as a port that is no number, or a host with two dots in a row.
        except ValueError:
            is_host = False
        if not is_host or parts.scheme not in ("http", "https"):
            raise UsageError(f"{url!r} is no address of a server", fix="Write for example http://127.0.0.1:8080.")
        self._host, self._port, self._is_safe = host, port, parts.scheme == "https"
        self._base, self.url = quote(parts.path.rstrip("/"), safe="/%:"), url
        self._token = os.environ.get(TOKEN_VARIABLE, "").strip() if token is None else token
        if self._token and not (self._token.isascii() and self._token.isprintable()):
            fix = f"Set {TOKEN_VARIABLE} to the one line that headway data-token has printed."
            raise UsageError("the token is not one line of ASCII characters", fix=fix)
        if self._token and not self._is_safe and not is_loopback(host):
            LOG.warning(f"The token goes to {host} without encryption: use https, through a proxy that speaks TLS.")
        self._timeout_s, self.patience_s = timeout_s, patience_s

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Sends a request until it is answered.

        Each is safe to send twice, by its method or by its key: none is carried out twice.
        """
        pause_s, until_s = FIRST_PAUSE_S, time.monotonic() + self.patience_s
        while True:
            last: Exception
            asked_s = 0.0
            try:
                return self.check(self.send(method, path, body, headers or {}), path)
            except ServiceError as error:
                asked_s = error.retry_after_s
                is_running = error.status == 409 and "retry-after" in error.headers
                if not is_running and error.status not in (429, 503):
                    raise
                if is_running:
                    # However long a commit takes.
                    until_s = time.monotonic() + self.patience_s
                last = error
            except (OSError, http.client.HTTPException) as error:
                last = error
            # A pause that the server asks for may last beyond the client's own patience, and ends with another try.
            if time.monotonic() + (0.0 if asked_s > pause_s else pause_s) > until_s:
                raise self.explain(last)
            time.sleep(max(pause_s, asked_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def send(self, method: str, path: str, body: bytes | Iterator[bytes] | None, headers: Mapping[str, str]) -> Reply:
        """Sends a request once, and returns the answer, whatever its status. Raises OSError or HTTPException."""
        kind = http.client.HTTPSConnection if self._is_safe else http.client.HTTPConnection
        with contextlib.closing(kind(self._host, self._port, timeout=self._timeout_s)) as connection:
            sent = dict(headers)
            if self._token:
                sent["Authorization"] = f"Bearer {self._token}"
            try:
                connection.request(method, self._base + path, body, sent)
            except (BrokenPipeError, ConnectionResetError):
                # The server may have refused the request before its body was complete: its answer waits here.
                if not isinstance(body, Iterator):
                    raise
            answer = connection.getresponse()
            data = answer.read(MAX_ANSWER_BYTES + 1)
            if len(data) > MAX_ANSWER_BYTES:
                raise HeadwayError(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes", where=self.url + path)
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, data)

    def check(self, reply: Reply, path: str) -> Reply:
        """Returns an answer unless it is a refusal, which raises ServiceError, or was damaged on its way.

        Raises HeadwayError for a redirect: the request was not carried out, and a token is for one server.
        """
        if 300 <= reply.status < 400:
            what = f"the server answers {reply.status}, with the address {reply.headers.get('location', '')!r:.300}"
            fix = "Name the server by its own address. A redirect is not followed: it would get the token."
            raise HeadwayError(what, where=self.url + path, fix=fix)
        if reply.status < 300:
            # A client that asks for no other digest gets this one. An answer to HEAD has it too, without a body.
            wanted = reply.headers.get("repr-digest")
            is_checked = wanted is not None and reply.status == 200 and bool(reply.body)
            if is_checked and wanted != format_digest(hashlib.sha256(reply.body).digest()):
                raise http.client.HTTPException("the answer was damaged on its way")
            return reply
        problem: Mapping[str, Any] = {}
        with contextlib.suppress(JsonError):
            problem = parse_object(reply.body)
        raise ServiceError(reply.status, problem, reply.headers, self.url + path)

    def explain(self, error: Exception) -> HeadwayError:
        """Returns the error for a server that could not be reached."""
        if isinstance(error, HeadwayError):
            return error
        reason = describe_os_error(error) if not isinstance(error, ssl.SSLError) else str(error)
        fix = "Check the address, and whether headway serve-data runs there."
        return HeadwayError(f"the server cannot be reached ({reason or type(error).__name__})", where=self.url, fix=fix)


def format_digest(value: bytes) -> str:
    """Returns a SHA-256 as the headers of digests have it (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(value).decode('ascii')}:"
