"""Trains runs in the slots of this machine, each run by itself: what is to be done may follow from what was found."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import HeadwayError
from headway.sweep.cohort import Assignment, Outcome
from headway.sweep.slots import Event, Slot, list_gpus, share_machine
from headway.sweep.sweep_folder import SweepFolder, describe_sweep_resume
from headway.sweep.worker import decode_outcome

LOG = logging.getLogger("headway.sweep")

R = TypeVar("R", bound=Hashable)

MOST_DEATHS = 3
"""Processes that may die before the search gives up. One may have run out of memory beside others."""


def train_missing(
    folder: Path,
    slots: int | None,
    list_missing: Callable[[], list[R]],
    assign: Callable[[int, R], Assignment],
    keep: Callable[[R, Outcome], None],
) -> None:
    """Trains runs until none is missing. A run whose folder exists goes on.

    Args:
        folder: folder of the search; its part `logs` gets the messages of the processes.
        slots: processes that train at once; None: one for each GPU, else one for each core.
        list_missing: the runs that are missing as things stand, the most urgent first; asked after each run.
        assign: returns the training of a run, under a number that no other one has.
        keep: takes the outcome of each run that has ended or diverged.

    Raises:
        HeadwayError: a run cannot train on this machine, its code fails, or processes die.
    """
    # Processes of a killed call save their runs first.
    SweepFolder(folder).wait_for_workers(LOG.info)
    if not list_missing():
        return
    gpus, events = list_gpus(), SimpleQueue[Event]()
    shares = share_machine(slots or len(gpus) or count_usable_cores(), gpus)
    crew = [Slot(number, folder, cpus, gpu, events) for number, (cpus, gpu) in enumerate(shares)]
    numbers, under_way, deaths = itertools.count(), dict[int, R](), 0
    with ExitStack() as stack:
        for slot in crew:
            # They save their runs if this process is told to stop.
            stack.callback(slot.close)
        while True:
            waiting = [run for run in list_missing() if run not in under_way.values()]
            for slot, run in zip([slot for slot in crew if slot.is_idle], waiting, strict=False):
                number = next(numbers)
                under_way[number] = run
                slot.train([assign(number, run)])
            # A slot whose run has ended says a little later that it is idle.
            if not (waiting or under_way):
                return
            event = events.get()
            slot, message = crew[event.slot], event.message
            if message is None:
                deaths += 1
                for number in slot.training:
                    del under_way[number]
                slot.training = {}
                _expect_few_deaths(folder, deaths, slot.take_status())
                continue
            slot.is_idle = slot.is_idle or "idle" in message
            if "outcome" in message:
                outcome = decode_outcome(message["outcome"])
                del slot.training[outcome.trial]
                # One that was given up before its end is still in the memory of its process.
                slot.end([outcome.trial])
                run = under_way.pop(outcome.trial)
                if outcome.kind not in ("done", "diverged"):
                    LOG.error(outcome.trace)
                    fix = f"Mend it, and continue: {describe_sweep_resume(folder)}"
                    raise HeadwayError(f"a run cannot train: {outcome.failure}", where=str(folder), fix=fix)
                keep(run, outcome)


def _expect_few_deaths(folder: Path, deaths: int, status: int) -> None:
    if deaths >= MOST_DEATHS:
        what = f"{deaths} processes of the search have died, the last one with status {status}"
        fix = f"Its log says more. Mend the cause, and continue: {describe_sweep_resume(folder)}"
        raise HeadwayError(what, where=str(folder / "logs"), fix=fix)
    LOG.warning(f"A process of the search ended with status {status}; its run goes on in another one.")
