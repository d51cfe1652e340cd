"""How often, and where, the steps of a run read values of tensors in Python: counted in three of them, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any, final

from headway.observe.tensor_taps import TensorListener, add_listener, find_caller, remove_listener

SKIPPED_STEPS = 20
"""Steps of a process before the first that counts: what a network compiles and a library tries out is over."""
COUNTED_STEPS = 3
MAX_TRIES = 12
"""Steps that are listened to at most, where those between do something else as well."""
MAX_PLACES = 8


@final
class HostSyncCounter(TensorListener):
    """Listens to three steps. Every other step costs a call and two comparisons."""

    def __init__(self) -> None:
        self._ahead, self._tries, self._steps = SKIPPED_STEPS, MAX_TRIES, 0
        self._thread = 0
        self._now: Counter[tuple[str, str, int, bool]] = Counter()
        self._seen: Counter[tuple[str, str, int, bool]] = Counter()

    def run_step(self, step: Callable[[], object], chores: Sequence[str]) -> None:
        """Makes a step.

        Args:
            chores: what it left to do, once it is made. A step that logs, evaluates or saves does not count: what
                observes the network reads values in it.
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
        if get_ident() == self._thread:  # the loader's thread is beside the step, and holds nothing up
            self._now[(name, *find_caller(), on_device)] += 1

    def begin_backward(self) -> None:
        """Says nothing of values."""

    def end_backward(self) -> None:
        """Says nothing of values."""

    def to_json(self) -> dict[str, Any] | None:
        """Reads a step: of all values, of those that had to wait for a device, and by place, the most frequent first;
        None: there were too few steps to count them."""
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
