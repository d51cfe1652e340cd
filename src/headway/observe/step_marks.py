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
# Newest steps that are kept: 4 MB.
MAX_KEPT_STEPS = 10_000
MAX_KEPT_LOOPS = 1000
# Reads whose line in the user's code is looked up, which takes longer than counting them.
MAX_LOCATED_READS = 1000

FloatArray = NDArray[np.float64]
StepRow = tuple[int, ...]

# Index, stages, reads, syncs, sync ns, three flags, updates.
_ROW_LENGTH = len(STAGES) + 8


@final
@dataclass(frozen=True, kw_only=True)
class LoopStart:
    """One loop over the loader.

    Attributes:
        first_s: Seconds from asking for the iterator to its first batch; None: the loop began before the watch.
        is_first_loop: True for the first loop of the watch, which includes the start-up of the process.
        batches: Number of batches; None: the loop was left before its end.
        end_s: Seconds from asking for one more batch to the end of the loop.
        gap_s: Seconds from the end of the previous loop to the beginning of this one.
    """

    first_s: float | None
    is_first_loop: bool
    batches: int | None
    end_s: float | None
    gap_s: float | None


@final
@dataclass(frozen=True, kw_only=True)
class StepSeries:
    """Measurements of steps; a step is the work on one batch.

    Attributes:
        seconds: [steps, len(STAGES)] wall time by stage.
        index: [steps] index of the batch in its epoch.
        reads: [steps] number of values of host tensors that Python read.
        syncs: [steps] number of values of device tensors that Python read (host-device syncs).
        sync_s: [steps] seconds in these syncs.
        idle_at_request: [steps] 1 if the device was idle when the loop asked for the batch, 0 if not, NaN if unknown.
        idle_at_batch: [steps] the same when the loop got the batch.
        has_exchange: [steps] 1 if backward exchanged gradients, 0 if not, NaN if unknown or without a backward.
        updates: [steps] number of optimizer steps.
    """

    seconds: FloatArray
    index: NDArray[np.int64]
    reads: FloatArray
    syncs: FloatArray
    sync_s: FloatArray
    idle_at_request: FloatArray
    idle_at_batch: FloatArray
    has_exchange: FloatArray
    updates: FloatArray

    @staticmethod
    def from_rows(rows: list[StepRow]) -> StepSeries:
        """Builds the series from rows of `StepMarks`.

        A row is: index, ns of each stage, reads, syncs, ns of syncs, the flags idle_at_request, idle_at_batch and
        has_exchange (-1: unknown), updates.
        """
        table = np.array(rows, np.float64).reshape(-1, _ROW_LENGTH)
        first = len(STAGES) + 1
        # Rows hold integers, so an unknown flag is -1.
        flags = np.where(table[:, first + 3 : first + 6] < 0, math.nan, table[:, first + 3 : first + 6])
        return StepSeries(
            seconds=table[:, 1:first] / 1e9,
            index=table[:, 0].astype(np.int64),
            reads=table[:, first],
            syncs=table[:, first + 1],
            sync_s=table[:, first + 2] / 1e9,
            idle_at_request=flags[:, 0],
            idle_at_batch=flags[:, 1],
            has_exchange=flags[:, 2],
            updates=table[:, first + 6],
        )

    def select(self, mask: NDArray[np.bool_]) -> StepSeries:
        """Returns the steps that a mask selects, bool [steps]."""
        return StepSeries(**{name: values[mask] for name, values in vars(self).items()})

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
        steps: Number of steps so far, including the warm-up.
        steps_on_other_thread: True if an optimizer stepped on another thread than the one that asks for batches.
        read_locations: Number of reads by (method, file, line), over the first MAX_LOCATED_READS.
    """

    def __init__(self) -> None:
        self.is_device_idle: Callable[[], bool | None] | None = None
        self.will_exchange: Callable[[], bool] | None = None
        self.rows: deque[StepRow] = deque(maxlen=MAX_KEPT_STEPS)
        self.starts: deque[LoopStart] = deque(maxlen=MAX_KEPT_LOOPS)
        self.read_locations: Counter[tuple[str, str, int]] = Counter()
        self.steps = 0
        self.steps_on_other_thread = False
        self._num_located = self._loop_rows = self._loop_updates = 0
        self._has_updated = False
        self._index = -1
        self._thread = 0
        self._last_ns = 0
        self._first_ns: int | None = None
        self._gap_ns: int | None = None
        self._loop_ended = False
        self._is_first_loop = True
        self._clear()

    def _clear(self) -> None:
        self._stage_ns = [0] * len(STAGES)
        self._reads = self._syncs = self._sync_ns = self._updates = 0
        self._idle_at_request = self._idle_at_batch = self._has_exchange = -1
        # Calls in progress: networks and optimizers can be nested.
        self._forward_depth = self._step_depth = self._backward_depth = 0
        self._has_forward = self._in_step = False

    # Marks of the loader.

    def begin_loop(self, index: int = -1) -> None:
        """Begins a loop; making its iterator counts as waiting. `index`: index of the newest batch, -1 if none."""
        now = perf_counter_ns()
        self._clear()
        # After a loop that was left early, the end of its last step is unknown.
        self._gap_ns = now - self._last_ns if self._loop_ended else None
        self._index = index
        self._thread = get_ident()
        self._last_ns = now
        self._first_ns = None
        self._loop_ended = False
        self._loop_rows = self._loop_updates = 0

    def finish_iterator(self) -> None:
        """Adds the time of making the iterator to waiting."""
        self._stage_ns[WAIT] += perf_counter_ns() - self._last_ns

    def request_batch(self) -> None:
        """Ends the step of the previous batch, and begins waiting for the next one."""
        now = perf_counter_ns()
        if self._in_step:
            self._stage_ns[OTHER] += now - self._last_ns
            self.steps += 1
            self._loop_updates += self._updates
            if self.steps > WARM_UP_STEPS:
                self._loop_rows += 1
                flags = self._idle_at_request, self._idle_at_batch, self._has_exchange
                self.rows.append(
                    (self._index, *self._stage_ns, self._reads, self._syncs, self._sync_ns, *flags, self._updates)
                )
            self._clear()
        self._thread, self._last_ns = get_ident(), now
        if self.is_device_idle is not None:
            self._idle_at_request = _encode_flag(self.is_device_idle())

    def receive_batch(self) -> None:
        """Ends waiting, and begins the step of the batch."""
        now = perf_counter_ns()
        self._stage_ns[WAIT] += now - self._last_ns
        self._last_ns = now
        if self.is_device_idle is not None:
            self._idle_at_batch = _encode_flag(self.is_device_idle())
        self._index += 1
        self._in_step = True
        if self._index == 0:
            self._first_ns = self._stage_ns[WAIT]

    def end_loop(self) -> None:
        """Ends the loop after its last batch."""
        now = perf_counter_ns()
        self._record_loop(self._index + 1, now - self._last_ns)
        self._last_ns, self._loop_ended = now, True

    def leave_loop(self) -> None:
        """Ends a loop that was left early. Its last step does not count, because its end is unknown."""
        self._record_loop(None, None)
        self._loop_ended = False

    def _record_loop(self, batches: int | None, end_ns: int | None) -> None:
        self._clear()
        self._has_updated = self._has_updated or self._loop_updates > 0
        # A loop without updates, after loops with some, is an evaluation on the training set.
        if self._has_updated and not self._loop_updates:
            for _ in range(min(self._loop_rows, len(self.rows))):
                self.rows.pop()
            return
        self.starts.append(
            LoopStart(
                first_s=_to_seconds(self._first_ns),
                is_first_loop=self._is_first_loop,
                batches=batches,
                end_s=_to_seconds(end_ns),
                gap_s=_to_seconds(self._gap_ns),
            )
        )
        self._is_first_loop = False

    # Marks of the network, backward and the optimizer. Only the outermost call of each counts.

    def begin_forward(self) -> None:
        """Ends `other`, or the optimizer if its closure calls the network."""
        if get_ident() == self._thread:
            self._forward_depth += 1
            # A forward pass inside the optimizer's step is its closure's: the time before it is the optimizer's.
            if self._forward_depth == 1:
                now = perf_counter_ns()
                self._stage_ns[OPTIMIZER if self._step_depth else OTHER] += now - self._last_ns
                self._last_ns = now

    def end_forward(self) -> None:
        """Ends `forward`."""
        if self._forward_depth and get_ident() == self._thread:
            self._forward_depth -= 1
            if not self._forward_depth:
                now = perf_counter_ns()
                self._stage_ns[FORWARD] += now - self._last_ns
                self._last_ns = now
                self._has_forward = True

    def begin_backward(self) -> None:
        """Ends `loss` after a forward pass, else the optimizer or `other`."""
        if get_ident() == self._thread:
            self._backward_depth += 1
            if self._backward_depth == 1:
                now = perf_counter_ns()
                self._stage_ns[LOSS if self._has_forward else OPTIMIZER if self._step_depth else OTHER] += (
                    now - self._last_ns
                )
                self._last_ns = now
                self._has_forward = False
                if self.will_exchange is not None:
                    self._has_exchange = int(self.will_exchange())

    def end_backward(self) -> None:
        """Ends `backward`."""
        if self._backward_depth and get_ident() == self._thread:
            self._backward_depth -= 1
            if not self._backward_depth:
                now = perf_counter_ns()
                self._stage_ns[BACKWARD] += now - self._last_ns
                self._last_ns = now

    def begin_step(self) -> None:
        """Ends `other`, or `backward` if its begin was not seen."""
        if get_ident() != self._thread:
            self.steps_on_other_thread = True
            return
        self._step_depth += 1
        if self._step_depth == 1:
            now = perf_counter_ns()
            # If backward was not seen (torch.autograd.grad, or one compiled function for both), its time is in here.
            self._stage_ns[BACKWARD if self._has_forward else OTHER] += now - self._last_ns
            self._last_ns = now
            self._has_forward = False

    def end_step(self) -> None:
        """Ends `optimizer`, and counts an update."""
        if self._step_depth and get_ident() == self._thread:
            self._step_depth -= 1
            # A class derived from an optimizer of torch steps through it, so its hooks run twice.
            if not self._step_depth:
                self._updates += 1
                now = perf_counter_ns()
                self._stage_ns[OPTIMIZER] += now - self._last_ns
                self._last_ns = now

    def record_read(self, name: str, on_device: bool, ns: int) -> None:
        # On a CPU an optimizer reads its own counters, and a loader its random numbers: no reads of the user's code.
        if get_ident() != self._thread or (not on_device and (self._step_depth or not self._in_step)):
            return
        if on_device:
            self._syncs += 1
            self._sync_ns += ns
        else:
            self._reads += 1
        if self._num_located < MAX_LOCATED_READS:
            self._num_located += 1
            self.read_locations[name, *find_caller()] += 1


def _encode_flag(value: bool | None) -> int:
    return -1 if value is None else int(value)


def _to_seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9
