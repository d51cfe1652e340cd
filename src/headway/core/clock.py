"""Clock: where wall time went, by stage. It reads the host's clock only and never waits for the device.

On a CPU a stage's time is the work itself. On a GPU it is the time to hand the work over, and the device's own time
shows up in the stages that wait for it (`log`, `evaluate`, `checkpoint`, or `wait` when the queue is full).
"""

from __future__ import annotations

from time import perf_counter_ns

Span = tuple[str, int, int]
"""A stage, and the times of `perf_counter_ns` between which it lay."""


class Clock:
    """Adds the time since the last mark to a stage. A mark takes about 0.15 us.

    Attributes:
        seconds: wall seconds of each stage so far, by name.
        spans: where it is set to a list, every mark adds what it ends; None: nothing is kept.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self._ns: dict[str, int] = {stage: int(value * 1e9) for stage, value in (seconds or {}).items()}
        self.spans: list[Span] | None = None
        self._last = perf_counter_ns()

    def start(self) -> None:
        """Sets the mark; the time before it belongs to no stage."""
        self._last = perf_counter_ns()

    def lap(self, stage: str) -> None:
        """Adds the time since the last mark to `stage`, and sets the mark."""
        now = perf_counter_ns()
        self._ns[stage] = self._ns.get(stage, 0) + now - self._last
        if self.spans is not None:
            self.spans.append((stage, self._last, now))
        self._last = now

    @property
    def seconds(self) -> dict[str, float]:
        return {stage: ns / 1e9 for stage, ns in self._ns.items()}

    def total_seconds(self) -> float:
        """Wall seconds of all stages together."""
        return sum(self._ns.values()) / 1e9
