"""Counter: how far something has come that goes through many samples once, as packing or filling a cache does."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, final

from headway.core.printable import escape_controls

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 1.0
"""Nothing is shown of what takes less."""
REFRESH_S = 0.2
"""Between two pictures of the bar."""
LINE_S = 5.0
"""Between two lines."""


@final
class Counter:
    """A bar on a terminal; elsewhere a line every few seconds, where there is somebody to `say` them to.

    Call it with (samples done, samples in all), in one thread, and leave it as a context, so that the bar goes.

    Args:
        what: is done, such as "Packing".
        unit: what is counted, such as "images".
    """

    def __init__(self, what: str, unit: str, say: Callable[[str], object] | None = None) -> None:
        self._what, self._unit, self._say = what, unit, say
        self._next = perf_counter() + PATIENCE_S
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        now = perf_counter()
        if now < self._next:
            return
        if self._bar is None:
            self._bar = self._begun()
        if not self._bar.disable:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, refresh=True)
        elif self._say is not None:
            self._say(f"{self._what}: {done:,} of {total:,} {self._unit}.")
        self._next = now + (LINE_S if self._bar.disable else REFRESH_S)

    def __enter__(self) -> Counter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _begun(self) -> Progress:
        # Here, since it takes a tenth of a second to import, and most of what is counted takes less.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        # Not as a format or markup: it may name files, and a pattern has braces and brackets.
        what = TextColumn("{task.description}", markup=False)
        columns = (what, BarColumn(), MofNCompleteColumn(), TextColumn(self._unit))
        # No thread of its own draws it: one would take the interpreter's lock from what is counted.
        bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        bar.add_task(escape_controls(self._what, lines=False), total=None)
        bar.start()
        return bar
