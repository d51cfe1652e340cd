"""Wall time of a training loop by stage, from the host's clock; it never waits for the device.

On a CPU a stage's time is the work itself. On a GPU it is the time to launch the work; device time appears in the
stages that wait for the device (`log`, `evaluate`, `checkpoint`, or `wait` when the launch queue is full).

A stage does not include the time that this rank waited for exchanges in it: each exchange is a stage of its own.
"""

from __future__ import annotations

from time import perf_counter_ns

from headway.core.exchange_waits import ExchangeWaits

# A stage, with its start and end by `perf_counter_ns`.
Span = tuple[str, int, int]

STEP_STAGES = frozenset({"augment", "forward", "loss", "backward", "reduce", "optimizer"})
"""Stages of a step. What is exchanged in others, such as evaluations, belongs to these."""


class Clock:
    """Attributes wall time to stages, about 0.15 us a mark.

    Attributes:
        seconds: wall seconds of each stage so far, by name.
        spans: None, or a list that receives each finished stage (for traces), with its exchanges.
        waits: where the waits for exchanges are added up; None: there are none.
    """

    def __init__(self, seconds: dict[str, float] | None = None, waits: ExchangeWaits | None = None) -> None:
        self._ns: dict[str, int] = {stage: int(value * 1e9) for stage, value in (seconds or {}).items()}
        self.spans: list[Span] | None = None
        self.waits = waits
        self._last = perf_counter_ns()

    def start(self) -> None:
        """Sets the mark. The time before it belongs to no stage."""
        self._last = perf_counter_ns()

    def lap(self, stage: str) -> None:
        """Adds the time since the last mark to `stage` and sets the mark."""
        # Whole nanoseconds: sums of floats would drift over millions of steps.
        now = perf_counter_ns()
        spent = now - self._last
        if self.waits is not None and (waits := self.waits.take()) and stage in STEP_STAGES:
            for exchange, ns in waits.items():
                self._ns[exchange] = self._ns.get(exchange, 0) + ns
            spent -= sum(waits.values())
        self._ns[stage] = self._ns.get(stage, 0) + spent
        if self.spans is not None:
            self.spans.append((stage, self._last, now))
        self._last = now

    def add(self, stage: str, seconds: float) -> None:
        """Adds seconds to a stage that another clock's time has; the mark stays."""
        self._ns[stage] = self._ns.get(stage, 0) + int(seconds * 1e9)

    @property
    def seconds(self) -> dict[str, float]:
        return {stage: ns / 1e9 for stage, ns in self._ns.items()}

    def total_seconds(self) -> float:
        """Returns the wall seconds of all stages together."""
        return sum(self._ns.values()) / 1e9
