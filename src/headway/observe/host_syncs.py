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
MAX_TRIES = 12
MAX_PLACES = 8


@final
class HostSyncCounter(TensorListener):
    """Counts the reads of three steps. Every other step costs a call and two comparisons."""

    def __init__(self) -> None:
        self._ahead, self._tries, self._steps = SKIPPED_STEPS, MAX_TRIES, 0
        self._thread = 0
        self._now: Counter[tuple[str, str, int, bool]] = Counter()
        self._seen: Counter[tuple[str, str, int, bool]] = Counter()

    def run_step(self, step: Callable[[], object], chores: Sequence[str]) -> None:
        """Runs a step.

        Args:
            chores: Work that the step left to do. A step that logs, evaluates or saves does not count, because its
                observers read values, too.
        """
        if self._ahead:
            self._ahead -= 1
            step()
        elif not self._tries or self._steps == COUNTED_STEPS:
            step()
        else:
            self._tries -= 1
            self._run_counted(step)
            if not chores:
                self._steps += 1
                self._seen += self._now

    def _run_counted(self, step: Callable[[], object]) -> None:
        self._thread = get_ident()
        self._now = Counter()
        add_listener(self)
        try:
            step()
        finally:
            remove_listener(self)

    def record_read(self, name: str, on_device: bool, ns: int) -> None:
        # The loader's thread runs in parallel, so its reads do not delay the step.
        if get_ident() == self._thread:
            self._now[(name, *find_caller(), on_device)] += 1

    def begin_backward(self) -> None:
        """Does nothing: backward is not a read."""

    def end_backward(self) -> None:
        """Does nothing: backward is not a read."""

    def to_json(self) -> dict[str, Any] | None:
        """Returns the reads per step, those that waited for a device, and the most frequent places first.

        None if there were too few steps to count.
        """
        if self._steps < COUNTED_STEPS:
            return None
        places = [
            {"method": name, "place": f"{Path(file).name}:{line}", "waits": waits, "a_step": count / COUNTED_STEPS}
            for (name, file, line, waits), count in self._seen.most_common(MAX_PLACES)
        ]
        waits = sum(count for (_, _, _, waits), count in self._seen.items() if waits)
        return {
            "steps": COUNTED_STEPS,
            "a_step": self._seen.total() / COUNTED_STEPS,
            "waits_a_step": waits / COUNTED_STEPS,
            "places": places,
        }
