"""Page with the numbers of a run for Prometheus, which polls it."""

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

# The loopback interface, because the page has no password.
DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 9400
PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds between two checks whether this process has become the leader.
LEADER_CHECK_S = 0.25


@final
class PrometheusEndpoint:
    """Serves the page from a thread for the duration of the block.

    Args:
        address: IP address of the interface; `0.0.0.0` and `::` are all interfaces.
        port: TCP port.
        gauges: Returns the numbers by name; called in the server's thread.
        labels: Labels of every number.
        is_lead: Tells if this process leads the run. If the leader is lost, the next one takes over the port.

    Raises:
        UsageError: At the start of the block: the port is in use, or the host does not have the address.
    """

    def __init__(
        self,
        address: str,
        port: int,
        gauges: Callable[[], Mapping[str, float]],
        labels: Mapping[str, str],
        is_lead: Callable[[], bool] = lambda: True,
    ) -> None:
        self._address, self._port = address, port
        self._is_lead = is_lead
        self._gauges = gauges
        self._labels = labels
        self._server: MetricsServer | None = None
        self._stop = threading.Event()
        # A daemon: a rank that waits to take over must not keep a process alive.
        self._thread = threading.Thread(target=self._take_over, name="headway-prometheus", daemon=True)

    def __enter__(self) -> PrometheusEndpoint:
        # The leader fails here, before the first step, if the port is in use; the others wait to take over.
        if self._is_lead():
            self._server = self._start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        # A thread that never started cannot be joined.
        if self._thread.ident is not None:
            self._thread.join()
        if self._server is not None:
            self._server.stop()

    def _take_over(self) -> None:
        """Waits until this process leads the run, then starts the server."""
        while not self._stop.wait(LEADER_CHECK_S):
            if self._is_lead():
                try:
                    self._server = self._start()
                # The run is under way: a missing endpoint is no reason to stop it.
                except UsageError as error:
                    LOG.warning("%s", error)
                return

    def _start(self) -> MetricsServer:
        try:
            return MetricsServer(self._address, self._port, PATH, CONTENT_TYPE, self._build_page)
        except OSError as error:
            what = f"port {self._port} of {self._address} cannot be used for Prometheus ({describe_os_error(error)})"
            fix = "Set another port, or remove prometheus from sinks."
            raise UsageError(what, where="observe.prometheus_port", fix=fix) from error

    def _build_page(self) -> str:
        return format_exposition(self._gauges(), self._labels)


def format_exposition(gauges: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Returns numbers in Prometheus' text format 0.0.4, as gauges `headway_NAME`.

    Characters that a name may not contain become `_`. If two names become equal, the first one is kept, because
    Prometheus refuses a page with both.
    """
    value_by_metric: dict[str, float] = {}
    for name, value in gauges.items():
        value_by_metric.setdefault(re.sub(r"[^a-zA-Z0-9_]", "_", f"headway_{name}"), value)
    label_text = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return "".join(
        f"# TYPE {name} gauge\n{name}{{{label_text}}} {_format_number(value)}\n"
        for name, value in value_by_metric.items()
    )


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _format_number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
