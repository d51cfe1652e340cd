"""Numbers of the server in Prometheus' text format 0.0.4. All of them are changed by the event loop's thread alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import final

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
# Upper bounds in seconds: 0.5 ms is a small network at batch 1, 10 s a client that waits behind a full queue.
LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@final
class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        # One more for the values above the last bound.
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def format_lines(self, name: str) -> list[str]:
        """Returns the lines of the page, without help and type."""
        lines, total = [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            # Prometheus wants cumulative counts.
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum!r}", f"{name}_count {total}"]


@final
class ServeMetrics:
    """All numbers of a server.

    Attributes:
        requests: requests to /predict by HTTP status.
        latency: seconds from the end of a request's headers to its answer, of requests that are answered 200.
        batches: images computed at once.
        decode_failures: images that could not be decoded.
        swaps: exports that were swapped in ("done"), or refused ("refused").
        dropped: connections that the server closed, by reason.
        shadow: answers of the shadow export by result: same, different, dropped, failed.
        shadow_difference: largest difference of an output between the two exports.
        compute_s, decode_s: seconds of the inference thread.
    """

    def __init__(self) -> None:
        self.requests = Counter[int]()
        self.latency = Histogram(LATENCY_BUCKETS)
        self.batches = Histogram(BATCH_BUCKETS)
        self.decode_failures = 0
        self.swaps = Counter[str]()
        self.dropped = Counter[str]()
        self.shadow = Counter[str]()
        self.shadow_difference = 0.0
        self.compute_s = 0.0
        self.decode_s = 0.0
        # Values that are read when the page is asked for, by name and help.
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def add_gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Adds a number that is read when the page is asked for."""
        self._gauges[name] = (help_text, read)

    def add_shadow(self, result: str, images: int, difference: float) -> None:
        """Counts answers of the shadow export; see `Shadow`."""
        self.shadow[result] += images
        self.shadow_difference = max(self.shadow_difference, difference)

    def format_page(self) -> bytes:
        """Returns the whole page."""
        lines = list[str]()

        def put(name: str, kind: str, help_text: str, body: Sequence[str]) -> None:
            lines.extend((f"# HELP headway_serve_{name} {help_text}", f"# TYPE headway_serve_{name} {kind}", *body))

        def put_counts(name: str, label: str, help_text: str, counts: Counter[str] | Counter[int]) -> None:
            body = [f'headway_serve_{name}{{{label}="{key}"}} {counts[key]}' for key in sorted(counts)]  # type: ignore
            put(name, "counter", help_text, body)

        put_counts("requests_total", "status", "Requests to /predict by HTTP status.", self.requests)
        latency, batch = "request_seconds", "batch_images"
        put(latency, "histogram", "Latency of answers.", self.latency.format_lines(f"headway_serve_{latency}"))
        put(batch, "histogram", "Images computed at once.", self.batches.format_lines(f"headway_serve_{batch}"))
        for name, help_text, value in (
            ("decode_failures_total", "Images that could not be decoded.", self.decode_failures),
            ("decode_seconds_total", "Time spent on decoding.", self.decode_s),
            ("compute_seconds_total", "Time spent in the network.", self.compute_s),
        ):
            put(name, "counter", help_text, [f"headway_serve_{name} {value!r}"])
        put_counts("swaps_total", "result", "Exports that were swapped in or refused.", self.swaps)
        put_counts("dropped_connections_total", "reason", "Connections that the server closed.", self.dropped)
        put_counts("shadow_answers_total", "result", "Answers of the shadow export.", self.shadow)
        put(
            "shadow_max_difference",
            "gauge",
            "Largest difference of an output between the two exports.",
            [f"headway_serve_shadow_max_difference {self.shadow_difference!r}"],
        )
        for name, (help_text, read) in self._gauges.items():
            put(name, "gauge", help_text, [f"headway_serve_{name} {read()!r}"])
        return ("\n".join(lines) + "\n").encode()
