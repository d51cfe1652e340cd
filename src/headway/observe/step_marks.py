"""Marks: what each moment of a training loop belongs to, as a row of numbers for each batch."""

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

WARM_UP_STEPS = 5
"""Steps at the beginning of a watch that are not counted: workers start, kernels are chosen, a network is compiled."""
MAX_STEPS = 10_000
"""Newest steps that are kept; 4 MB."""
MAX_EPOCHS = 1000
MAX_PLACES = 1000
"""Reads whose place in the user's code is looked up, which takes longer than counting them."""

Numbers = NDArray[np.float64]
StepRow = tuple[int, ...]

_ROW_LENGTH = len(STAGES) + 8
"""Of a row."""


@final
@dataclass(frozen=True, kw_only=True)
class LoopStart:
    """One loop over the loader.

    Attributes:
        first_s: from asking for an iterator to its first batch, or in other words from nothing to the first batch;
            None: it began before the watch. begins: it is the first loop of the watch, which starts the process up.
        batches: it gave; None: it was left before its end. end_s: asking in vain for one more, and its clearing up.
        before_s: between the end of the loop before and its beginning.
    """

    first_s: float | None
    begins: bool
    batches: int | None
    end_s: float | None
    before_s: float | None


@final
@dataclass(frozen=True, kw_only=True)
class StepSeries:
    """What was seen of the steps; a step is what is done with one batch.

    Attributes:
        seconds: [steps, len(STAGES)] wall time by stage.
        index: [steps] number of the batch in its epoch, from 0 on.
        reads, syncs: [steps] values of host tensors and of device tensors that Python read. sync_s: [steps] in these.
        before, after: [steps] 1: the device had nothing left to do when the loop asked for the batch, or got it; 0: it
            had; NaN: not known.
        exchanged: [steps] 1: backward exchanged gradients; 0: it did not; NaN: not known, or there was none.
        updates: [steps] steps of an optimizer.
    """

    seconds: Numbers
    index: NDArray[np.int64]
    reads: Numbers
    syncs: Numbers
    sync_s: Numbers
    before: Numbers
    after: Numbers
    exchanged: Numbers
    updates: Numbers

    @staticmethod
    def from_rows(rows: list[StepRow]) -> StepSeries:
        """Args: rows: index, ns of each stage, reads, syncs, ns of these, before, after, exchanged, updates; -1: not
        known."""
        table = np.array(rows, np.float64).reshape(-1, _ROW_LENGTH)
        last = len(STAGES) + 1
        told = np.where(table[:, last + 3 : last + 6] < 0, math.nan, table[:, last + 3 : last + 6])
        return StepSeries(
            seconds=table[:, 1:last] / 1e9,
            index=table[:, 0].astype(np.int64),
            reads=table[:, last],
            syncs=table[:, last + 1],
            sync_s=table[:, last + 2] / 1e9,
            before=told[:, 0],
            after=told[:, 1],
            exchanged=told[:, 2],
            updates=table[:, last + 6],
        )

    def select(self, chosen: NDArray[np.bool_]) -> StepSeries:
        """Some of the steps."""
        return StepSeries(**{name: values[chosen] for name, values in vars(self).items()})

    def __len__(self) -> int:
        return len(self.index)


@final
class StepMarks(TensorListener):
    """Adds the time since the last mark to the stage that was under way, and makes a row of each step.

    Everything is told it by the thread that asks for the batches; what others tell is not listened to. Each mark is
    written out: a call more would double what it takes.

    Attributes:
        is_device_idle: says whether the device has nothing left to do; None: it cannot.
        will_exchange: says whether the next backward exchanges gradients; None: nothing is known of that.
        rows: of the newest steps after the warm-up. starts: of the newest loops. steps: so far, warm-up included.
        elsewhere: an optimizer stepped on another thread than the one that asks for batches.
        places: (method, file, line) with which the first values were read, and how often.
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
        self._models = self._optimizers = self._backwards = 0  # calls of them that are under way
        self._forwarded = self._under_way = False

    # The loader.

    def begin_loop(self, index: int = -1) -> None:
        """A loop begins, whose newest batch has this number; what is made for it counts as waiting."""
        now = perf_counter_ns()
        self._clear()
        self._before_ns = now - self._last if self._ended else None
        self._index, self._thread, self._last = index, get_ident(), now
        self._first_ns, self._ended = None, False
        self._loop_rows = self._loop_updates = 0

    def finish_iterator(self) -> None:
        """The iterator is there."""
        self._spent[WAIT] += perf_counter_ns() - self._last

    def request_batch(self) -> None:
        """The loop asks for a batch, and is through with the one before."""
        now = perf_counter_ns()
        if self._under_way:
            self._spent[OTHER] += now - self._last
            self.steps += 1
            self._loop_updates += self._updates
            if self.steps > WARM_UP_STEPS:
                self._loop_rows += 1
                told = self._before, self._after, self._exchanged
                self.rows.append(
                    (self._index, *self._spent, self._reads, self._syncs, self._sync_ns, *told, self._updates)
                )
            self._clear()
        self._thread, self._last = get_ident(), now
        if self.is_device_idle is not None:
            self._before = _encode_flag(self.is_device_idle())

    def receive_batch(self) -> None:
        """A batch is there."""
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
        """There is no further batch."""
        now = perf_counter_ns()
        self._record_loop(self._index + 1, now - self._last)
        self._last, self._ended = now, True

    def leave_loop(self) -> None:
        """The loop was left; its last step is not counted, as nothing says where it ended."""
        self._record_loop(None, None)
        self._ended = False

    def _record_loop(self, batches: int | None, end_ns: int | None) -> None:
        self._clear()
        self._updated = self._updated or self._loop_updates > 0
        if self._updated and not self._loop_updates:  # an evaluation on the training set
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

    # The network, backward and the optimizer.

    def begin_forward(self) -> None:
        if get_ident() == self._thread:
            self._models += 1
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
            # Where backward was not seen (torch.autograd.grad, or one compiled function of both) it is in here.
            self._spent[BACKWARD if self._forwarded else OTHER] += now - self._last
            self._last = now
            self._forwarded = False

    def end_step(self) -> None:
        if self._optimizers and get_ident() == self._thread:
            self._optimizers -= 1
            if not self._optimizers:  # a class derived from one of torch's steps through it, and its hooks run twice
                self._updates += 1
                now = perf_counter_ns()
                self._spent[OPTIMIZER] += now - self._last
                self._last = now

    def record_read(self, name: str, on_device: bool, ns: int) -> None:
        # On a CPU an optimizer reads its own counters, and a loader its random numbers, on a GPU they are there too.
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
