"""All that the resources of the service share: its state, who asks, and how answers look."""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from fastapi import Request, Response

from headway.http.problems import MEDIA_TYPE, ProblemError
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.audit import AuditLog
from headway.lifecycle.service.datasets import Datasets
from headway.lifecycle.service.digests import choose_answer_digest, format_digest
from headway.lifecycle.service.jobs import Jobs
from headway.lifecycle.service.keys import Keys
from headway.lifecycle.service.labelling.labelling import Labelling
from headway.lifecycle.service.pixels import PixelBudget
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.processes import Processes
from headway.lifecycle.service.requests import IMAGES_AT_ONCE, Requests
from headway.lifecycle.service.settings import ServiceSettings
from headway.lifecycle.service.tokens import LOCAL, Principal, Tokens
from headway.lifecycle.service.upload import ClientLeftError
from headway.lifecycle.service.uploads import Uploads

HELD_LISTS = 4
"""Longest lists of changes that one token may have in memory at once, over all of its requests."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MINUTE_S = 60.0
_WATCHED_ADDRESSES = 10_000

T = TypeVar("T")

# Nothing that a client has sent may run in a browser.
SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@final
@dataclass(kw_only=True)
class State:
    """Everything that the resources use.

    Attributes:
        pool: its threads compute.
        disk: its threads write bodies and the state of uploads, and wait for the disk.
        commits: its threads make versions.
        is_open: True if requests need no token; the address is then one of this machine alone.
        thumb_pixels: pixels that are decoded for thumbnails at once.
    """

    settings: ServiceSettings
    datasets: Datasets
    tokens: Tokens
    uploads: Uploads
    jobs: Jobs
    requests: Requests
    keys: Keys
    labelling: Labelling
    processes: Processes
    audit: AuditLog
    pool: ThreadPoolExecutor
    disk: ThreadPoolExecutor
    commits: ThreadPoolExecutor
    is_open: bool
    thumb_pixels: PixelBudget = field(init=False)
    # Bytes of bodies in memory, by principal.
    _held: Counter[str] = field(default_factory=Counter)
    # When requests with a wrong token came, by address.
    _refusals: dict[str, deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.thumb_pixels = PixelBudget(IMAGES_AT_ONCE * self.settings.image_pixels)

    async def on_disk(self, function: Callable[..., T], *arguments: Any) -> T:
        """Returns the result of a function that waits for the disk, and not the event loop with it."""
        work = functools.partial(function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self.disk, work)

    def authorise(self, request: Request, *scopes: str) -> Principal:
        """Returns who sends a request.

        Args:
            scopes: one of them is needed.

        Raises:
            ProblemError: no token (401), or too many wrong ones (429), or one without a scope, or another web site
                (403).
        """
        principal = self._find_principal(request)
        request.state.principal = principal.name
        principal.expect(*scopes)
        return principal

    def hold(self, request: Request, count: int) -> None:
        """Counts bytes of a body that stay in memory until its request is answered.

        Raises ProblemError (429) if they are too many for one token. Others have a share of their own.
        """
        by, most = request.state.principal, HELD_LISTS * self.settings.json_bytes
        if self._held[by] + count > most:
            what = f"the requests of this token hold {most:,} bytes of memory, and more are not accepted"
            raise refuse("too-many", what, "Send fewer at the same time.", headers=[(b"retry-after", b"1")])
        self._held[by] += count
        request.state.held_bytes = getattr(request.state, "held_bytes", 0) + count

    def release(self, request: Request) -> None:
        """Takes back what `hold` has counted for a request."""
        if (count := getattr(request.state, "held_bytes", 0)) > 0:
            self._held[request.state.principal] -= count

    def _find_principal(self, request: Request) -> Principal:
        if self.is_open and not self.tokens.were_made:
            _expect_own_origin(request)
            return LOCAL
        try:
            return self.tokens.find(request.headers.get("authorization"))
        except ProblemError:
            self._count_refusal(request.client.host if request.client is not None else "")
            raise

    def _count_refusal(self, address: str) -> None:
        """Counts a wrong token. Raises ProblemError (429) if too many came from the address within a minute."""
        times = self._refusals.setdefault(address, deque())
        now = time.monotonic()
        while times and times[0] < now - _MINUTE_S:
            times.popleft()
        if len(times) >= self.settings.refusals_minute:
            what = "too many requests with a wrong token came from this address"
            raise refuse("too-many", what, "Wait a minute.", headers=[(b"retry-after", b"60")])
        times.append(now)
        # Somebody with many addresses must not fill the memory.
        if len(self._refusals) > _WATCHED_ADDRESSES:
            self._refusals.clear()


def find_state(request: Request) -> State:
    """Returns the state of the service that a request has come to."""
    state = request.app.state.service
    assert isinstance(state, State)
    return state


def _expect_own_origin(request: Request) -> None:
    """Refuses pages of other web sites, which a browser of this machine may run.

    Such a page cannot choose Host (its name may lead to this machine: DNS rebinding), nor leave out Origin.
    """
    host = request.headers.get("host", "").lower()
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    origin = request.headers.get("origin")
    if name not in LOOPBACK_NAMES or (origin is not None and origin.lower() != f"http://{host}"):
        what = "the request comes from another web site, and this server has no tokens"
        raise refuse("wrong-origin", what, "Ask for it at http://127.0.0.1, or make tokens: headway data-token.")


async def read_chunks(request: Request) -> AsyncIterator[bytes]:
    """Yields the body of a request as it comes. Raises ClientLeftError if the connection is cut."""
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientLeftError
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body"):
            return


def answer_json(request: Request, tree: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an answer of JSON, with the digest that the client wants."""
    body = json.dumps(tree, ensure_ascii=False, allow_nan=False).encode()
    algorithm = choose_answer_digest(request.headers)
    digest = {} if algorithm is None else {"repr-digest": format_digest(algorithm, body)}
    return Response(body, status, SAFE_HEADERS | digest | dict(headers or {}), "application/json")


def answer_stored(request: Request, answer: Answer, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the answer to a request that has changed something, for the first time or again."""
    return answer_json(request, dict(answer.body), answer.status, dict(answer.headers) | dict(headers or {}))


def answer_empty(status: int, headers: Mapping[str, str]) -> Response:
    """Returns an answer without a body."""
    return Response(None, status, SAFE_HEADERS | dict(headers))


def answer_problem(request: Request, problem: ProblemError) -> Response:
    """Returns the answer to a request that is refused."""
    tree = problem.to_tree() | {"instance": f"urn:headway:request:{name_request(request)}"}
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in problem.headers}
    if problem.status == 413:
        headers["upload-limit"] = find_state(request).uploads.limit
    body = json.dumps(tree).encode()
    # A header that is malformed may be what is refused here.
    with suppress(ProblemError):
        if (algorithm := choose_answer_digest(request.headers)) is not None:
            headers["repr-digest"] = format_digest(algorithm, body)
    return Response(body, problem.status, SAFE_HEADERS | headers, MEDIA_TYPE.decode())


def name_request(request: Request) -> str:
    """Returns the name of a request, which its problem and the audit log have in common."""
    if not hasattr(request.state, "name"):
        request.state.name = secrets.token_hex(8)
    return str(request.state.name)
