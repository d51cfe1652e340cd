"""What a worker of a sweep answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.sweep._folders import write_sweep


def test_each_answer_that_ends_work_has_the_core_seconds_so_far(tmp_path: Path) -> None:
    """The coordinator tells by them what a measurement took, which is no part of the sweep."""
    sweep = write_sweep(tmp_path / "sweep")
    command = [sys.executable, "-m", "headway.sweep.worker", str(sweep.folder)]
    seconds = [0.0]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        answers = (json.loads(line) for line in worker.stdout)
        for sent, expected in ((None, "ready"), ({"end": []}, "ended"), ({"train": [], "feed": None}, "idle")):
            if sent is not None:
                worker.stdin.write(json.dumps(sent) + "\n")
                worker.stdin.flush()
            seconds.append(next(one["core_s"] for one in answers if expected in one))
        worker.stdin.close()
    assert worker.returncode == 0
    assert seconds == sorted(seconds)
    assert seconds[1] > 0
