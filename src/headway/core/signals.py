"""Signal handlers for the duration of a block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Installs a handler for the duration of the block and restores the previous ones afterwards.

    Outside the main thread it does nothing: Python refuses handlers there, and the main thread's owner has its own.
    """
    # `signal.signal` returns the previous handler, and raises ValueError outside the main thread.
    try:
        before = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
