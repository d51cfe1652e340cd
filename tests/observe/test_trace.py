"""The trace's file, against the Trace Event Format."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from headway.observe import trace


def test_spans_become_complete_events(tmp_path: Path) -> None:
    stages = [("wait", 1_000, 3_500), ("forward", 3_500, 1_003_500)]
    steps = [("step 11", 900, 1_003_600)]
    trace.write_trace(tmp_path / "trace-3.json", 3, stages, steps)
    tree = json.loads((tmp_path / "trace-3.json").read_text())
    assert tree["displayTimeUnit"] == "ms"
    spans = [event for event in tree["traceEvents"] if event["ph"] == "X"]
    assert spans == [
        {"name": "step 11", "ph": "X", "pid": 3, "tid": 1, "ts": 0.9, "dur": pytest.approx(1002.7)},
        {"name": "wait", "ph": "X", "pid": 3, "tid": 2, "ts": 1.0, "dur": 2.5},
        {"name": "forward", "ph": "X", "pid": 3, "tid": 2, "ts": 3.5, "dur": 1000.0},
    ]
    named = {event["name"]: event for event in tree["traceEvents"] if event["ph"] == "M" and "tid" not in event}
    assert named["process_name"]["args"] == {"name": "rank 3"}
    assert named["process_sort_index"]["args"] == {"sort_index": 3}
    rows = [event for event in tree["traceEvents"] if event["name"] == "thread_name"]
    assert {event["tid"] for event in rows} == {event["tid"] for event in spans}
    assert {event["pid"] for event in tree["traceEvents"]} == {3}
    assert len(tree["traceEvents"]) == 3 + 2 + 2


def test_the_time_of_day_is_told(tmp_path: Path) -> None:
    """A span of now, moved by what the file says, is now."""
    now_ns = time.perf_counter_ns()
    trace.write_trace(tmp_path / "trace-0.json", 0, [("wait", now_ns, now_ns)], [])
    tree = json.loads((tmp_path / "trace-0.json").read_text())
    (span,) = [event for event in tree["traceEvents"] if event["ph"] == "X"]
    assert span["ts"] + tree["otherData"]["epoch_us"] == pytest.approx(time.time() * 1e6, abs=60e6)
