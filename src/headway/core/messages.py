"""Messages for the user: records of the standard `logging` module, with one logger for each room (`headway.training`).

Progress has the level INFO. Things that the user should act upon have the level WARNING.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from headway.core.printable import escape_controls

RUN_ROOMS = ("checkpoint", "comm", "launch", "model", "setup", "training")
"""Rooms whose messages are about the whole run, and not about one process or host: every rank has the same ones."""


def show_messages() -> None:
    """Prints the messages of Headway on standard error from now on, as the command line does."""
    log = logging.getLogger("headway")
    # Replaced, not added: a second call must not print each message twice.
    log.handlers = [_StderrHandler()]
    log.setLevel(logging.INFO)
    # A handler of the user's own code would print each message again.
    log.propagate = False


@contextmanager
def mute_messages(rooms: Sequence[str] = RUN_ROOMS, *, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Drops the messages of some rooms within the block, unless a function returns True when one comes."""

    def passes(_: logging.LogRecord) -> bool:
        return unless()

    # Python applies the filters of a logger to the records of that logger alone, so each room needs the filter.
    loggers = [logging.getLogger(f"headway.{room}") for room in rooms]
    for one in loggers:
        one.addFilter(passes)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(passes)


@final
class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # `sys.stderr` is looked up each time: a progress bar replaces it, to print lines above itself. Names of files
        # and classes come from the user's data: an escape sequence in them could change the terminal.
        print(escape_controls(self.format(record)), file=sys.stderr, flush=True)
