"""Attributes the time that the stack sampler saw in the user's lines to what these lines do."""

from __future__ import annotations

import linecache
from collections.abc import Mapping

from headway.core.profile import CodeActivity
from headway.doctor.stack_sampler import StackSampler
from headway.doctor.sync_counter import LineCounts, SyncCounts
from headway.doctor.user_code import FORWARD, UserCodeLine

Spent = dict[tuple[UserCodeLine, CodeActivity], float]

# A line is called by what takes this share of its time: torch, a waiting function, or a file.
MOSTLY = 0.5
# A line that calls sleep or takes a lock is called waiting from this share of its time.
WAITS = 0.3
# The same for a line without a known cause: on a busy machine a thread waits for the interpreter lock too.
ALMOST_ALL = 0.75
# The same for reading values: in Python, indexing a tensor and using the value take as long as the read itself.
READS = 0.3
# Lines below this share of all time are left out: a few samples are too few to classify them.
LITTLE = 0.003

# Stands for code that is not the user's.
ELSEWHERE = UserCodeLine(FORWARD, "", 0)


def classify(
    seconds: float, waited: float, line: LineCounts, place: UserCodeLine, *, read_s: float, on_cpu: bool
) -> CodeActivity | None:
    """Classifies what a line of the user's does in a step; None: it calls operations of torch.

    Args:
        seconds: time of the line in a step. waited: the part in which the thread did not run.
        line: the calls that were counted in it. read_s: seconds to index and read one value.
        on_cpu: tensors are on the host. On another device, reading a value waits for all launched kernels.
    """
    # On a GPU any read is a host-device sync, so the share of the time does not matter.
    if line.reads and (not on_cpu or line.reads * read_s >= READS * seconds):
        return "sync"
    # The call of an operation costs about half as much as reading a value, plus the time of the operation.
    if line.operation_s + line.operations * read_s / 2 >= MOSTLY * seconds:
        return None
    if line.calls:
        kind = max(line.calls, key=lambda one: line.calls[one])
        if line.calls[kind] >= MOSTLY * seconds and (kind == "file" or waited >= WAITS * seconds):
            return kind
    # `with lock:` makes no call that a profile function sees, so the source line itself is read.
    takes = linecache.getline(place.file, place.line).lstrip().startswith(("with ", "async with "))
    if waited < (MOSTLY if takes else ALMOST_ALL) * seconds:
        return "python"
    return "lock" if takes else "sleep"


def attribute_time(
    seen: StackSampler, syncs: SyncCounts, *, steps: int, step_s: float, read_s: float, on_cpu: bool
) -> tuple[Spent, dict[UserCodeLine, CodeActivity | None]]:
    """Returns the seconds of a step that the user's lines take, by line and class, and the class of each line.

    Args:
        steps: number of steps that the sampler saw. step_s: measured seconds of a step. The shares of the sampler are
            applied to it, because on a busy machine the sampler itself sees less time than a step takes.
    """
    spent: Spent = {}
    known: dict[UserCodeLine, CodeActivity | None] = {}
    if not seen.total_s or not steps:
        return spent, known
    scale = step_s / seen.total_s
    for place, seconds in seen.seconds.items():
        if seconds < LITTLE * seen.total_s:
            continue
        line = syncs.lines.get(place, LineCounts())
        waited = seen.waited[place] / steps
        what = classify(seconds / steps, waited, line, place, read_s=read_s, on_cpu=on_cpu)
        known[place] = what
        if what is not None:
            spent[place, what] = seconds * scale
    # Garbage collections count for the line that triggered them.
    for trigger, seconds in seen.collected.items():
        if seconds >= LITTLE * seen.total_s:
            spent[trigger or ELSEWHERE, "gc"] = seconds * scale
    return spent, known


def compute_own_share(seen: StackSampler, known: Mapping[UserCodeLine, CodeActivity | None]) -> float:
    """Returns the share of the sampler's time in garbage collections and in lines that do not call torch."""
    if not seen.total_s:
        return 0.0
    lines = sum(seconds for place, seconds in seen.seconds.items() if known.get(place) is not None)
    return (lines + sum(seen.collected.values())) / seen.total_s
