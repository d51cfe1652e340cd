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
        name: name of the thread.
        run_phase: runs the phase of a job.
        on_done: called after it, for example `put` of the next phase.
        on_error: called instead of `on_done` with an exception of `run_phase`.
    """

    def __init__(
        self,
        name: str,
        run_phase: Callable[[T], None],
        *,
        on_done: Callable[[T], None],
        on_error: Callable[[T, BaseException], None],
    ) -> None:
        self._run_phase, self._on_done, self._on_error = run_phase, on_done, on_error
        self._jobs: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"headway-{name}", daemon=True)
        self._thread.start()

    def put(self, job: T) -> None:
        """Queues a job."""
        # In a tuple, since None ends the thread.
        self._jobs.put((job,))

    def close(self) -> None:
        """Runs the queued jobs, and ends the thread."""
        self._jobs.put(None)
        # A thread cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            (job,) = item
            try:
                self._run_phase(job)
            # BaseException: threads that wait for the job must get the error, whatever it is.
            except BaseException as error:
                self._on_error(job, error)
                continue
            self._on_done(job)
