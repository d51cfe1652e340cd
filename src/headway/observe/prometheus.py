"""A page of a run's numbers for Prometheus, which asks for it as often as it wants them."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import final

from headway.core.errors import UsageError
from headway.core.files import describe_os_error
from headway.observe.metrics_server import MetricsServer

LOG = logging.getLogger("headway.observe")

ADDRESS, PORT = "127.0.0.1", 9400
PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LEADER_CHECK_S = 0.25
"""Between two looks whether this process leads now."""


@final
class PrometheusEndpoint:
    """Serves the page from a thread of its own for as long as its block lasts.

    Args:
        address: the IP address of the host's interface; `0.0.0.0` and `::` are all of them.
        gauges: the numbers by name, asked for in that thread.
        labels: of every number.
        leads: whether this process speaks for the run. Another one takes the port once that is lost.

    Raises:
        UsageError: where the block begins: the port is taken, or the host has no such address.
    """

    def __init__(
        self,
        address: str,
        port: int,
        gauges: Callable[[], Mapping[str, float]],
        labels: Mapping[str, str],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._address, self._port, self._leads = address, port, leads
        self._gauges, self._labels = gauges, labels
        self._server: MetricsServer | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._take_over, name="headway-prometheus", daemon=True)

    def __enter__(self) -> PrometheusEndpoint:
        if self._leads():
            self._server = self._start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._server is not None:
            self._server.stop()

    def _take_over(self) -> None:
        while not self._stop.wait(LEADER_CHECK_S):
            if self._leads():
                try:
                    self._server = self._start()
                except UsageError as error:  # in the middle of a run, which goes on
                    LOG.warning("%s", error)
                return

    def _start(self) -> MetricsServer:
        try:
            return MetricsServer(self._address, self._port, PATH, CONTENT_TYPE, self._build_page)
        except OSError as error:
            what = f"port {self._port} of {self._address} for Prometheus cannot be used ({describe_os_error(error)})"
            fix = "Name another one, or take prometheus out of sinks."
            raise UsageError(what, where="observe.prometheus_port", fix=fix) from error

    def _build_page(self) -> str:
        return format_exposition(self._gauges(), self._labels)


def format_exposition(gauges: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """The numbers in Prometheus' text format 0.0.4. What a name may not hold becomes `_`; of two names that are then
    one, the first is told."""
    told: dict[str, float] = {}
    for name, value in gauges.items():
        told.setdefault(re.sub(r"[^a-zA-Z0-9_]", "_", f"headway_{name}"), value)
    inside = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return "".join(f"# TYPE {name} gauge\n{name}{{{inside}}} {_format_number(value)}\n" for name, value in told.items())


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _format_number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
