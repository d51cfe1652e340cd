"""Samples the Python stack of the training thread: which lines of the user's code run, and whether they wait.

A timer signal makes the thread itself look, 1,000 times a second. A second thread would only see moments in which this
one releases the interpreter lock, which is in torch and not in Python; and Python 3.11 sometimes crashes when a thread
walks the frames of another one that runs. One look takes about 20 us, so steps take about 2 % longer: use it for shares
of the time, not for rates. Time in which the thread was ready but had no core is left out, so a busy machine changes no
share.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import defaultdict
from time import perf_counter, thread_time
from types import FrameType
from typing import Any, final

from headway.doctor.user_code import UserCodeLine, find_user_line

EVERY_S = 0.001


@final
class StackSampler:
    """Samples the main thread from the beginning to the end of its block. In another thread it sees nothing, because
    signals go to the main thread. `signal.SIGALRM` and its timer are in use meanwhile.

    Attributes:
        total_s: seconds sampled.
        seconds: of these, by the user's line; time of torch and Headway themselves is in none.
        waited: the part of `seconds` in which the thread did not run.
        collected: seconds of garbage collections, by the line that triggered them; not in `seconds`. None: not the
            user's.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.seconds, self.waited = defaultdict[UserCodeLine, float](float), defaultdict[UserCodeLine, float](float)
        self.collected = defaultdict[UserCodeLine | None, float](float)
        self._schedule = -1
        self._collecting: tuple[float, UserCodeLine | None] | None = None
        self._collected_s, self._looking = 0.0, False
        self._last = (0.0, 0.0, 0.0, 0.0)

    def __enter__(self) -> StackSampler:
        self._looks = threading.current_thread() is threading.main_thread()
        if not self._looks:
            return self
        try:
            self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            # The kernel does not count it.
            self._schedule = -1
        gc.callbacks.append(self._collection)
        self._last = self._clocks()
        self._handler = signal.signal(signal.SIGALRM, self._look)
        # System calls that the signal interrupts restart, also in libraries that do not handle EINTR.
        signal.siginterrupt(signal.SIGALRM, False)
        self._timer = signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._looks:
            return
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._handler if self._handler is not None else signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, *self._timer)
        # The time since the last look still counts.
        self._note(sys._getframe(1))
        gc.callbacks.remove(self._collection)
        if self._schedule >= 0:
            os.close(self._schedule)

    def _look(self, number: int, frame: FrameType | None) -> None:
        # Skip during a garbage collection, which is timed by itself, and during another look, which on a busy machine
        # may last longer than the time to the next signal.
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
        # Each look stands for all time since the one before it.
        spent = max(0.0, wall - queued - collected)
        self.total_s += spent + collected
        if place is not None:
            self.seconds[place] += spent
            self.waited[place] += max(0.0, spent - max(0.0, ran - collected))

    def _clocks(self) -> tuple[float, float, float, float]:
        """Returns seconds passed, run on a core, ready without a core, and spent in garbage collections."""
        queued = 0.0
        if self._schedule >= 0:
            queued = int(os.pread(self._schedule, 64, 0).split()[1]) / 1e9
        return perf_counter(), thread_time(), queued, self._collected_s

    def _collection(self, phase: str, info: dict[str, Any]) -> None:
        """Times a garbage collection on any thread: it stops them all."""
        if phase == "start":
            own = threading.current_thread() is threading.main_thread()
            self._collecting = perf_counter(), find_user_line(sys._getframe(1)) if own else None
        elif self._collecting is not None:
            begun, place = self._collecting
            spent = perf_counter() - begun
            self.collected[place] += spent
            self._collected_s += spent
            self._collecting = None
