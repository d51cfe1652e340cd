"""ASGI application: routes, limits and answers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, final

from headway.core.errors import HeadwayError
from headway.export.serve.batching import BRIEF_BYTES, Batcher
from headway.export.serve.inputs import check_media_type, parse_body
from headway.export.serve.jobs import Answer, Job
from headway.export.serve.metrics import CONTENT_TYPE, ServeMetrics
from headway.export.serve.settings import ServeSettings
from headway.export.serve.token import Token
from headway.http.connection import Connection
from headway.http.problems import MEDIA_TYPE, Header, ProblemError

LOG = logging.getLogger("headway.export")

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Response = tuple[int, list[Header], bytes]
"""Status, headers without the length, and body."""

JSON: Header = (b"content-type", b"application/json")
MAX_DEADLINE_MS = 86_400_000.0
SLOW_S = 1.0
"""Seconds that every client has to send its body, however much memory others need."""
METHODS = {"/predict": ("POST",), "/swap": ("POST",), "/metrics": ("GET", "HEAD"), "/healthz": ("GET", "HEAD")}
METHODS["/readyz"] = METHODS["/healthz"]
# What a balancer asks: it has no token, and learns nothing beside that the server runs.
OPEN_PATHS = frozenset(("/healthz", "/readyz"))

_DEADLINE = re.compile(rb"\d{1,9}(\.\d{1,6})?")
_LENGTH = re.compile(rb"\d{1,18}")


@final
class ClientLeftError(Exception):
    """The client closed the connection before its request was complete."""


@final
class App:
    """The application that uvicorn calls.

    Args:
        swap: opens the export anew and lets it take over; returns what happened, for the answer.
        token: None: everybody who reaches the server may use it.

    Attributes:
        is_draining: True from the moment at which the server stops: each answer then closes its connection.
    """

    def __init__(
        self,
        batcher: Batcher,
        settings: ServeSettings,
        metrics: ServeMetrics,
        *,
        swap: Callable[[], Awaitable[dict[str, Any]]],
        token: Token | None = None,
    ) -> None:
        self._batcher, self._settings, self._metrics = batcher, settings, metrics
        self._swap, self._token = swap, token
        self._most_images = min(settings.images, settings.queue)
        self._loop = asyncio.get_running_loop()
        self.is_draining = False
        # Bytes of all bodies in memory, from their arrival to the answer.
        self.held_bytes = 0
        # Requests whose body comes; the first one has been at it for longest.
        self._senders: dict[_Request, None] = {}

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request."""
        connection: Connection = scope["state"]["connection"]
        connection.begin_request()
        request = _Request(scope, receive, connection)
        is_prediction = scope["path"] == "/predict"
        try:
            status, headers, body = await self._answer(request)
        except ProblemError as problem:
            self._metrics.decode_failures += len(problem.more.get("images", ()))
            status, headers, body = problem.status, [(b"content-type", MEDIA_TYPE), *problem.headers], problem.to_json()
        except ClientLeftError:
            return
        except Exception:
            LOG.exception("A request failed.")
            failure = ProblemError(500, "the request failed on the server", "Look into the log of the server.")
            status, headers, body = 500, [(b"content-type", MEDIA_TYPE)], failure.to_json()
        finally:
            self._release(request)
        if is_prediction and not connection.is_lost:
            self._metrics.requests[status] += 1
            if status == 200:
                self._metrics.latency.add(time.monotonic() - request.arrival_s)
        headers.append((b"content-length", str(len(body)).encode()))
        # Where the rest of a refused body ends is known by its length alone: a client that waits for 100 Continue never
        # sends it, and the last chunk may have endless trailers.
        is_closing = self.is_draining or (connection.has_rest and not request.is_rest_known)
        if is_closing and not connection.has_waiting:
            headers.append((b"connection", b"close"))
        connection.begin_send()
        await send({"type": "http.response.start", "status": status, "headers": headers})
        connection.linger()
        await send({"type": "http.response.body", "body": body})
        connection.end_request()

    async def _answer(self, request: _Request) -> Response:
        path = request.scope["path"]
        methods = METHODS.get(path)
        if self._token is not None and path not in OPEN_PATHS:
            self._token.check(request.headers.get(b"authorization"))
        if methods is None:
            raise ProblemError(404, "there is nothing here", f"Use one of {', '.join(METHODS)}.")
        if request.scope["method"] not in methods:
            allow = ", ".join(methods)
            what = f"{path} does not answer {request.scope['method'][:20]}"
            raise ProblemError(405, what, f"Use {allow}.", headers=[(b"allow", allow.encode())])
        if path == "/predict":
            return await self._predict(request)
        if path == "/swap":
            return await self._answer_swap(request.connection)
        if path == "/metrics":
            return 200, [(b"content-type", CONTENT_TYPE)], self._metrics.format_page()
        if path == "/readyz" and self.is_draining:
            raise ProblemError(503, "the server stops", "Send requests to another one.")
        return 200, [JSON], b'{"status": "ok"}'

    async def _predict(self, request: _Request) -> Response:
        headers = request.headers
        content_type = headers.get(b"content-type", b"").decode("latin-1")
        media_type = check_media_type(content_type)
        deadline_ms = self._read_deadline(headers.get(b"x-deadline-ms"))
        # Before the body is read: under overload it would be read for nothing.
        self._batcher.check_room(1)
        body = await self._read_body(request)
        connection = request.connection
        connection.begin_answer()
        shape = headers.get(b"x-shape")
        parse = partial(
            parse_body,
            media_type,
            content_type,
            None if shape is None else shape.decode("latin-1"),
            images=self._most_images,
            image_pixels=self._settings.image_pixels,
            pixels=self._settings.decoded_pixels,
        )
        # Headers of images can be as long as the body, and take seconds to read.
        payload = parse(body) if len(body) <= BRIEF_BYTES else await asyncio.to_thread(parse, body)
        # The files of a form are copies.
        del body
        job = Job(
            payload,
            self._loop.create_future(),
            arrival_s=request.arrival_s,
            deadline_ms=deadline_ms,
            is_lost=lambda: connection.is_lost,
        )
        self._batcher.submit(job)
        outcome = await self._wait(job)
        if isinstance(outcome, ProblemError):
            raise outcome
        return 200, [JSON, *outcome.headers], json.dumps({"predictions": outcome.rows}).encode()

    async def _wait(self, job: Job) -> Answer | ProblemError:
        if job.deadline_s is None:
            return await job.future
        # Answered at the deadline itself, and not only when the inference thread reaches the job.
        timer = self._loop.call_later(job.deadline_s - time.monotonic(), lambda: job.settle(job.refuse_late()))
        try:
            outcome = await job.future
        finally:
            timer.cancel()
        # Looked at once more, as late as possible.
        return job.refuse_late() if isinstance(outcome, Answer) and job.is_late() else outcome

    def _read_deadline(self, text: bytes | None) -> float | None:
        """Returns milliseconds from the arrival of the headers, or None. Raises ProblemError (400)."""
        if text is None:
            return self._settings.deadline_ms
        if _DEADLINE.fullmatch(text) is None or not 0 < float(text) <= MAX_DEADLINE_MS:
            what = f"X-Deadline-Ms: {text[:40].decode('latin-1')} is no time"
            raise ProblemError(400, what, "Give the milliseconds that the answer may take, for example 200.")
        return float(text)

    async def _read_body(self, request: _Request) -> bytes:
        """Returns the body. Raises ProblemError if it is too long (413), or memory for bodies is used up (503)."""
        limit = self._settings.body_bytes
        length = request.headers.get(b"content-length")
        # uvicorn's parser has refused a length that is no number.
        if length is not None and _LENGTH.fullmatch(length) and int(length) > limit:
            raise self._refuse_long(int(length))
        chunks, size = list[bytes](), 0
        self._senders[request] = None
        try:
            while True:
                message = await request.receive()
                if message["type"] != "http.request":
                    raise ClientLeftError
                chunk = message["body"]
                size += len(chunk)
                if size > limit:
                    raise self._refuse_long(None)
                # Bytes that came, not bytes that were announced: a slow client blocks what it sent, and no more.
                self._make_room(len(chunk), request)
                request.held_bytes += len(chunk)
                self.held_bytes += len(chunk)
                chunks.append(chunk)
                if not message["more_body"]:
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        finally:
            self._senders.pop(request, None)

    def _make_room(self, size: int, request: _Request) -> None:
        """Cuts off the slowest senders until so many bytes fit. Raises ProblemError (503) if no other one is slow."""
        while self.held_bytes + size > self._settings.held_bytes:
            slowest = next(iter(self._senders), request)
            if slowest is request or time.monotonic() - slowest.arrival_s < SLOW_S:
                what = "the memory for bodies is used up by other requests"
                raise ProblemError(503, what, "Send the request again after 1 s.", headers=[(b"retry-after", b"1")])
            del self._senders[slowest]
            self._release(slowest)
            slowest.connection.refuse(408, "The request came slowly, and others need its memory.", "slow sender")

    def _release(self, request: _Request) -> None:
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0

    def _refuse_long(self, size: int | None) -> ProblemError:
        limit = self._settings.body_bytes
        what = "the body is" if size is None else f"the body has {size:,} bytes,"
        what += f" more than {limit:,} bytes" if size is None else f" more than {limit:,}"
        return ProblemError(413, what, "Send a smaller image, or raise --body-mb of the server.")

    async def _answer_swap(self, connection: Connection) -> Response:
        # A large network takes longer to load than a client may take to send a request.
        connection.begin_answer()
        try:
            result = await self._swap()
        except HeadwayError as error:
            self._metrics.swaps["refused"] += 1
            LOG.warning(f"The new export was refused, and the old one goes on: {error}")
            what = f"the new export was refused, and the old one goes on: {error.what}"
            raise ProblemError(409, what, error.fix or "Export the run again.") from error
        self._metrics.swaps["unchanged" if result["unchanged"] else "done"] += 1
        return 200, [JSON, *self._batcher.model.headers], json.dumps(result).encode()


@final
class _Request:
    """One request while it is answered.

    Attributes:
        headers: the last value of each header, by name in lower case.
        arrival_s: `time.monotonic` when the headers were complete.
        held_bytes: bytes of the body in memory.
    """

    __slots__ = ("arrival_s", "connection", "headers", "held_bytes", "receive", "scope")

    def __init__(self, scope: Mapping[str, Any], receive: Receive, connection: Connection) -> None:
        self.scope, self.receive, self.connection = scope, receive, connection
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.arrival_s = time.monotonic()
        self.held_bytes = 0

    @property
    def is_rest_known(self) -> bool:
        """True if a refused body comes, and ends after a length that is known."""
        return b"expect" not in self.headers and b"transfer-encoding" not in self.headers
