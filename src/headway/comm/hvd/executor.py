"""A lane: one process set on one rank. It carries responses out in the order in which the negotiator gave them.

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

Finish = Callable[[], None]
"""Waits for a transfer and puts its results where they belong."""


@final
class SubmittedOperation:
    """One operation that this rank has submitted, or has to take part in.

    Attributes:
        inputs: what it reads; nobody may change it before the end.
        outputs: what it writes, of the same shapes; empty where these are not known before.
        result: a tuple of tensors; of join and add_set: of a number; of the others None.
        ready: on CUDA: when the inputs are computed.
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
        """The first one counts."""
        if not self._ended.is_set():
            self.error = error
            self._ended.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended, well or not; waits for it so long."""
        return self._ended.wait(seconds)


@final
class ProcessSetExecutor:
    """The responses of one process set.

    Args:
        number: the set's id.
        begin: begins a transfer.
        done: is called after each response, with the time of `perf_counter` at which it began.
        broken: is called with the error of a transfer; nothing more is carried out.
    """

    def __init__(
        self,
        number: int,
        *,
        begin: Callable[[Response, list[SubmittedOperation]], Finish],
        done: Callable[[Response, float], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self._begin, self._done, self._broken = begin, done, broken
        self._given: queue.SimpleQueue[tuple[Response, list[SubmittedOperation]] | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[tuple[Response, list[SubmittedOperation], Finish, float] | None] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=work, name=f"headway-hvd-{name}-{number}", daemon=True)
            for name, work in (("begin", self._begin_all), ("finish", self._finish_all))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, response: Response, entries: list[SubmittedOperation]) -> None:
        """Hands it a response, and the entries of its names."""
        self._given.put((response, entries))

    def close(self) -> None:
        """Carries out what it was given, and ends its threads."""
        self._given.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _begin_all(self) -> None:
        while (item := self._given.get()) is not None:
            response, entries = item
            began_s = time.perf_counter()
            try:
                finish: Finish = do_nothing if response.error else self._begin(response, entries)
            except BaseException as error:  # whoever waits for it must hear of it, whatever it is
                self._broken(error)
                break
            self._begun.put((response, entries, finish, began_s))
        self._begun.put(None)

    def _finish_all(self) -> None:
        while (item := self._begun.get()) is not None:
            response, entries, finish, began_s = item
            try:
                finish()
            except BaseException as error:
                self._broken(error)
                return
            for entry in entries:
                entry.end(response.error)
            self._done(response, began_s)


def do_nothing() -> None:
    pass
