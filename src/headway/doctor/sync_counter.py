"""Counts host-device syncs in a few steps, and the calls of the user's lines: torch operations, sleep, locks, and
files.

Counting slows the steps down. So it only classifies a line; `stack_sampler` gives the time of the line.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns, thread_time_ns
from types import FrameType
from typing import Any, Literal, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.doctor.user_code import UserCodeLine, find_user_line
from headway.training.trainer import Trainer

Waits = Literal["sleep", "lock", "file"]

# Operations that need a tensor's values on the host.
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
# C modules whose objects wait for a lock.
_LOCKS = frozenset({"_thread", "_queue"})
# C modules whose objects wait for a file or a connection.
_FILES = frozenset({"_io", "mmap", "_socket", "_ssl"})
_OPENS = frozenset({"_io", "io"})
_POSIX = frozenset({"open", "read", "pread", "readv", "preadv", "write", "pwrite", "writev", "sendfile"})
_POSIX |= {"fsync", "fdatasync", "sync", "stat", "lstat", "listdir", "scandir"}
_WRAPS = ("/torch/_compile.py", "/torch/_dynamo/eval_frame.py")
_NUMPY = frozenset({"fromfile", "tofile"})
# The median of this many empty calls is the overhead of timing one.
EMPTY_CALLS = 99


@final
@dataclass
class LineCounts:
    """Mean calls of one of the user's lines in a step."""

    # Tensor values that the line reads.
    reads: float = 0.0
    # Operations of torch, reads included, and their processor seconds.
    operations: float = 0.0
    operation_s: float = 0.0
    # Seconds of waiting in functions that sleep or take a lock, and all seconds of functions that use a file.
    calls: dict[Waits, float] = field(default_factory=dict)


@final
@dataclass
class SyncCounts:
    """Mean reads of values in one step: number and seconds by lap of the Clock, and the counts of each of the user's
    lines."""

    by_stage: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[UserCodeLine, LineCounts] = field(default_factory=dict)

    @property
    def count(self) -> float:
        """Number of reads in a step, over all laps."""
        return sum(self.by_stage.values())


@final
class _CountingMode(TorchDispatchMode):
    """Counts operations by the user's line, and reads of values since the last lap of the Clock."""

    def __init__(self, counts: SyncCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines = counts.lines
        self.reads, self.read_ns = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, begun, ran = find_user_line(_find_caller()), perf_counter_ns(), thread_time_ns()
        result = func(*args, **(kwargs or {}))
        spent, ran = perf_counter_ns() - begun, thread_time_ns() - ran
        reads = func in _READS
        if reads:
            self.reads += 1
            self.read_ns += spent
        if place is not None:
            line = self._lines.setdefault(place, LineCounts())
            line.reads += reads
            line.operations += 1
            line.operation_s += ran / 1e9
        return result


def _find_caller() -> FrameType | None:
    """Returns the frame that called an operation, from within a dispatch mode, without torch's wrappers."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPS):
        frame = frame.f_back
    return frame


@final
class _CallTimer:
    """Times C functions that the user's lines call, as a profile function of this thread."""

    def __init__(self, counts: SyncCounts) -> None:
        self._lines = counts.lines
        self._open: tuple[Any, Waits, int, int] | None = None
        # Without this correction an empty call counts as 1.5 us, a third of the time of a loop of such calls.
        self._empty_ns, self._spent_ns, nothing, seen = 0, 0, io.BytesIO().tell, []
        with _profile_calls(self):
            for _ in range(EMPTY_CALLS):
                nothing()
                seen.append(self._spent_ns)
        self._empty_ns = int(median(seen))

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            kind = classify_wait(function)
            if kind is not None:
                self._open = function, kind, thread_time_ns(), perf_counter_ns()
        elif self._open is not None and event in ("c_return", "c_exception") and self._open[0] is function:
            ended = perf_counter_ns()
            _, kind, ran, begun = self._open
            self._open = None
            self._spent_ns = spent = max(0, ended - begun - self._empty_ns)
            if kind != "file":
                # Taking a free lock is no wait, so time on the processor does not count.
                spent = max(0, spent - (thread_time_ns() - ran))
            if (place := find_user_line(frame)) is not None:
                calls = self._lines.setdefault(place, LineCounts()).calls
                calls[kind] = calls.get(kind, 0.0) + spent / 1e9


def classify_wait(function: Any) -> Waits | None:
    """Returns what a C function may wait for; None: nothing known."""
    name, module = function.__name__, getattr(function, "__module__", None)
    if module == "time":
        return "sleep" if name == "sleep" else None
    if module in _OPENS:
        return "file"
    if module == "posix":
        return "file" if name in _POSIX else None
    if module is not None:
        return "file" if name in _NUMPY else None
    of = type(getattr(function, "__self__", None)).__module__
    return "lock" if of in _LOCKS else "file" if of in _FILES else None


@final
class _CountingClock:
    """A Clock that adds the reads since the last lap to each lap."""

    def __init__(self, clock: Any, mode: _CountingMode, counts: SyncCounts) -> None:
        self._clock, self._mode, self._counts = clock, mode, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    def lap(self, stage: str) -> None:
        self._clock.lap(stage)
        mode, counts = self._mode, self._counts
        if mode.reads:
            counts.by_stage[stage] = counts.by_stage.get(stage, 0) + mode.reads
            counts.seconds[stage] = counts.seconds.get(stage, 0.0) + mode.read_ns / 1e9
            mode.reads = mode.read_ns = 0


def count_syncs(trainer: Trainer, steps: int = 3) -> SyncCounts:
    """Counts while a Trainer runs some steps. Reads for a record, which wait by design, are left out."""
    counts = SyncCounts()
    mode, clock = _CountingMode(counts), trainer.clock
    trainer.clock = _CountingClock(clock, mode, counts)  # type: ignore[assignment]
    try:
        with mode, count_calls(counts):
            trainer.run(steps)
    finally:
        trainer.clock = clock
    for line in counts.lines.values():
        line.reads /= steps
        line.operations /= steps
        line.operation_s /= steps
        line.calls = {kind: seconds / steps for kind, seconds in line.calls.items()}
    return SyncCounts(
        {stage: count / steps for stage, count in counts.by_stage.items() if stage != "log"},
        {stage: seconds / steps for stage, seconds in counts.seconds.items() if stage != "log"},
        counts.lines,
    )


def count_calls(counts: SyncCounts) -> AbstractContextManager[None]:
    """Counts the time of C functions that the user's lines call within the block, on this thread."""
    return _profile_calls(_CallTimer(counts))


@contextmanager
def _profile_calls(calls: _CallTimer) -> Iterator[None]:
    """Installs a profile function for the block; a debugger's or a profiler's own function pauses meanwhile."""
    before = sys.getprofile()
    sys.setprofile(calls)
    try:
        yield
    finally:
        sys.setprofile(before)
