"""Marks of a training loop: assign each moment to a stage, and make a row of numbers for each batch."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from headway.observe.tensor_taps import TensorListener, find_caller

Stage = Literal["wait", "forward", "loss", "backward", "optimizer", "other"]
STAGES: tuple[Stage, ...] = ("wait", "forward", "loss", "backward", "optimizer", "other")
WAIT, FORWARD, LOSS, BACKWARD, OPTIMIZER, OTHER = range(len(STAGES))

# First steps of a watch that do not count: workers start, kernels are chosen, the network is compiled.
WARM_UP_STEPS = 5
# Newest steps that are kept; 4 MB.
MAX_STEPS = 10_000
MAX_EPOCHS = 1000
# Reads whose place in the user's code is looked up, which takes longer than counting them.
MAX_PLACES = 1000

Numbers = NDArray[np.float64]
StepRow = tuple[int, ...]

# Index, stages, reads, syncs, sync ns, before, after, exchanged, updates.
_ROW_LENGTH = len(STAGES) + 8


@final
@dataclass(frozen=True, kw_only=True)
class LoopStart:
    """One loop over the loader."""

    # Seconds from asking for the iterator to its first batch; None: the loop began before the watch.
    first_s: float | None
    # True for the first loop of the watch, which includes the start-up of the process.
    begins: bool
    # Number of batches; None: the loop was left before its end.
    batches: int | None
    # Seconds from asking for one more batch to the end of the loop.
    end_s: float | None
    # Seconds from the end of the loop before to the beginning of this one.
    before_s: float | None


@final
@dataclass(frozen=True, kw_only=True)
class StepSeries:
    """Measurements of steps; a step is the work on one batch."""

    # [steps, len(STAGES)] wall time by stage.
    seconds: Numbers
    # [steps] number of the batch in its epoch, from 0.
    index: NDArray[np.int64]
    # [steps] values of host tensors that Python read.
    reads: Numbers
    # [steps] values of device tensors that Python read (host-device syncs).
    syncs: Numbers
    # [steps] seconds in these syncs.
    sync_s: Numbers
    # [steps] 1 if the device was idle when the loop asked for the batch, 0 if not, NaN if unknown.
    before: Numbers
    # [steps] the same when the loop got the batch.
    after: Numbers
    # [steps] 1 if backward exchanged gradients, 0 if not, NaN if unknown or without a backward.
    exchanged: Numbers
    # [steps] optimizer steps.
    updates: Numbers

    @staticmethod
    def from_rows(rows: list[StepRow]) -> StepSeries:
        """Builds the series from rows of: index, ns of each stage, reads, syncs, ns of syncs, before, after,
        exchanged, updates. -1 in the flags means unknown."""
        table = np.array(rows, np.float64).reshape(-1, _ROW_LENGTH)
        last = len(STAGES) + 1
        flags = np.where(table[:, last + 3 : last + 6] < 0, math.nan, table[:, last + 3 : last + 6])
        return StepSeries(
            seconds=table[:, 1:last] / 1e9,
            index=table[:, 0].astype(np.int64),
            reads=table[:, last],
            syncs=table[:, last + 1],
            sync_s=table[:, last + 2] / 1e9,
            before=flags[:, 0],
            after=flags[:, 1],
            exchanged=flags[:, 2],
            updates=table[:, last + 6],
        )

    def select(self, chosen: NDArray[np.bool_]) -> StepSeries:
        """Selects some of the steps."""
        return StepSeries(**{name: values[chosen] for name, values in vars(self).items()})

    def __len__(self) -> int:
        return len(self.index)


@final
class StepMarks(TensorListener):
    """Adds the time since the last mark to the stage that has just ended, and makes a row of each step.

    Only marks of the thread that asks for batches count. The code of each mark is written out, because a further call
    would double its cost.

    Attributes:
        is_device_idle: Tells if the device is idle; None: unknown.
        will_exchange: Tells if the next backward exchanges gradients; None: unknown.
        rows: Rows of the newest steps after the warm-up.
        starts: Newest loops.
        steps: Number of steps so far, with the warm-up.
        elsewhere: True if an optimizer stepped on another thread than the one that asks for batches.
        places: (method, file, line) of the first reads, and how often.
    """

    def __init__(self) -> None:
        self.is_device_idle: Callable[[], bool | None] | None = None
        self.will_exchange: Callable[[], bool] | None = None
        self.rows: deque[StepRow] = deque(maxlen=MAX_STEPS)
        self.starts: deque[LoopStart] = deque(maxlen=MAX_EPOCHS)
        self.places: Counter[tuple[str, str, int]] = Counter()
        self.steps = 0
        self.elsewhere = False
        self._placed = self._loop_rows = self._loop_updates = 0
        self._updated = False
        self._index, self._thread, self._last = -1, 0, 0
        self._first_ns: int | None = None
        self._before_ns: int | None = None
        self._ended = False
        self._begins = True
        self._clear()

    def _clear(self) -> None:
        self._spent = [0] * len(STAGES)
        self._reads = self._syncs = self._sync_ns = self._updates = 0
        self._before = self._after = self._exchanged = -1
        # Calls in progress: networks and optimizers can be nested.
        self._models = self._optimizers = self._backwards = 0
        self._forwarded = self._under_way = False

    # Marks of the loader.

    def begin_loop(self, index: int = -1) -> None:
        """Begins a loop; `index` is the number of its newest batch. Making the iterator counts as waiting."""
        now = perf_counter_ns()
        self._clear()
        self._before_ns = now - self._last if self._ended else None
        self._index, self._thread, self._last = index, get_ident(), now
        self._first_ns, self._ended = None, False
        self._loop_rows = self._loop_updates = 0

    def finish_iterator(self) -> None:
        """Ends the making of the iterator."""
        self._spent[WAIT] += perf_counter_ns() - self._last

    def request_batch(self) -> None:
        """Ends the step of the batch before, and begins waiting for the next one."""
        now = perf_counter_ns()
        if self._under_way:
            self._spent[OTHER] += now - self._last
            self.steps += 1
            self._loop_updates += self._updates
            if self.steps > WARM_UP_STEPS:
                self._loop_rows += 1
                marks = self._before, self._after, self._exchanged
                self.rows.append(
                    (self._index, *self._spent, self._reads, self._syncs, self._sync_ns, *marks, self._updates)
                )
            self._clear()
        self._thread, self._last = get_ident(), now
        if self.is_device_idle is not None:
            self._before = _encode_flag(self.is_device_idle())

    def receive_batch(self) -> None:
        """Ends the waiting, and begins the step of the batch."""
        now = perf_counter_ns()
        self._spent[WAIT] += now - self._last
        self._last = now
        if self.is_device_idle is not None:
            self._after = _encode_flag(self.is_device_idle())
        self._index += 1
        self._under_way = True
        if self._index == 0:
            self._first_ns = self._spent[WAIT]

    def end_loop(self) -> None:
        """Ends the loop after its last batch."""
        now = perf_counter_ns()
        self._record_loop(self._index + 1, now - self._last)
        self._last, self._ended = now, True

    def leave_loop(self) -> None:
        """Ends a loop that was left early. Its last step does not count, because its end is unknown."""
        self._record_loop(None, None)
        self._ended = False

    def _record_loop(self, batches: int | None, end_ns: int | None) -> None:
        self._clear()
        self._updated = self._updated or self._loop_updates > 0
        # A loop without updates, after loops with some, is an evaluation on the training set.
        if self._updated and not self._loop_updates:
            for _ in range(min(self._loop_rows, len(self.rows))):
                self.rows.pop()
            return
        self.starts.append(
            LoopStart(
                first_s=_to_seconds(self._first_ns),
                begins=self._begins,
                batches=batches,
                end_s=_to_seconds(end_ns),
                before_s=_to_seconds(self._before_ns),
            )
        )
        self._begins = False

    # Marks of the network, backward and the optimizer. Only the outermost call of each counts.

    def begin_forward(self) -> None:
        if get_ident() == self._thread:
            self._models += 1
            # A forward pass inside the optimizer's step is its closure's: the time before it is the optimizer's.
            if self._models == 1:
                now = perf_counter_ns()
                self._spent[OPTIMIZER if self._optimizers else OTHER] += now - self._last
                self._last = now

    def end_forward(self) -> None:
        if self._models and get_ident() == self._thread:
            self._models -= 1
            if not self._models:
                now = perf_counter_ns()
                self._spent[FORWARD] += now - self._last
                self._last = now
                self._forwarded = True

    def begin_backward(self) -> None:
        if get_ident() == self._thread:
            self._backwards += 1
            if self._backwards == 1:
                now = perf_counter_ns()
                self._spent[LOSS if self._forwarded else OPTIMIZER if self._optimizers else OTHER] += now - self._last
                self._last = now
                self._forwarded = False
                if self.will_exchange is not None:
                    self._exchanged = int(self.will_exchange())

    def end_backward(self) -> None:
        if self._backwards and get_ident() == self._thread:
            self._backwards -= 1
            if not self._backwards:
                now = perf_counter_ns()
                self._spent[BACKWARD] += now - self._last
                self._last = now

    def begin_step(self) -> None:
        if get_ident() != self._thread:
            self.elsewhere = True
            return
        self._optimizers += 1
        if self._optimizers == 1:
            now = perf_counter_ns()
            # If backward was not seen (torch.autograd.grad, or one compiled function for both), its time is in here.
            self._spent[BACKWARD if self._forwarded else OTHER] += now - self._last
            self._last = now
            self._forwarded = False

    def end_step(self) -> None:
        if self._optimizers and get_ident() == self._thread:
            self._optimizers -= 1
            # A class derived from an optimizer of torch steps through it, so its hooks run twice.
            if not self._optimizers:
                self._updates += 1
                now = perf_counter_ns()
                self._spent[OPTIMIZER] += now - self._last
                self._last = now

    def record_read(self, name: str, on_device: bool, ns: int) -> None:
        # On a CPU an optimizer reads its own counters, and a loader its random numbers: no reads of the user's code.
        if get_ident() != self._thread or (not on_device and (self._optimizers or not self._under_way)):
            return
        if on_device:
            self._syncs += 1
            self._sync_ns += ns
        else:
            self._reads += 1
        if self._placed < MAX_PLACES:
            self._placed += 1
            self.places[name, *find_caller()] += 1


def _encode_flag(value: bool | None) -> int:
    return -1 if value is None else int(value)


def _to_seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9
