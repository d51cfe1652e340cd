"""What a worker of a sweep answers."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.sweep import worker
from headway.sweep.sweep_folder import SweepFolder


def test_an_answer_that_ends_work_has_the_core_seconds_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator tells by them what a measurement took, which is no part of the sweep."""
    answers: list[dict[str, Any]] = []
    monkeypatch.setattr(worker, "answer", lambda out, message: answers.append(dict(message)) or True)
    monkeypatch.setattr(worker, "decode_assignment", lambda tree: SimpleNamespace(loaded=tree))
    monkeypatch.setattr(worker, "measure_costs", lambda loaded: SimpleNamespace(step_s=loaded))
    lines = b'{"measure": 1}\n{"end": []}\n{"train": [], "feed": null}\n'
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    one = worker.Worker(SweepFolder.create(tmp_path / "sweep"), -1)
    # The commands are there before it starts, and so is the end of its input.
    monkeypatch.setattr(one, "stop", lambda: one._commands.put(None))
    one.run()
    assert [next(iter(message)) for message in answers] == ["ready", "costs", "ended", "idle"]
    assert answers[1]["costs"] == {"step_s": 1}
    seconds = [message["core_s"] for message in answers]
    assert seconds == sorted(seconds)
