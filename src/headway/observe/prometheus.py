"""A page of a run's numbers for Prometheus, which asks for it as often as it wants them."""

from __future__ import annotations

import logging
import math
import re
import socketserver
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, final

from headway.core.errors import UsageError

LOG = logging.getLogger("headway.observe")

PORT = 9400
PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOOK_S = 0.25
"""How long the end of a run waits for the server at most, unless somebody is just asking."""
SILENT_S = 2.0
"""After which one who has connected and does not ask is left: others wait meanwhile."""


@final
class Endpoint:
    """Serves the page from a thread of its own for as long as its block lasts, on all interfaces of the host.

    Args:
        gauges: the numbers by name, asked for in that thread.
        labels: of every number.
        leads: whether this process speaks for the run. Another one takes the port once that is lost.

    Raises:
        UsageError: where the block begins: the port is taken.
    """

    def __init__(
        self,
        port: int,
        gauges: Callable[[], Mapping[str, float]],
        labels: Mapping[str, str],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._port, self._gauges, self._labels, self._leads = port, gauges, labels, leads
        self._server: _Server | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-prometheus", daemon=True)

    def __enter__(self) -> Endpoint:
        if self._leads():
            self._server = self._bound()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._server is not None:
            self._server.server_close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._server is not None:
                self._server.handle_request()
            elif not self._leads():
                self._stop.wait(LOOK_S)
            else:
                try:
                    self._server = self._bound()
                except UsageError as error:  # in the middle of a run, which goes on
                    LOG.warning("%s", error)
                    return

    def _bound(self) -> _Server:
        try:
            server = _Server(("", self._port), _handler(self._page))
        except OSError as error:
            what = f"the port {self._port} for Prometheus cannot be used ({error.strerror or error})"
            fix = "Name another one, or take prometheus out of sinks."
            raise UsageError(what, where="observe.prometheus_port", fix=fix) from error
        server.timeout = LOOK_S
        return server

    def _page(self) -> str:
        return exposition(self._gauges(), self._labels)


def exposition(gauges: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """The numbers in Prometheus' text format 0.0.4. What a name may not hold becomes `_`; of two names that are then
    one, the first is told."""
    told: dict[str, float] = {}
    for name, value in gauges.items():
        told.setdefault(re.sub(r"[^a-zA-Z0-9_]", "_", f"headway_{name}"), value)
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "".join(f"# TYPE {name} gauge\n{name}{{{inside}}} {_number(value)}\n" for name, value in told.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


@final
class _Server(socketserver.TCPServer):
    """As http.server's, which would ask the network for the host's name, and tell of clients that left."""

    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        LOG.debug("somebody who asked for the numbers left", exc_info=True)


def _handler(page: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    @final
    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_S
        server_version = "Headway"

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != PATH:
                self.send_error(404, explain=f"The numbers are at {PATH}.")
                return
            body = page().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
