"""PhaseThread: a thread that runs one phase of each job, so that several jobs are in different phases at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class PhaseThread(Generic[T]):
    """Takes jobs in order and runs one phase of each.

    Args:
        work: the phase. then: called after it, for example `put` of the next phase.
        on_error: called instead of `then` with an exception of `work`.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[T], None],
        *,
        then: Callable[[T], None],
        on_error: Callable[[T, BaseException], None],
    ) -> None:
        self._work, self._then, self._on_error = work, then, on_error
        self._jobs: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"headway-{name}", daemon=True)
        self._thread.start()

    def put(self, job: T) -> None:
        """Queues a job."""
        self._jobs.put((job,))

    def close(self) -> None:
        """Runs the queued jobs, and ends the thread."""
        self._jobs.put(None)
        # A thread cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            try:
                self._work(item[0])
            # BaseException: threads that wait for the job must get the error, whatever it is.
            except BaseException as error:
                self._on_error(item[0], error)
                continue
            self._then(item[0])
