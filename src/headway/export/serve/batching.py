"""Batcher: one thread that computes everything that waits, up to a largest batch, and never waits for more.

A timer would make every request wait while the machine is idle. Without one, a batch is what came while the batch
before was computed: 1 at low load, and larger the more there is to do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from queue import SimpleQueue
from typing import final

from headway.export.serve.inputs import Payload
from headway.export.serve.jobs import Answer, Job
from headway.export.serve.metrics import ServeMetrics
from headway.export.serve.problems import refuse_full, refuse_hopeless
from headway.export.serve.served_model import BatchRecord, ServedModel
from headway.export.serve.shadow import Shadow
from headway.http.problems import ProblemError

LOG = logging.getLogger("headway.export")

BRIEF_S, BRIEF_PIXELS, BRIEF_BYTES = 0.002, 1 << 16, 1 << 15
"""Longest work that the event loop's thread does itself, if nothing else is under way: a few images of a small network,
in files that are not long either, since Pillow reads their chunks and markers one by one, some microseconds for each.
Waking the thread and being woken by it took 0.3 ms of CPU time, a third of what `cifar_resnet` takes for an image."""

Outcomes = list[tuple[Job, Answer | ProblemError]]

# Seconds per image are averaged over about so many batches, for Retry-After.
_AVERAGE_BATCHES = 16


@final
@dataclass(frozen=True, slots=True)
class _Swap:
    """A model that takes over between two batches.

    Attributes:
        done: called with the model before it, in the inference thread.
    """

    model: ServedModel
    done: Callable[[ServedModel], None]


@final
class Batcher:
    """Queue and inference thread of a model; brief work is done without the thread.

    Its methods are called by the event loop's thread.

    Args:
        model: answers; closed by `close`, or when another one takes over.
        batch: most images at once, unless one request has more.
        capacity: most images that wait.
        pixels: most pixels that are decoded at once, unless one request has more.
        shadow: gets every batch after it has been answered.

    Attributes:
        model: the one that answers now.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        batch: int,
        capacity: int,
        pixels: int,
        metrics: ServeMetrics,
        shadow: Shadow | None = None,
    ) -> None:
        self.model = model
        self._batch, self._capacity, self._pixels = batch, capacity, pixels
        self._metrics, self._shadow = metrics, shadow
        self._loop = asyncio.get_running_loop()
        self._fresh = list[Job]()
        # None ends the thread. SimpleQueue is written in C: `get` costs a fifth of a Condition's wait.
        self._queue: SimpleQueue[list[Job | _Swap | None]] = SimpleQueue()
        # Images so far. `_taken` is written by the thread alone, the others by the event loop's alone: neither needs a
        # lock. What is given and not settled is in the queue, or is computed.
        self._given, self._taken, self._settled = 0, 0, 0
        self._brief = 0
        self._seconds_per_image = model.seconds
        # A daemon: a network that hangs must not keep a process that was told twice to stop.
        self._thread = threading.Thread(target=self._work, name="headway-inference", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of images that wait, without those that are computed right now."""
        return self._given - self._taken - self._brief

    def check_room(self, images: int) -> None:
        """Raises ProblemError (503, with Retry-After) if so many images would not fit into the queue."""
        if self.waiting + images > self._capacity:
            raise refuse_full(self.waiting, max(1, ceil(self.waiting * self._seconds_per_image)))

    def submit(self, job: Job) -> None:
        """Queues a job. Raises ProblemError (503) if the queue is full, or is too long for the job's deadline."""
        self.check_room(job.images)
        unsettled = self._given - self._settled
        if job.is_late():
            raise job.refuse_late()
        if unsettled and job.deadline_s is not None:
            # In overload, everything in a queue would come too late, and be computed in vain or not at all.
            expected_s = (unsettled + job.images) * self._seconds_per_image
            if expected_s > job.deadline_s - time.monotonic():
                raise refuse_hopeless(expected_s, job.deadline_ms or 0.0)
        self._given += job.images
        self._fresh.append(job)
        # Requests that one iteration of the event loop reads go to the thread together, at its end.
        if len(self._fresh) == 1:
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        if self._is_brief(fresh):
            self._brief += sum(job.images for job in fresh)
            self._settle(*self._answer(fresh))
        else:
            self._queue.put([*fresh])

    def _is_brief(self, jobs: list[Job]) -> bool:
        """Returns True if jobs take no longer than waking the thread is worth, and the thread is idle."""
        images = sum(job.images for job in jobs)
        if self._given - self._settled != images or images > self._batch:
            return False
        # What the model took after its warm-up, at best: a mean would grow with whatever else the machine does.
        if images * self.model.seconds > BRIEF_S:
            return False
        # A small file may be a large image, and a small image a large file.
        size = sum(job.payload.count_bytes() for job in jobs if job.payload is not None)
        return sum(job.pixels for job in jobs) <= BRIEF_PIXELS and size <= BRIEF_BYTES

    async def swap(self, model: ServedModel) -> None:
        """Lets another model answer all that comes from now on, and closes the one before."""
        swapped: asyncio.Future[ServedModel] = self._loop.create_future()
        swap = _Swap(model, lambda old: self._call_loop(swapped.set_result, old))
        # Behind what waits already, which the model before answers.
        self._hand_over()
        self._queue.put([swap])
        old = await swapped
        self._seconds_per_image = model.seconds
        old.close()

    async def close(self) -> None:
        """Answers what waits, then ends the thread and closes the model."""
        self._hand_over()
        self._queue.put([None])
        await asyncio.to_thread(self._thread.join)
        self.model.close()

    def _call_loop(self, function: Callable[..., object], *arguments: object) -> None:
        # The loop is closed if the process was told twice to stop: nobody waits any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _work(self) -> None:
        """Answers what comes, until None comes. Runs in the thread."""
        backlog: deque[Job | _Swap | None] = deque()
        while True:
            if not backlog:
                backlog.extend(self._queue.get())
            while not self._queue.empty():
                backlog.extend(self._queue.get())
            entry = backlog.popleft()
            if entry is None:
                return
            if isinstance(entry, _Swap):
                old, self.model = self.model, entry.model
                entry.done(old)
                continue
            jobs, images, pixels = [entry], entry.images, entry.pixels
            # A swap or the end stays in its place: what was queued before it is answered before it.
            while backlog and isinstance(following := backlog[0], Job):
                if images + following.images > self._batch or pixels + following.pixels > self._pixels:
                    break
                images, pixels = images + following.images, pixels + following.pixels
                jobs.append(following)
                backlog.popleft()
            self._taken += images
            self._call_loop(self._settle, *self._answer(jobs))

    def _answer(self, jobs: list[Job]) -> tuple[Outcomes, list[BatchRecord]]:
        """Decodes and computes a batch, all but what nobody waits for any more."""
        outcomes, live = Outcomes(), list[tuple[Job, Payload]]()
        for job in jobs:
            # Read once: the event loop's thread may take it away at the deadline.
            payload = job.payload
            if payload is None or not job.is_wanted():
                outcomes.append((job, _GONE))
            elif job.is_late():
                outcomes.append((job, job.refuse_late()))
            else:
                live.append((job, payload))
        # Read once: brief work and a swap may happen at the same time.
        model = self.model
        computed, records = self._compute(model, live) if live else (Outcomes(), [])
        if self._shadow is not None:
            for record in records:
                self._shadow.offer(model, record)
        return outcomes + computed, records

    def _compute(self, model: ServedModel, live: list[tuple[Job, Payload]]) -> tuple[Outcomes, list[BatchRecord]]:
        try:
            outcomes, record = model.answer([payload for _, payload in live])
        # Whatever it is, the other requests of the batch and the next batches are answered.
        except Exception:
            if len(live) == 1:
                LOG.exception("A request failed.")
                return [(live[0][0], _FAILED)], []
            # One of them is the cause, and is found by trying each alone.
            alone = [self._compute(model, [pair]) for pair in live]
            return [pair for outcomes, _ in alone for pair in outcomes], [one for _, found in alone for one in found]
        return [(job, outcome) for (job, _), outcome in zip(live, outcomes, strict=True)], [record]

    def _settle(self, outcomes: Outcomes, records: list[BatchRecord]) -> None:
        """Sets the outcomes of a batch. Runs in the event loop's thread."""
        for job, outcome in outcomes:
            self._settled += job.images
            job.settle(outcome)
        for record in records:
            metrics = self._metrics
            metrics.decode_s += record.decode_s
            metrics.compute_s += record.compute_s
            if record.images:
                metrics.batches.add(record.images)
                spent_s = (record.decode_s + record.compute_s) / record.images
                self._seconds_per_image += (spent_s - self._seconds_per_image) / _AVERAGE_BATCHES


_GONE = ProblemError(503, "the client has left")
_FAILED = ProblemError(500, "the request failed on the server", "Look into the log of the server.")
