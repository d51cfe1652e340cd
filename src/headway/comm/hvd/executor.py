"""Executes the responses of one process set on one rank, in the order in which the negotiator gave them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from headway.comm.hvd.requests import Request, Response
from headway.comm.phase_thread import PhaseThread

Finish = Callable[[], None]
"""Waits for a transfer and puts its results in place."""


@final
class SubmittedOperation:
    """One operation that this rank has submitted, or takes part in with zeros.

    Attributes:
        inputs: tensors that it reads; they must not change before the end.
        outputs: tensors that it writes, of the same shapes; empty if shapes are not known before.
        result: a tuple of tensors; for join and add_set a tuple with a number; for the others None.
        error: reason of its failure; empty if it has not failed.
        inputs_ready: on CUDA, the event after which the inputs are computed.
    """

    __slots__ = ("_ended", "error", "inputs", "inputs_ready", "outputs", "request", "result")

    def __init__(self, request: Request, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self.request, self.inputs, self.outputs = request, inputs, outputs
        self.result: Any = None
        self.error = ""
        # The exchange runs on another stream, and must not read inputs that are still being computed.
        on_cuda = bool(inputs) and inputs[0].is_cuda
        self.inputs_ready = torch.cuda.current_stream(inputs[0].device).record_event() if on_cuda else None
        self._ended = threading.Event()

    def end(self, error: str = "") -> None:
        """Marks it as ended, with an error if one is given."""
        # Only the first call counts: a transfer may still end well after its job has failed.
        if not self._ended.is_set():
            self.error = error
            self._ended.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, at most `timeout_s`; returns whether it has."""
        return self._ended.wait(timeout_s)


@final
class _Transfer:
    def __init__(self, response: Response, operations: list[SubmittedOperation]) -> None:
        self.response, self.operations = response, operations
        self.finish: Finish = do_nothing
        self.start_s = 0.0


@final
class ProcessSetExecutor:
    """Executes the responses of one process set.

    Args:
        set_id: id of the process set.
        begin: begins a transfer; returns the function that finishes it.
        on_done: called after each response, with the time of `perf_counter` at which it began.
        on_broken: called with the error of a transfer; nothing more is executed.
    """

    def __init__(
        self,
        set_id: int,
        *,
        begin: Callable[[Response, list[SubmittedOperation]], Finish],
        on_done: Callable[[Response, float], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._begin_transfer, self._on_done, self._on_broken = begin, on_done, on_broken
        self._is_broken = False
        # Two threads: the next buffer is filled while the last one travels.
        self._finishing = PhaseThread(
            f"hvd-finish-{set_id}", self._finish, on_done=self._report, on_error=self._break_off
        )
        self._beginning = PhaseThread(
            f"hvd-begin-{set_id}", self._begin, on_done=self._finishing.put, on_error=self._break_off
        )

    def put(self, response: Response, operations: list[SubmittedOperation]) -> None:
        """Queues a response, with the operations of its names."""
        self._beginning.put(_Transfer(response, operations))

    def close(self) -> None:
        """Executes the queued responses, and ends its threads."""
        # In this order: transfers that have begun are passed on to the second thread, which ends after them.
        self._beginning.close()
        self._finishing.close()

    def _begin(self, transfer: _Transfer) -> None:
        transfer.start_s = time.perf_counter()
        # A response with an error transfers nothing: `_report` passes the error on.
        if not (transfer.response.error or self._is_broken):
            transfer.finish = self._begin_transfer(transfer.response, transfer.operations)

    def _finish(self, transfer: _Transfer) -> None:
        if not self._is_broken:
            transfer.finish()

    def _report(self, transfer: _Transfer) -> None:
        # After a failure the engine ends the operations, with the reason.
        if not self._is_broken:
            for operation in transfer.operations:
                operation.end(transfer.response.error)
            self._on_done(transfer.response, transfer.start_s)

    def _break_off(self, _: _Transfer, error: BaseException) -> None:
        self._is_broken = True
        self._on_broken(error)


def do_nothing() -> None:
    pass
