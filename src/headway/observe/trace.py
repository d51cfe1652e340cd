"""Trace of a run's stages for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.core.clock import Span
from headway.core.files import write_atomically

# Rows of a process in the trace.
STEP_ROW = 1
STAGE_ROW = 2


def write_trace(path: Path, rank: int, stages: Sequence[Span], steps: Sequence[Span]) -> None:
    """Writes one rank's spans in the Trace Event Format, as complete events.

    Args:
        path: File to write.
        rank: Rank whose spans these are.
        stages: Spans of the stages.
        steps: Spans of the steps.

    Times are microseconds of this host's monotonic clock, which its processes share. Adding `epoch_us` gives the time
    of day, which aligns the traces of several hosts.
    """
    epoch_us = (time.time_ns() - time.perf_counter_ns()) / 1000
    events = [*_build_metadata(rank), *_build_events(rank, STEP_ROW, steps), *_build_events(rank, STAGE_ROW, stages)]
    tree = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"epoch_us": epoch_us}}
    write_atomically(path, json.dumps(tree))


def _build_metadata(rank: int) -> Iterator[dict[str, Any]]:
    # M: metadata events, which name the rows.
    meta = {"ph": "M", "pid": rank}
    yield {**meta, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {**meta, "name": "process_sort_index", "args": {"sort_index": rank}}
    for row, name in ((STEP_ROW, "steps"), (STAGE_ROW, "stages of the training loop")):
        yield {**meta, "tid": row, "name": "thread_name", "args": {"name": name}}


def _build_events(rank: int, row: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    for name, start_ns, end_ns in spans:
        times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
        yield {"name": name, "ph": "X", "pid": rank, "tid": row, **times}
