"""What a worker of a sweep answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.sweep._folders import write_sweep

from headway.sweep.budget import plan_brackets
from headway.sweep.fuse_choice import FuseChoice
from headway.sweep.records import Created
from headway.sweep.state import State, fold, list_fuse_choices
from headway.sweep.sweep_folder import SweepFolder
from headway.sweep.worker import Worker

CHOICES = st.lists(
    st.builds(
        FuseChoice,
        trials=st.lists(st.integers(0, 5), min_size=2, max_size=6, unique=True).map(tuple),
        at_once=st.integers(0, 4),
        gain=st.floats(0.1, 9),
        network=st.sampled_from(["a x 2", "a x 4", "b x 2"]),
    ),
    max_size=4,
)


def test_each_answer_that_ends_work_has_the_core_seconds_so_far(tmp_path: Path) -> None:
    """The coordinator tells by them what a measurement took, which is no part of the sweep."""
    sweep = write_sweep(tmp_path / "sweep")
    command = [sys.executable, "-m", "headway.sweep.worker", str(sweep.folder)]
    seconds = [0.0]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        answers = (json.loads(line) for line in worker.stdout)
        for sent, expected in (
            (None, "ready"),
            ({"end": []}, "ended"),
            ({"train": [], "feed": None, "fuse": None}, "idle"),
        ):
            if sent is not None:
                worker.stdin.write(json.dumps(sent) + "\n")
                worker.stdin.flush()
            seconds.append(next(one["core_s"] for one in answers if expected in one))
        worker.stdin.close()
    assert worker.returncode == 0
    assert seconds == sorted(seconds)
    assert seconds[1] > 0


@given(choices=CHOICES, here=st.sets(st.integers(0, 5)))
def test_a_worker_fuses_by_the_choices_of_its_coordinator(choices: list[FuseChoice], here: set[int]) -> None:
    """They come with the command. The journal in a shared folder may be old on another machine, and is not read."""
    plan = plan_brackets(6, 3, 1, "random")
    state = fold(State(plan), [Created(trial, {}) for trial in range(6)])
    state = fold(state, [choice.to_record() for choice in choices])
    command = json.loads(json.dumps({"fuse": list_fuse_choices(state, sorted(here))}))
    worker = Worker(SweepFolder(Path("nowhere")), -1)
    fusing = worker._take_choices(command["fuse"])
    assert fusing is not None
    assert fusing.chosen == {
        trial: state.trials[trial].together for trial in here if state.trials[trial].together is not None
    }
    assert fusing.measured == state.gains
    assert worker._take_choices(None) is None
