"""Processes that run jobs side by side, each with its share of the cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar, final

from bench._arms import ROOT, close_pipes

J = TypeVar("J", bound=Hashable)


class WorkerEndedError(Exception):
    """A worker's process has ended; its last words."""


@final
class Worker:
    """One process of bench/_accuracy/batch_worker.py, with so many threads of torch."""

    def __init__(self, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench._accuracy.batch_worker"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def train(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Waits for a run of this recipe. Raises WorkerEndedError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(tree) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerEndedError(f"a run ended with status {self._process.wait()}: what it said stands above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the process, and a run of it."""
        self._process.kill()
        self._process.wait()
        close_pipes(self._process)


def work(
    jobs: Callable[[], list[J]],
    recipe: Callable[[J], dict[str, Any]],
    done: Callable[[J, dict[str, Any]], None],
    *,
    workers: int,
    minutes: float | None,
) -> bool:
    """Runs jobs, as many at once as there are workers, until there are none, or the time is over.

    Args:
        jobs: what is to be done as things stand, the most urgent first; asked again whenever one has ended.
        recipe: of a job.
        done: told of each that has ended, in this thread.
        minutes: after so many no job is begun; those under way are waited for.

    Returns:
        whether all was done.

    Raises:
        WorkerEndedError: a process has ended.
    """
    free: SimpleQueue[Worker] = SimpleQueue()
    cores = len(os.sched_getaffinity(0))
    processes = [Worker(max(1, cores // workers)) for _ in range(workers)]
    for process in processes:
        free.put(process)
    end = None if minutes is None else monotonic() + 60 * minutes
    under_way: dict[Future[dict[str, Any]], J] = {}

    def one(job: J) -> dict[str, Any]:
        process = free.get()
        try:
            return process.train(recipe(job))
        finally:
            free.put(process)

    try:
        with ThreadPoolExecutor(workers) as pool:
            try:
                while True:
                    late = end is not None and monotonic() > end
                    running = set(under_way.values())
                    for job in [] if late else [one for one in jobs() if one not in running]:
                        if len(under_way) == workers:
                            break
                        under_way[pool.submit(one, job)] = job
                    if not under_way:
                        return not jobs()
                    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                        done(under_way.pop(future), future.result())
            except BaseException:
                for process in processes:
                    process.close()  # what is under way ends, so that the pool's threads do
                raise
    finally:
        for process in processes:
            process.close()
