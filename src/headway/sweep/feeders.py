"""The feeders of a sweep, as its coordinator sees them: one for each group of slots that read the same batches."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, final

import psutil

from headway.data.data_recipe import SYNTHETIC
from headway.setup.recipe import TrainRecipe
from headway.sweep.child import Child
from headway.sweep.cohort import Assignment
from headway.sweep.feed import Ticket, listen
from headway.sweep.worker import encode_assignment

LOG = logging.getLogger("headway.sweep")

END_S = 20.0
"""Seconds that a feeder has to end before it is killed. It has nothing to save."""


def can_be_fed(recipe: TrainRecipe) -> bool:
    """Returns True if the batches of a recipe can be made in another process.

    A transform of whole batches is called by the loader, and may write into them; crops on a GPU are made there.
    """
    is_read = recipe.data.train != SYNTHETIC and recipe.data.cache != "device"
    return is_read and recipe.transform_on == "float" and recipe.augment.where != "device_crops"


@final
class _Process:
    """A feeder's process, and the slots that read from it."""

    def __init__(self, number: int, folder: Path, key: str) -> None:
        self.number, self.key = number, key
        self.feed, self.slots, self.members, self.is_closing = -1, set[int](), set[int](), False
        self._core_s = 0.0
        self.address = f"headway-feed-{secrets.token_hex(16)}"
        with contextlib.closing(listen(self.address)) as listener:
            self._process = Child(
                "headway.sweep.feeder",
                [str(listener.fileno())],
                folder / f"feeder-{number}.log",
                {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                take=self._note,
                end=self._note_end,
                descriptors=[listener.fileno()],
            )

    def _note_end(self, status: int) -> None:
        if not self.is_closing:
            what = f"A feeder of the sweep ended with status {status} (see logs/feeder-{self.number}.log)"
            LOG.warning(f"{what}. Its slots go on, each with a loader of its own and with the same batches.")

    def _note(self, message: dict[str, Any]) -> None:
        if "detached" in message:
            slot, position = message["detached"], message["position"]
            LOG.warning(
                f"Slot {slot} fell behind at position {position}: it goes on with a loader of its own and the same"
                " batches."
            )
            # It is in step with the others no more.
            self.members.discard(slot)
            self.slots.discard(slot)
        if "failed" in message:
            LOG.warning(f"A feeder failed: {message['failed']}. Its slots go on, each with a loader of its own.")

    @property
    def core_s(self) -> float:
        """Seconds of cores that the process has taken."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self._process.pid).cpu_times()
            self._core_s = times.user + times.system
        return self._core_s

    @property
    def is_running(self) -> bool:
        """True if the process has not ended."""
        return self._process.is_running

    def send(self, command: dict[str, Any]) -> None:
        """Sends a command; nothing happens if the process has just ended."""
        self._process.send(command)

    def close(self) -> None:
        """Ends the process. Its readers go on by themselves."""
        self.is_closing = True
        self._core_s = self.core_s
        self._process.close(END_S)


@final
class Feeders:
    """Starts and ends the feeders of a sweep.

    Args:
        logs: folder of the logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: list[_Process] = []
        self._numbers, self._feeds = itertools.count(), itertools.count()
        self._ended_core_s = 0.0

    def begin(self, key: str, assignment: Assignment, slots: Mapping[int, int]) -> dict[int, Ticket]:
        """Begins a feed for slots that train a group from one position; returns a ticket for each of them.

        Args:
            key: the values that trials of the group have in common.
            assignment: one of the group.
            slots: the step at which each slot ends, by its number.
        """
        process = next((one for one in self._list_running() if one.key == key and not one.slots), None)
        if process is None:
            try:
                process = _Process(next(self._numbers), self._logs, key)
            except OSError as error:
                LOG.warning(f"No feeder can be started ({error}): each slot has a loader of its own.")
                return {}
            self._processes.append(process)
        process.feed, process.slots = next(self._feeds), set(slots)
        # Who ends earlier by its nature waits for nobody.
        process.members = {slot for slot, step in slots.items() if step == max(slots.values())}
        process.send({"feed": process.feed, "assignment": encode_assignment(assignment), "slots": list(slots)})
        return {slot: Ticket(address=process.address, feed=process.feed, slot=slot) for slot in slots}

    def leave(self, slot: int) -> None:
        """Notes that a slot has ended its part, or that its process has ended."""
        for process in self._processes:
            if slot in process.slots:
                process.slots.discard(slot)
                process.send({"left": slot, "of": process.feed})

    def must_wait(self, slot: int) -> bool:
        """Returns True if a slot has read its last batch before the others of its feed, which it gets new work with."""
        return any(slot in one.members and slot not in one.slots and one.slots for one in self._list_running())

    def end_unused(self, keys: Collection[str]) -> None:
        """Ends the feeders that no slot reads from, and whose group is not among these any more."""
        for process in tuple(self._processes):
            if not process.is_running or (not process.slots and process.key not in keys):
                self._close(process)

    def _list_running(self) -> list[_Process]:
        return [one for one in self._processes if one.is_running]

    @property
    def core_s(self) -> float:
        """Seconds of cores that all feeders have taken."""
        return self._ended_core_s + sum(one.core_s for one in self._processes)

    def _close(self, process: _Process) -> None:
        self._processes.remove(process)
        process.close()
        self._ended_core_s += process.core_s

    def close(self) -> None:
        """Ends all feeders."""
        for process in tuple(self._processes):
            self._close(process)
