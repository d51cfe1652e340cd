"""Tracing display: writes the stages of some steps to a trace file, if the recipe asks for one."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, final

from headway.core.clock import Clock, Span
from headway.core.run_folder import RunFolder
from headway.observe import trace
from headway.training.display import Display
from headway.training.trainer import Trainer

SKIPPED_STEPS = 10
"""Steps before the trace begins: the first ones fill caches and queues."""


@final
class TracingDisplay(Display):
    """Passes every call on to another display, and writes the stages of some steps to RUN/trace-RANK.json.

    Args:
        steps: number of steps to trace, from the eleventh step of this process on. 0 traces nothing.
    """

    def __init__(self, display: Display, run: RunFolder, steps: int) -> None:
        self._display, self._run, self._steps = display, run, steps
        self._to_skip = SKIPPED_STEPS
        self._clock: Clock | None = None
        self._rank, self._step, self._since_ns = 0, -1, 0
        self._step_spans: list[Span] = []

    def step(self, trainer: Trainer) -> None:
        self._display.step(trainer)
        # The loop also comes here after actions alone, without a new step.
        if not self._steps or trainer.step == self._step:
            return
        self._step = trainer.step
        if self._to_skip:
            self._to_skip -= 1
            if not self._to_skip:
                self._begin(trainer)
            return
        # Another clock: the ranks have met again, and this one took over the state of another.
        if trainer.clock is not self._clock:
            self._write()
            return
        now_ns = perf_counter_ns()
        self._step_spans.append((f"step {trainer.step}", self._since_ns, now_ns))
        self._since_ns = now_ns
        if len(self._step_spans) == self._steps:
            self._write()

    def record(self, record: dict[str, Any]) -> None:
        self._display.record(record)

    def stop(self) -> None:
        """Stops the other display, and writes the steps traced so far."""
        self._display.stop()
        self._write()

    def _begin(self, trainer: Trainer) -> None:
        self._clock, self._since_ns = trainer.clock, perf_counter_ns()
        self._clock.spans = []
        self._rank = 0 if trainer.ranks is None else trainer.ranks.world.rank

    def _write(self) -> None:
        clock, self._clock, self._steps = self._clock, None, 0
        if clock is None or clock.spans is None:
            return
        stages, clock.spans = clock.spans, None
        # On another host than the lead's the run folder may not exist yet.
        self._run.folder.mkdir(parents=True, exist_ok=True)
        trace.write_trace(self._run.folder / f"trace-{self._rank}.json", self._rank, stages, self._step_spans)
