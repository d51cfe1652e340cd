"""Signals that are answered for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handle_signals(answer: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Within it signals are answered so, and afterwards as before. Elsewhere than on the main thread nothing changes:
    whoever owns that one owns the signals."""
    try:
        before = {number: signal.signal(number, answer) for number in numbers}
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
