"""The application: its list of resources (FastAPI), and the limits around every request."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from headway import __version__
from headway.core.errors import HeadwayError
from headway.http.connection import Connection
from headway.http.problems import MEDIA_TYPE, ProblemError
from headway.lifecycle.service import pages, read_resources, run_resources, upload_resources, write_resources
from headway.lifecycle.service.exchange import State, answer_problem, name_request
from headway.lifecycle.service.labelling.assets import LABEL_PAGES
from headway.lifecycle.service.labelling.resources import LABEL_RESOURCES
from headway.lifecycle.service.problems import explain_failure, refuse
from headway.lifecycle.service.upload import ClientLeftError

LOG = logging.getLogger("headway.lifecycle")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PROGRESS_BYTES = 64 << 10
"""Bytes that a client has to send within the time of one phase, so that a very slow one does not keep a connection."""
_AUDITED = frozenset(("POST", "PUT", "PATCH", "DELETE"))
_REFUSED = frozenset((401, 403, 429))

# Problems of what needs a token; of what reads a version; of what has a body; of what changes a version.
_ALWAYS = (400, 401, 403, 404, 429, 500, 503)
_READ = (*_ALWAYS, 410)
_BODY = (*_ALWAYS, 409, 413, 415, 422, 507)
_WRITE = (*_BODY, 410, 412)

# (method, path, function, answers that are no problem, problems). 408 and 431 come from the connection itself.
RESOURCES: tuple[tuple[str, str, Callable[..., Awaitable[Response]], tuple[int, ...], tuple[int, ...]], ...] = (
    ("GET", "/datasets", read_resources.list_datasets, (200,), _ALWAYS),
    ("PUT", "/datasets/{dataset}", write_resources.put_dataset, (201,), _BODY),
    ("GET", "/datasets/{dataset}", read_resources.get_dataset, (200, 304), (*_READ, 409)),
    ("POST", "/datasets/{dataset}", write_resources.post_changes, (200, 201, 202), (*_WRITE, 428, 460)),
    ("OPTIONS", "/datasets/{dataset}", upload_resources.describe_uploads, (204,), (404, 500)),
    ("GET", "/datasets/{dataset}/versions", read_resources.list_versions, (200,), _READ),
    ("GET", "/datasets/{dataset}/versions/{first}...{second}", read_resources.get_difference, (200,), _READ),
    ("GET", "/datasets/{dataset}/versions/{version}", read_resources.get_version, (200, 304), (*_READ, 409)),
    ("GET", "/datasets/{dataset}/versions/{version}/samples.csv", read_resources.get_table, (200,), (*_READ, 409)),
    ("GET", "/datasets/{dataset}/samples", read_resources.list_samples, (200,), _READ),
    ("GET", "/blobs/{sha256}", read_resources.get_blob, (200, 206, 304), (*_READ, 416)),
    ("GET", "/thumbs/{sha256}", read_resources.get_thumb, (200,), _READ),
    ("OPTIONS", "/uploads/{upload}", upload_resources.describe_uploads, (204,), (404, 500)),
    ("HEAD", "/uploads/{upload}", upload_resources.head_upload, (200, 204), (*_ALWAYS, 412)),
    ("GET", "/uploads/{upload}", upload_resources.get_upload, (200,), _ALWAYS),
    ("PATCH", "/uploads/{upload}", upload_resources.patch_upload, (200, 201, 202, 204), (*_WRITE, 428, 460)),
    ("DELETE", "/uploads/{upload}", upload_resources.delete_upload, (204,), (*_ALWAYS, 409, 412)),
    ("GET", "/runs", run_resources.list_runs, (200,), _ALWAYS),
    ("POST", "/runs", run_resources.post_run, (202,), _BODY),
    ("POST", "/exports", run_resources.post_export, (202,), _BODY),
    ("GET", "/jobs", write_resources.list_jobs, (200,), _ALWAYS),
    ("GET", "/jobs/{job}", write_resources.get_job, (200,), _ALWAYS),
    ("DELETE", "/jobs/{job}", write_resources.delete_job, (202,), _ALWAYS),
    *((method, path, run, good, _READ if method == "GET" else _WRITE) for method, path, run, good in LABEL_RESOURCES),
)
PAGES: Mapping[str, Callable[..., Awaitable[Response]]] = {
    "/": pages.show_api,
    "/openapi.json": pages.show_openapi,
    "/problems/{kind}": pages.show_problem,
    "/healthz": pages.show_health,
    **LABEL_PAGES,
}
"""Resources that need no token, since they hold nothing of the store."""
_PHRASES = {460: "Checksum mismatch (tus)"}


def build_api(state: State) -> FastAPI:
    """Builds FastAPI's application, which knows the resources and describes them at /openapi.json."""
    # FastAPI's own pages load scripts from a public server; ours needs none.
    api = FastAPI(
        title="Headway data service",
        version=__version__,
        description="Data sets with versions. Each problem is application/problem+json (RFC 9457).",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    api.state.service = state
    for method, path, function, good, bad in RESOURCES:
        api.add_api_route(
            path,
            function,
            methods=[method],
            status_code=good[0],
            response_class=Response,
            response_model=None,
            responses=_describe_answers(good, bad),
            operation_id=f"{function.__name__}_{path.split('/')[1]}",
        )
        if method == "GET" and path != "/uploads/{upload}":
            api.add_api_route(path, function, methods=["HEAD"], include_in_schema=False)
    for path, page in PAGES.items():
        api.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
    api.add_exception_handler(ProblemError, _answer_problem)
    api.add_exception_handler(HTTPException, _answer_http_error)
    api.add_exception_handler(RequestValidationError, _answer_invalid)
    api.add_exception_handler(ClientLeftError, _answer_nobody)
    for kind in (HeadwayError, OSError, sqlite3.Error):
        api.add_exception_handler(kind, _answer_failure)
    # Starlette raises these again, so that they are logged below.
    api.add_exception_handler(Exception, _answer_unknown)
    return api


def _describe_answers(good: tuple[int, ...], bad: tuple[int, ...]) -> dict[int | str, dict[str, Any]]:
    answers: dict[int | str, dict[str, Any]] = {status: {"description": HTTPStatus(status).phrase} for status in good}
    for status in bad:
        phrase = _PHRASES.get(status) or HTTPStatus(status).phrase
        answers[status] = {"description": phrase, "content": {MEDIA_TYPE.decode(): {}}}
    return answers


async def _answer_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return answer_problem(request, error)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    # 499 is nginx's status for it; only the audit log sees it.
    return Response(None, 499)


async def _answer_failure(request: Request, error: Exception) -> Response:
    problem = explain_failure(error)
    if problem.status == 500:
        LOG.error("A request failed.", exc_info=error)
    return answer_problem(request, problem)


async def _answer_unknown(request: Request, error: Exception) -> Response:
    return answer_problem(request, explain_failure(error))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        # FastAPI knows one route at a time, and a resource here has one for each method.
        methods = {
            method
            for route in request.app.routes
            if route.path_regex.match(request.url.path)
            for method in route.methods
        }
        headers = [(b"allow", ", ".join(sorted(methods)).encode())]
        what = f"{request.url.path[:200]} does not answer {request.method[:20]}"
        return answer_problem(request, refuse("wrong-method", what, "Use another method.", headers=headers))
    return answer_problem(request, refuse("not-found", "there is nothing here", "The list of resources is at /."))


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # A path that no resource can have, such as a version with a slash: there is nothing.
    if any(one["loc"][0] == "path" for one in error.errors()):
        return answer_problem(request, refuse("not-found", "there is nothing here", "The list of resources is at /."))
    faults = [("/".join(map(str, ("", *one["loc"]))), str(one["msg"])) for one in error.errors()]
    what = "a parameter is not valid"
    return answer_problem(request, refuse("malformed", what, "The list of resources is at /.", errors=faults))


@final
class Service:
    """The application that uvicorn calls: FastAPI's one within limits of time, with an audit log.

    Attributes:
        is_draining: True from the moment at which the server stops: each answer then closes its connection.
    """

    def __init__(self, state: State) -> None:
        self._state, self._api = state, build_api(state)
        self.is_draining = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request."""
        connection: Connection = scope["state"]["connection"]
        connection.begin_request()
        exchange = _Exchange(self, scope, connection, receive, send)
        if exchange.is_body_read:
            connection.begin_answer()
        else:
            # The client's time begins to count when somebody asks for the body.
            connection.pause_clock()
        # FastAPI sees a request; the name of the request and of who sends it come back in its state.
        request = Request(scope, exchange.receive)
        try:
            await self._api(scope, exchange.receive, exchange.send)
        except Exception:
            LOG.exception("A request failed.")
        finally:
            self._state.release(request)
        connection.end_request()
        try:
            self._audit(request, exchange)
        except OSError as error:
            # The request is answered, and others go on.
            LOG.error(f"The audit log cannot be written: {error}")

    def _audit(self, request: Request, exchange: _Exchange) -> None:
        if request.method not in _AUDITED and exchange.status not in _REFUSED:
            return
        by, audit = getattr(request.state, "principal", None), self._state.audit
        # Whoever has no token, or too few rights, may send as many requests as they like.
        is_cheap = exchange.status in _REFUSED or (by is None and exchange.status >= 400)
        (audit.add_refusal if is_cheap else audit.add)(
            request=name_request(request),
            by=by,
            address=None if request.client is None else request.client.host,
            method=request.method,
            path=request.scope["raw_path"].decode("latin-1"),
            # 0: nothing was sent; 499: the client has left.
            status=exchange.status,
            bytes=exchange.received_bytes,
            location=exchange.answer_headers.get(b"location", b"").decode("latin-1") or None,
            etag=exchange.answer_headers.get(b"etag", b"").decode("latin-1") or None,
        )


@final
class _Exchange:
    """One request on its way: tells the connection that it moves, and counts its bytes."""

    def __init__(
        self, service: Service, scope: Mapping[str, Any], connection: Connection, receive: Receive, send: Send
    ) -> None:
        self._service, self._connection, self._receive, self._send = service, connection, receive, send
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self._is_tus = b"tus-resumable" in headers
        # Where the rest of a refused body ends is known by its length alone: a client that waits for 100 Continue never
        # sends it, and the last chunk may have endless trailers.
        self._is_rest_known = b"expect" not in headers and b"transfer-encoding" not in headers
        self.is_body_read = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
        self.received_bytes = 0
        self._noted_bytes = 0
        self.status = 0
        self.answer_headers: Mapping[bytes, bytes] = {}

    async def receive(self) -> Message:
        """Returns the next part of the body."""
        # The client is waited for here, and nowhere else: what the server does meanwhile is not its time.
        self._connection.resume_clock()
        message = await self._receive()
        self._connection.pause_clock()
        if message["type"] == "http.disconnect" and (rest := self._connection.take_rest()):
            # Bytes of a cut connection count: an upload keeps them. The next message says that it was cut.
            message = {"type": "http.request", "body": rest, "more_body": True}
        if message["type"] == "http.request":
            self.received_bytes += len(message.get("body", b""))
            if self.received_bytes - self._noted_bytes >= PROGRESS_BYTES:
                self._noted_bytes = self.received_bytes
                self._connection.note_progress()
            if not message.get("more_body") and not self.is_body_read:
                self.is_body_read = True
                self._connection.begin_answer()
        return message

    async def send(self, message: Message) -> None:
        """Sends a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message["headers"])
            self.answer_headers = dict(headers)
            if self._is_tus:
                headers.append((b"tus-resumable", upload_resources.TUS_VERSION.encode()))
            is_closing = self._service.is_draining or (self._connection.has_rest and not self._is_rest_known)
            if is_closing and not self._connection.has_waiting:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
            self._connection.begin_send()
            await self._send(message)
            self._connection.linger()
            return
        self._connection.note_progress()
        await self._send(message)
