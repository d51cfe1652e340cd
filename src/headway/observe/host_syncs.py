"""Counts how often, and where, the steps of a run read tensor values in Python: in three steps, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any, final

from headway.observe.tensor_taps import TensorListener, add_listener, find_caller, remove_listener

# Steps of a process before the first that counts: compilation and autotuning are over by then.
SKIPPED_STEPS = 20
COUNTED_STEPS = 3
# Steps to listen to at most, as those that also log, evaluate or save do not count.
MAX_LISTENED_STEPS = 12
MAX_REPORTED_PLACES = 8


@final
class HostSyncCounter(TensorListener):
    """Counts the reads of three steps. Every other step costs a call and two comparisons."""

    def __init__(self) -> None:
        self._steps_to_skip = SKIPPED_STEPS
        self._tries_left = MAX_LISTENED_STEPS
        self._steps = 0
        self._thread = 0
        self._step_reads: Counter[tuple[str, str, int, bool]] = Counter()
        self._total_reads: Counter[tuple[str, str, int, bool]] = Counter()

    def run_step(self, step: Callable[[], object], chores: Sequence[str]) -> None:
        """Runs a step, and counts its reads if it is one of the three.

        Args:
            step: Runs the step.
            chores: Work that the step left to do; the caller fills it during the step. A step that logs, evaluates or
                saves does not count, because its observers read values too.
        """
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            step()
        elif not self._tries_left or self._steps == COUNTED_STEPS:
            step()
        else:
            self._tries_left -= 1
            self._run_counted(step)
            if not chores:
                self._steps += 1
                self._total_reads += self._step_reads

    def _run_counted(self, step: Callable[[], object]) -> None:
        self._thread = get_ident()
        self._step_reads = Counter()
        add_listener(self)
        try:
            step()
        finally:
            remove_listener(self)

    def record_read(self, name: str, on_device: bool, ns: int) -> None:
        # The loader's thread runs in parallel, so its reads do not delay the step.
        if get_ident() == self._thread:
            self._step_reads[(name, *find_caller(), on_device)] += 1

    def begin_backward(self) -> None:
        """Does nothing: backward is not a read."""

    def end_backward(self) -> None:
        """Does nothing: backward is not a read."""

    def to_json(self) -> dict[str, Any] | None:
        """Returns the reads per step, those that were host-device syncs, and the places, most frequent first.

        None if fewer than three steps were counted.
        """
        if self._steps < COUNTED_STEPS:
            return None
        places = [
            {"method": name, "place": f"{Path(file).name}:{line}", "waits": is_sync, "a_step": count / COUNTED_STEPS}
            for (name, file, line, is_sync), count in self._total_reads.most_common(MAX_REPORTED_PLACES)
        ]
        num_syncs = sum(count for (_, _, _, is_sync), count in self._total_reads.items() if is_sync)
        return {
            "steps": COUNTED_STEPS,
            "a_step": self._total_reads.total() / COUNTED_STEPS,
            "waits_a_step": num_syncs / COUNTED_STEPS,
            "places": places,
        }
