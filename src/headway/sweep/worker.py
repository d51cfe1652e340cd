"""A worker of a sweep: a process that trains the trials it is told to. `python -m headway.sweep.worker SWEEP [LEASE]`.

Commands come as JSON lines on standard input, answers go as JSON lines to what was standard output. When the input
ends, because the coordinator has ended or was killed, the worker saves its trials and ends too. With a LEASE, in
seconds, the coordinator is on another machine: the worker ends itself if its heartbeats are not answered.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import closing, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any, final

from headway.core.errors import HeadwayError
from headway.core.messages import mute_messages
from headway.sweep.child import answer, take_output
from headway.sweep.cohort import Assignment, Cohorts, Outcome
from headway.sweep.costs import MeasurementStoppedError, measure_costs
from headway.sweep.feed import Ticket
from headway.sweep.fuse import Fusing
from headway.sweep.fuse_choice import FuseChoice
from headway.sweep.lease import LeaseHolder
from headway.sweep.sweep_folder import SweepFolder


@final
class Worker:
    """Trains what the coordinator asks for.

    Args:
        sweep: the folder of the sweep.
        out: descriptor for the answers.
        lease_s: the coordinator's patience, if it is on another machine.
    """

    def __init__(self, sweep: SweepFolder, out: int, lease_s: float | None = None) -> None:
        self._sweep, self._out, self._lease_s = sweep, out, lease_s
        self._lease: LeaseHolder | None = None
        # Heartbeats come from a thread of their own, and a long line is not written at once.
        self._lock = threading.Lock()
        self._commands: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._stopping = False
        self._fusing = Fusing({}, {}, self._tell_choice, lambda reason: self._answer({"says": reason}))

    def run(self) -> None:
        """Answers commands until the input ends."""
        # A line is short, so the coordinator never waits for a reader that trains.
        threading.Thread(target=self._read_commands, name="headway-sweep-commands", daemon=True).start()
        held = self._sweep.hold_as_worker() if self._lease_s is None else nullcontext()
        with closing(Cohorts(lambda: self._stopping, self._tell_steps)) as cohorts, held:
            if self._lease_s is not None:
                self._lease = LeaseHolder(self._lease_s, lambda number: self._answer({"beat": number}))
            self._answer({"ready": os.getpid(), "core_s": time.process_time()})
            while (command := self._commands.get()) is not None and not self._stopping:
                if "end" in command:
                    cohorts.end(command["end"])
                    self._answer({"ended": command["end"], "core_s": time.process_time()})
                    continue
                if "measure" in command:
                    costs = self._measure(decode_assignment(command["measure"]))
                    # The coordinator leaves these seconds out of those of the sweep.
                    self._answer({"costs": costs, "core_s": time.process_time()})
                    continue
                cohorts.fusing = self._take_choices(command["fuse"])
                source = None if command["feed"] is None else Ticket(**command["feed"]).read
                for outcome in cohorts.train([decode_assignment(one) for one in command["train"]], source):
                    self._answer({"outcome": vars(outcome), "core_s": time.process_time()})
                # Not while it stops: the coordinator would give it trials, and count its end as their fault.
                if not self._stopping:
                    self._answer({"idle": True, "core_s": time.process_time()})

    def _take_choices(self, choices: dict[str, Any] | None) -> Fusing | None:
        """Returns what chooses the trials to fuse, with the coordinator's choices; None if none is to be fused."""
        if choices is None:
            return None
        self._fusing.chosen = {trial: tuple(places) for trial, places in choices["chosen"]}
        self._fusing.measured |= {name: (at_once, gain) for name, (at_once, gain) in choices["measured"].items()}
        return self._fusing

    def _tell_choice(self, choice: FuseChoice) -> None:
        self._answer({"fused": vars(choice.to_record()), "says": choice.describe()})

    def _measure(self, assignment: Assignment) -> dict[str, Any] | None:
        """Returns what a trial costs; None if it fails, which its training will explain."""
        try:
            return vars(measure_costs(assignment.loaded, lambda: self._stopping))
        except MeasurementStoppedError:
            return None
        except Exception:
            traceback.print_exc()
            return None

    def stop(self) -> None:
        """Makes the trials save their states and the worker end, at the next step."""
        self._stopping = True
        self._commands.put(None)

    def _read_commands(self) -> None:
        # Not sys.stdin, which Python closes at its end: it cannot while this thread waits for a line.
        for line in open(0, "rb", closefd=False):  # noqa: SIM115
            command = json.loads(line)
            if "stop" in command:
                # As at the end of the input, but the lease is renewed while trials are saved.
                self.stop()
            elif "beat" not in command:
                self._commands.put(command)
            elif self._lease is not None:
                self._lease.renew(command["beat"])
        self.stop()

    def _tell_steps(self, steps: int) -> None:
        self._answer({"steps": steps})

    def _answer(self, message: dict[str, Any]) -> None:
        with self._lock:
            arrived = answer(self._out, message)
        if not arrived:
            self.stop()


def encode_assignment(assignment: Assignment) -> dict[str, Any]:
    """Returns an assignment as a JSON object."""
    loaded = assignment.loaded
    return {
        "trial": assignment.trial,
        "folder": str(assignment.folder),
        "until": assignment.until,
        "recipe": loaded.recipe.model_dump(mode="json"),
        "origins": dict(loaded.origins),
        "base": str(loaded.base),
        "path": None if loaded.path is None else str(loaded.path),
    }


def decode_assignment(tree: dict[str, Any]) -> Assignment:
    """Returns the assignment of a JSON object."""
    from headway.core.recipe import LoadedRecipe
    from headway.setup.recipe import TrainRecipe

    path = tree["path"]
    loaded = LoadedRecipe(
        TrainRecipe.model_validate(tree["recipe"]),
        tree["origins"],
        Path(tree["base"]),
        None if path is None else Path(path),
    )
    return Assignment(trial=tree["trial"], folder=Path(tree["folder"]), loaded=loaded, until=tree["until"])


def decode_outcome(tree: dict[str, Any]) -> Outcome:
    """Returns the outcome of a JSON object."""
    return Outcome(**tree)


def check_machine(sweep: SweepFolder) -> None:
    """Builds what the sweep trains once, so that a machine without its data is found before it gets a trial.

    Raises:
        HeadwayError: this machine lacks data, a device or a program of the recipe.
    """
    from headway.setup.build import build_setup

    _, loaded = sweep.read_settings()
    with mute_messages(), closing(build_setup(loaded).inputs):
        pass


def main() -> None:
    """Runs the worker of the sweep in the folder that the command line names."""
    out = take_output()
    sweep, lease_s = SweepFolder(Path(sys.argv[1])), float(sys.argv[2]) if len(sys.argv) > 2 else None
    worker = Worker(sweep, out, lease_s)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    # Ctrl-C of the terminal reaches the coordinator, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if lease_s is not None:
            check_machine(sweep)
        worker.run()
    except HeadwayError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
