"""Tells what the user's lines do with the time that a sampler has seen them take."""

from __future__ import annotations

import linecache
from collections.abc import Mapping

from headway.core.profile import What
from headway.doctor.stack_sampler import StackSampler
from headway.doctor.sync_counter import LineCounts, SyncCounts
from headway.doctor.user_code import FORWARD, CodeLine

Spent = dict[tuple[CodeLine, What], float]

MOSTLY = 0.5
"""Share of a line's time that torch, a function, or waiting takes, from which on that is what the line does."""
WAITS = 0.3
"""Share of it that it waits at least, where it calls what sleeps or takes a lock."""
ALMOST_ALL = 0.75
"""The same of waiting for nothing that is known: on a busy machine a thread waits for the interpreter too."""
READS = 0.3
"""The same of reading values: in Python, what picks one out and what is done with it take as long as reading it."""
LITTLE = 0.003
"""Share of all time, below which a line is left where it is: a few looks at it tell nothing."""

ELSEWHERE = CodeLine(FORWARD, "", 0)
"""Stands for a line that is not the user's."""


def classify(
    seconds: float, waited: float, line: LineCounts, place: CodeLine, *, read_s: float, on_cpu: bool
) -> What | None:
    """Tells what a line of the user's does in a step; None: it calls operations of torch.

    Args:
        seconds: that it takes of a step. waited: of these, without running.
        line: what it was seen to call. read_s: seconds of picking out and reading one value.
        on_cpu: the tensors are on the host. On a device of its own, who reads a value waits for all that was launched.
    """
    if line.reads and (not on_cpu or line.reads * read_s >= READS * seconds):
        return "sync"
    # Calling an operation costs about half of what reading a value does, beside what the operation takes itself.
    if line.operation_s + line.operations * read_s / 2 >= MOSTLY * seconds:
        return None
    if line.calls:
        kind = max(line.calls, key=lambda one: line.calls[one])
        if line.calls[kind] >= MOSTLY * seconds and (kind == "file" or waited >= WAITS * seconds):
            return kind
    # `with lock:` calls no function that could be seen.
    takes = linecache.getline(place.file, place.line).lstrip().startswith(("with ", "async with "))
    if waited < (MOSTLY if takes else ALMOST_ALL) * seconds:
        return "python"
    return "lock" if takes else "sleep"


def attribute_time(
    seen: StackSampler, syncs: SyncCounts, *, steps: int, step_s: float, read_s: float, on_cpu: bool
) -> tuple[Spent, dict[CodeLine, What | None]]:
    """Tells the seconds of a step that the user's lines take, by what they do; and what each line was found to do.

    Args:
        steps: that the sampler has seen. step_s: seconds of one, of which the sampler's shares are: on a busy machine
            more than what it has seen of each.
    """
    spent: Spent = {}
    known: dict[CodeLine, What | None] = {}
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
    for setting_off, seconds in seen.collected.items():
        if seconds >= LITTLE * seen.total_s:
            spent[setting_off or ELSEWHERE, "gc"] = seconds * scale
    return spent, known


def compute_own_share(seen: StackSampler, known: Mapping[CodeLine, What | None]) -> float:
    """Tells the share of a sampler's time that lines take which are known not to call torch, collections included."""
    if not seen.total_s:
        return 0.0
    lines = sum(seconds for place, seconds in seen.seconds.items() if known.get(place) is not None)
    return (lines + sum(seen.collected.values())) / seen.total_s
