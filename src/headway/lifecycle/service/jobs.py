"""Jobs: work that takes longer than a client waits. A few run at once, some wait, and others are refused."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, final

from headway.http.problems import ProblemError
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.problems import explain_failure, refuse
from headway.lifecycle.service.settings import ServiceSettings

LOG = logging.getLogger("headway.lifecycle")

State = Literal["queued", "running", "done", "failed", "cancelled"]
LOG_LINES = 200
KEPT_JOBS = 1000
"""Jobs that are remembered after their end."""


@final
class CancelledJobError(Exception):
    """The job was cancelled. Its work raises it between two steps."""


@final
class Job:
    """One piece of work.

    Attributes:
        id: random.
        kind: what it does, such as `changes`.
        principal, target: who asked for it, and of which data set.
        state: `done` with an answer, `failed` with a problem.
        done, total: steps, for example files.
        is_process: it waits for a process, of which one runs at a time.
        answer: what it has brought about.
        problem: why it failed, as JSON.
    """

    def __init__(self, id: str, principal: str, target: str, total: int, kind: str = "changes") -> None:
        self.id, self.principal, self.target, self.kind = id, principal, target, kind
        self.state: State = "queued"
        self.is_process = False
        self.done, self.total = 0, total
        self.created_s = time.time()
        self.answer: Answer | None = None
        self.problem: dict[str, Any] | None = None
        self._lines = deque[str](maxlen=LOG_LINES)
        self._cancelled = threading.Event()
        self._cancel_work: Callable[[], None] = lambda: None

    @property
    def is_waiting(self) -> bool:
        """True if it has not begun, and is still wanted."""
        return self.state == "queued" and not self._cancelled.is_set()

    @property
    def is_ended(self) -> bool:
        """True if nothing more happens."""
        return self.state in ("done", "failed", "cancelled")

    def cancel(self) -> None:
        """Asks the job to end; it does so before its next step, and then changes nothing."""
        self._cancelled.set()
        self._cancel_work()

    def set_canceller(self, cancel: Callable[[], None]) -> None:
        """Sets what ends work that makes no steps, such as a process; called at once if the job was cancelled."""
        self._cancel_work = cancel
        if self._cancelled.is_set():
            cancel()

    def expect_wanted(self) -> None:
        """Raises CancelledJobError if it was cancelled."""
        if self._cancelled.is_set():
            raise CancelledJobError

    def advance(self, done: int) -> None:
        """Notes how far the work is. Raises CancelledJobError."""
        self.expect_wanted()
        self.done = done

    def end(self, answer: Answer) -> None:
        """Ends it with an answer: its result, or the problem for which it failed."""
        if answer.status >= 400:
            self.problem, self.state = dict(answer.body), "failed"
        else:
            self.answer, self.done, self.state = answer, self.total, "done"

    def say(self, line: str) -> None:
        """Adds a line to its log."""
        self._lines.append(line)

    def to_json(self) -> dict[str, Any]:
        """Returns what `GET /jobs/{id}` answers."""
        return {
            "job": self.id,
            "kind": self.kind,
            "dataset": self.target,
            "state": self.state,
            "progress": {"done": self.done, "total": self.total},
            "created_s": self.created_s,
            "log": list(self._lines),
            "result": None if self.answer is None else dict(self.answer.body),
            "location": None if self.answer is None else self.answer.headers.get("location"),
            "problem": self.problem,
        }


@final
class Jobs:
    """All jobs of a server.

    Attributes:
        is_closing: True once the server stops.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.is_closing = False
        self._settings = settings
        self._jobs = dict[str, Job]()
        self._pool = ThreadPoolExecutor(settings.jobs, thread_name_prefix="headway-job")
        # A training may take days, and must not hold up additions.
        self._processes = ThreadPoolExecutor(1, thread_name_prefix="headway-process")

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def expect_room(self, *, is_process: bool = False) -> None:
        """Raises ProblemError (429) if too many jobs wait. Processes and others do not keep each other out."""
        waiting = sum(job.is_waiting and job.is_process == is_process for job in self)
        if waiting >= self._settings.queued_jobs:
            what = f"{waiting} jobs wait already"
            raise refuse("too-many", what, "Send the request again later.", headers=[(b"retry-after", b"30")])

    def submit(self, job: Job, work: Callable[[Job], Answer], *, is_process: bool = False) -> None:
        """Adds a job.

        Args:
            is_process: it waits for a process, of which one runs at a time.
            work: called in a thread, also if the job was cancelled; raises CancelledJobError if it has ended for that.
        """
        job.is_process = is_process
        self.add(job)
        (self._processes if is_process else self._pool).submit(self._run, job, work)

    def add(self, job: Job) -> None:
        """Adds a job that has ended, so that its client can still ask for it."""
        self._jobs[job.id] = job
        ended = [one for one in self if one.is_ended]
        for old in ended[: max(0, len(ended) - KEPT_JOBS)]:
            del self._jobs[old.id]

    def find(self, id: str, principal: str | None) -> Job:
        """Returns a job; `principal` None: anybody's. Raises ProblemError (404)."""
        job = self._jobs.get(id)
        if job is None or (principal is not None and job.principal != principal):
            raise refuse("not-found", "there is no such job, or it ended long ago", "See /jobs.")
        return job

    def close(self) -> None:
        """Cancels what waits or runs, and waits for it."""
        self.is_closing = True
        for job in self:
            job.cancel()
        self._pool.shutdown(wait=True)
        self._processes.shutdown(wait=True)

    def _run(self, job: Job, work: Callable[[Job], Answer]) -> None:
        job.state = "running"
        try:
            job.end(work(job))
        except CancelledJobError:
            job.state = "cancelled"
        except Exception as error:
            if not isinstance(error, ProblemError):
                LOG.exception("A job failed.")
            job.end(build_failure(error))


def build_failure(error: Exception) -> Answer:
    """Returns the problem for which a job has failed, as an answer."""
    problem = error if isinstance(error, ProblemError) else explain_failure(error)
    return Answer(problem.status, problem.to_tree())
