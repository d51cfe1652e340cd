"""PixelBudget: how many pixels may be decoded at once. A small file can hold many of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class PixelBudget:
    """Lets threads decode images as long as all of them together have few pixels; who asks first is first.

    Args:
        most: pixels at once. Who asks for more gets all of them.
    """

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._waiting = deque[object]()
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """Waits until there is room for so many pixels, and keeps it for the block. 0 does not wait in the line."""
        if not pixels:
            yield
            return
        amount, ticket = min(pixels, self._most), object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and self._held + amount <= self._most)
            self._waiting.popleft()
            self._held += amount
            # The next one may fit too.
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= amount
                self._changed.notify_all()
