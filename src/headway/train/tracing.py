"""A display that also takes a trace of some steps, where the recipe asks for one."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, final

from headway.core.clock import Clock, Span
from headway.core.run_folder import RunFolder
from headway.observe import trace
from headway.train.progress import Bar, OneOfMany
from headway.train.trainer import Display, Trainer

FIRST = 10
"""Steps before the trace begins: the first ones fill caches and queues."""


@final
class Traced(Display):
    """Shows what another display shows, and writes the stages of so many steps to RUN/trace-RANK.json.

    Args:
        steps: from the eleventh step of this process on; 0: none, which costs a call a step.
    """

    def __init__(self, display: Display, run: RunFolder, steps: int) -> None:
        self._display, self._run, self._steps = display, run, steps
        self._ahead = FIRST
        self._clock: Clock | None = None
        self._rank, self._step, self._since_ns = 0, -1, 0
        self._seen: list[Span] = []

    def step(self, trainer: Trainer) -> None:
        self._display.step(trainer)
        if not self._steps or trainer.step == self._step:
            return
        self._step = trainer.step
        if self._ahead:
            self._ahead -= 1
            if not self._ahead:
                self._begin(trainer)
            return
        if trainer.clock is not self._clock:  # the ranks have met again, in the state of another one
            self._write()
            return
        now_ns = perf_counter_ns()
        self._seen.append((f"step {trainer.step}", self._since_ns, now_ns))
        self._since_ns = now_ns
        if len(self._seen) == self._steps:
            self._write()

    def record(self, record: dict[str, Any]) -> None:
        self._display.record(record)

    def stop(self) -> None:
        """Leaves the terminal as it was, and writes what there is of a trace."""
        if isinstance(self._display, Bar | OneOfMany):
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
        self._run.folder.mkdir(parents=True, exist_ok=True)  # on a host of its own, the lead's folder is elsewhere
        trace.write_trace(self._run.folder / f"trace-{self._rank}.json", self._rank, stages, self._seen)
