"""Samples the Python stack of the training thread: which lines of the user's code it is at, and whether it waits there.

A timer's signal lets the thread itself look, a thousand times a second: another thread would come to look where this
one lets go of the interpreter, which is in torch and not in Python, and Python 3.11 crashes now and then where a thread
walks the frames of another one that runs. A look takes some 20 us, so that steps take some 2 % longer meanwhile: it is
for shares of the time, not for rates. Time in which the thread was ready to run and other programs had its core is left
out, so that a busy machine changes no share.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import defaultdict
from time import perf_counter, thread_time
from types import FrameType, TracebackType
from typing import Any, final

from headway.doctor.user_code import CodeLine, find_user_line

EVERY_S = 0.001


@final
class StackSampler:
    """Looks at the thread that enters its block, until the block ends. It has to be the main thread, as signals go
    there; in another one nothing is seen. `signal.SIGALRM` and its timer are in use meanwhile.

    Attributes:
        total_s: seconds that were looked at.
        seconds: of these, by the user's line; what torch and Headway do for themselves is in none.
        waited: of those seconds, the ones in which the thread did not run.
        collected: seconds of garbage collections, by the line that set them off; not in `seconds`. None: no user's.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.seconds, self.waited = defaultdict[CodeLine, float](float), defaultdict[CodeLine, float](float)
        self.collected = defaultdict[CodeLine | None, float](float)
        self._schedule = -1
        self._collecting: tuple[float, CodeLine | None] | None = None
        self._collected_s, self._looking = 0.0, False
        self._last = (0.0, 0.0, 0.0, 0.0)

    def __enter__(self) -> StackSampler:
        self._looks = threading.current_thread() is threading.main_thread()
        if not self._looks:
            return self
        try:
            self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            # A kernel that keeps no such count.
            self._schedule = -1
        gc.callbacks.append(self._collection)
        self._last = self._clocks()
        self._handler = signal.signal(signal.SIGALRM, self._look)
        # Calls that it interrupts are taken up again, also those of libraries that do not look for it.
        signal.siginterrupt(signal.SIGALRM, False)
        self._timer = signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._looks:
            return
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._handler if self._handler is not None else signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, *self._timer)
        # What was since the last look.
        self._note(sys._getframe(1))
        gc.callbacks.remove(self._collection)
        if self._schedule >= 0:
            os.close(self._schedule)

    def _look(self, number: int, frame: FrameType | None) -> None:
        # In the callback of a collection, which is about to say how long it took; or in another look, which on a busy
        # machine may take longer than the time to the next signal.
        if self._collecting is not None or self._looking:
            return
        self._looking = True
        try:
            self._note(frame)
        finally:
            self._looking = False

    def _note(self, frame: FrameType | None) -> None:
        place, now = find_user_line(frame), self._clocks()
        wall, ran, queued, collected = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        # Each look stands for all that was since the one before it.
        spent = max(0.0, wall - queued - collected)
        self.total_s += spent + collected
        if place is not None:
            self.seconds[place] += spent
            self.waited[place] += max(0.0, spent - max(0.0, ran - collected))

    def _clocks(self) -> tuple[float, float, float, float]:
        """Seconds that have passed, that the thread has run, has been ready to run without a core, and has collected
        garbage."""
        queued = 0.0
        if self._schedule >= 0:
            queued = int(os.pread(self._schedule, 64, 0).split()[1]) / 1e9
        return perf_counter(), thread_time(), queued, self._collected_s

    def _collection(self, phase: str, info: dict[str, Any]) -> None:
        """Notes the time of a collection, on whatever thread: it holds them all up."""
        if phase == "start":
            own = threading.current_thread() is threading.main_thread()
            self._collecting = perf_counter(), find_user_line(sys._getframe(1)) if own else None
        elif self._collecting is not None:
            begun, place = self._collecting
            spent = perf_counter() - begun
            self.collected[place] += spent
            self._collected_s += spent
            self._collecting = None
