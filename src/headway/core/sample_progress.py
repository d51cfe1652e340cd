"""Progress of a single pass over many samples, such as packing a data set or filling a cache."""

from __future__ import annotations

import logging
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, final

from headway.core.printable import escape_controls

if TYPE_CHECKING:
    from rich.progress import Progress

FIRST_UPDATE_S = 1.0
"""Seconds before the first update; shorter passes show nothing."""
BAR_INTERVAL_S = 0.2
"""Seconds between updates of the bar on a terminal."""
LOG_INTERVAL_S = 5.0
"""Seconds between messages if there is no terminal."""


@final
class SampleProgress:
    """Shows a bar on a terminal, or a message every few seconds.

    Call it with (samples done, total) from one thread, inside a `with` block, which removes the bar at its end.

    Args:
        what: name of the work, such as "Packing".
        unit: the counted things, such as "images".
        log: logger for the messages if there is no terminal. Default: no messages.
    """

    def __init__(self, what: str, unit: str, log: logging.Logger | None = None) -> None:
        self._what, self._unit, self._log = what, unit, log
        self._next_update = perf_counter() + FIRST_UPDATE_S
        self._bar: Progress | None = None
        self._is_terminal = False

    def __call__(self, done: int, total: int) -> None:
        # Called once per sample: a clock reading is all that most calls cost.
        now = perf_counter()
        if now < self._next_update:
            return
        if self._bar is None:
            self._bar = self._start_bar()
        if self._is_terminal:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, refresh=True)
        elif self._log is not None:
            self._log.info(f"{self._what}: {done:,} of {total:,} {self._unit}.")
        self._next_update = now + (BAR_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S)

    def __enter__(self) -> SampleProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _start_bar(self) -> Progress:
        # Imported here: rich takes a tenth of a second, and most passes take less.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        # Neither a format nor markup: file names and patterns contain braces and brackets.
        what = TextColumn("{task.description}", markup=False)
        columns = (what, BarColumn(), MofNCompleteColumn(), TextColumn(self._unit))
        # No refresh thread: it would compete with the work for the interpreter lock.
        bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not self._is_terminal,
        )
        bar.add_task(escape_controls(self._what, lines=False), total=None)
        bar.start()
        return bar
