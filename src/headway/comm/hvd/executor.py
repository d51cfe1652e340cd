"""Carries out the responses of one process set on one rank, in the order in which the negotiator gave them.

Two threads: one begins transfers, one finishes them, so that the next buffer is filled while the last one travels.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from headway.comm.hvd.requests import Request, Response

# Waits for a transfer and puts its results in place.
Finish = Callable[[], None]


@final
class SubmittedOperation:
    """One operation that this rank has submitted, or takes part in with zeros.

    Attributes:
        inputs: tensors that it reads; they must not change before the end.
        outputs: tensors that it writes, of the same shapes; empty if shapes are not known before.
        result: a tuple of tensors; for join and add_set of a number; for the others None.
        ready: on CUDA, the event after which the inputs are computed.
    """

    __slots__ = ("_ended", "error", "inputs", "outputs", "ready", "request", "result")

    def __init__(self, request: Request, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self.request, self.inputs, self.outputs = request, inputs, outputs
        self.result: Any = None
        self.error = ""
        on_cuda = bool(inputs) and inputs[0].is_cuda
        self.ready = torch.cuda.current_stream(inputs[0].device).record_event() if on_cuda else None
        self._ended = threading.Event()

    def end(self, error: str = "") -> None:
        """Marks it as ended, well or with an error. Only the first call counts."""
        if not self._ended.is_set():
            self.error = error
            self._ended.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it has ended, at most `seconds`; returns whether it has."""
        return self._ended.wait(seconds)


@final
class ProcessSetExecutor:
    """Executes the responses of one process set.

    Args:
        number: the set's id.
        begin: begins a transfer.
        on_done: called after each response, with the time of `perf_counter` at which it began.
        on_broken: called with the error of a transfer; nothing more is executed.
    """

    def __init__(
        self,
        number: int,
        *,
        begin: Callable[[Response, list[SubmittedOperation]], Finish],
        on_done: Callable[[Response, float], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._begin, self._on_done, self._on_broken = begin, on_done, on_broken
        self._given: queue.SimpleQueue[tuple[Response, list[SubmittedOperation]] | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[tuple[Response, list[SubmittedOperation], Finish, float] | None]
        self._begun = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"headway-hvd-{name}-{number}", daemon=True)
            for name, work in (("begin", self._begin_all), ("finish", self._finish_all))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, response: Response, entries: list[SubmittedOperation]) -> None:
        """Queues a response, with the operations of its names."""
        self._given.put((response, entries))

    def close(self) -> None:
        """Executes the queued responses, and ends its threads."""
        self._given.put(None)
        for thread in self._threads:
            # A thread cannot join itself.
            if thread is not threading.current_thread():
                thread.join()

    def _begin_all(self) -> None:
        while (item := self._given.get()) is not None:
            response, entries = item
            began_s = time.perf_counter()
            try:
                finish: Finish = do_nothing if response.error else self._begin(response, entries)
            # BaseException: threads that wait for it must get the error, whatever it is.
            except BaseException as error:
                self._on_broken(error)
                break
            self._begun.put((response, entries, finish, began_s))
        self._begun.put(None)

    def _finish_all(self) -> None:
        while (item := self._begun.get()) is not None:
            response, entries, finish, began_s = item
            try:
                finish()
            except BaseException as error:
                self._on_broken(error)
                return
            for entry in entries:
                entry.end(response.error)
            self._on_done(response, began_s)


def do_nothing() -> None:
    pass
