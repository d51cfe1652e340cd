"""Pools of workers: each runs tasks in their order, and gives their results in the same order."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from typing import Any, Literal, NoReturn, final

import torch
import torch.multiprocessing

from headway.core.errors import HeadwayError, UsageError
from headway.data.workers.messages import Message, receive_message, send_message
from headway.data.workers.sample_seeds import preserve_generators
from headway.data.workers.user_failure import UserFailure

# Seconds after which an idle worker looks for its parent. It also sees the end of the parent by its closed pipe at
# once, unless another process inherited the pipe.
PARENT_CHECK_S = 2.0

# Seconds that a worker gets to end by itself before it is terminated.
GOODBYE_S = 0.5


class Work(ABC):
    """The function of a pool. It is copied into each process: by a fork where that is the default of multiprocessing,
    else by pickle."""

    @abstractmethod
    def start(self, number: int, workers: int) -> None:
        """Called once in each worker process, before its first task."""

    @abstractmethod
    def __call__(self, task: Any) -> Any:
        """Returns the result of a task, or a UserFailure."""


class WorkerPool(ABC):
    """Runs a function on tasks, ahead of need. `build_pool` makes one.

    Attributes:
        workers: number of processes or threads; 0: none.
    """

    workers: int

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Number of tasks that were submitted and not received."""

    @abstractmethod
    def submit(self, task: Any) -> None:
        """Adds a task."""

    @abstractmethod
    def receive(self) -> Any:
        """Waits for the result of the oldest task, and returns it.

        Raises:
            UserCodeError: the user's code failed in it.
            HeadwayError: its worker process ended.
        """

    @abstractmethod
    def count_ready(self) -> int:
        """Counts the results that are waiting."""

    @abstractmethod
    def discard(self, *, settle: bool = False) -> None:
        """Forgets all tasks in flight. `settle`: waits until no worker works on one any more."""

    @abstractmethod
    def close(self) -> None:
        """Ends the workers."""


def build_pool(work: Work, workers: int, *, kind: Literal["process", "thread"] = "process") -> WorkerPool:
    """Builds a pool of worker processes or threads, or one that works in the calling thread if `workers` is 0."""
    if not workers:
        return InlinePool(work)
    return ProcessPool(work, workers) if kind == "process" else ThreadPool(work, workers)


def _expect_success(result: Any) -> Any:
    """Returns the result of a task. Raises UserCodeError if the user's code failed in it."""
    if isinstance(result, UserFailure):
        result.raise_error()
    return result


@final
class InlinePool(WorkerPool):
    """Runs each task when its result is asked for, and leaves the random generators as they were."""

    workers = 0

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tasks = deque[Any]()

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def submit(self, task: Any) -> None:
        self._tasks.append(task)

    def receive(self) -> Any:
        with preserve_generators():
            result = self._work(self._tasks.popleft())
        return _expect_success(result)

    def count_ready(self) -> int:
        return 0

    def discard(self, *, settle: bool = False) -> None:
        self._tasks.clear()

    def close(self) -> None:
        self._tasks.clear()


@final
class ThreadPool(WorkerPool):
    """Runs tasks in threads of this process, for code that releases the GIL."""

    def __init__(self, work: Work, workers: int) -> None:
        self.workers, self._work = workers, work
        self._futures = deque[Future[Any]]()
        self._executor = ThreadPoolExecutor(workers, "headway-transform")

    @property
    def in_flight(self) -> int:
        return len(self._futures)

    def submit(self, task: Any) -> None:
        self._futures.append(self._executor.submit(self._work, task))

    def receive(self) -> Any:
        return _expect_success(self._futures.popleft().result())

    def count_ready(self) -> int:
        return sum(future.done() for future in list(self._futures))

    def discard(self, *, settle: bool = False) -> None:
        futures = list(self._futures)
        self._futures.clear()
        for future in futures:
            future.cancel()
        if settle:
            wait_futures(futures)

    def close(self) -> None:
        self.discard()
        self._executor.shutdown()


@final
class ProcessPool(WorkerPool):
    """Worker processes, each with its own pipe. Task k goes to worker k mod n, so results need no sorting.

    PyTorch's DataLoader works alike. It is not used because it stops at the end of each epoch, raises the end of a
    worker from a signal handler in the middle of the training loop, and shows no queue lengths.
    """

    def __init__(self, work: Work, workers: int) -> None:
        self.workers = workers
        self._process = os.getpid()
        context = torch.multiprocessing.get_context()
        # Tasks of an older generation are skipped by the workers.
        self._generation = RawValue("q", 0)
        self._connections = list[Connection]()
        self._processes = list[BaseProcess]()
        for number in range(workers):
            mine, theirs = context.Pipe()
            # A forked worker inherits the pipes of those before it; held open there, they would hide our end.
            inherited = [*self._connections, mine] if context.get_start_method() == "fork" else []
            process = context.Process(
                target=_run_worker,
                args=(theirs, inherited, work, self._generation, number, workers),
                name=f"headway-worker-{number}",
                daemon=True,
            )
            # Python 3.12 warns of a fork beside threads. The workers use none of the locks that these may hold.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
                _start_process(process, context.get_start_method())
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)
        self._close = weakref.finalize(
            self, _end_workers, self._process, self._processes, self._connections, self._generation
        )
        # By worker: generations of the tasks that it has, and results that were read from its pipe.
        self._tasks = [deque[int]() for _ in range(workers)]
        self._results = [deque[Message]() for _ in range(workers)]
        self._ended = set[int]()
        self._submitted = self._received = 0

    # One thread may submit while another receives: each counter has one writer.
    @property
    def in_flight(self) -> int:
        return self._submitted - self._received

    def submit(self, task: Any) -> None:
        worker, generation = self._submitted % self.workers, self._generation.value
        self._tasks[worker].append(generation)
        # The end of a worker is reported when its results are asked for, behind those that it has finished.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connections[worker].send((generation, task))
        self._submitted += 1

    def receive(self) -> Any:
        worker = self._received % self.workers
        while not self._results[worker]:
            self._read_pipes(worker, block=True)
        result = self._results[worker].popleft().load()
        self._received += 1
        return _expect_success(result)

    def count_ready(self) -> int:
        for worker in range(self.workers):
            self._read_pipes(worker, block=False)
        return sum(map(len, self._results))

    def discard(self, *, settle: bool = False) -> None:
        self._generation.value += 1
        for results in self._results:
            while results:
                results.popleft().drop()
        self._submitted = self._received = 0
        if not settle:
            return
        for worker, tasks in enumerate(self._tasks):
            while tasks and worker not in self._ended:
                self._read_pipes(worker, block=True)

    def close(self) -> None:
        self._close()

    def _read_pipes(self, worker: int, *, block: bool) -> None:
        """Reads a result of a worker; `block`: waits for one, and reads those of others meanwhile."""
        if not block:
            while self._tasks[worker] and worker not in self._ended and self._connections[worker].poll():
                self._read_result(worker)
            return
        # A worker that ended is reported in its turn: others may have finished what comes before.
        if worker in self._ended:
            self._raise_ended(worker)
        alive = {pipe: other for other, pipe in enumerate(self._connections) if other not in self._ended}
        # A pipe whose other end an unrelated process inherited stays open, so the process itself counts too.
        sentinel = self._processes[worker].sentinel
        ready = wait([*alive, sentinel])
        for pipe, other in alive.items():
            if pipe in ready:
                self._read_result(other)
        if sentinel in ready and self._connections[worker] not in ready:
            self._ended.add(worker)

    def _read_result(self, worker: int) -> None:
        """Reads one message of a worker, or notes its end."""
        try:
            message = receive_message(self._connections[worker])
        except (EOFError, OSError):
            self._ended.add(worker)
            return
        if self._tasks[worker].popleft() == self._generation.value:
            self._results[worker].append(message)
        else:
            message.drop()

    def _raise_ended(self, worker: int) -> NoReturn:
        process = self._processes[worker]
        process.join(GOODBYE_S)
        code = process.exitcode
        if code is not None and code < 0:
            end, fix = f"was killed by {signal.Signals(-code).name}", "Look for an error above, and try workers=0."
            if -code == signal.SIGKILL:
                fix = "The system kills processes if memory is short: use fewer workers or smaller batches."
        else:
            end, fix = f"ended with status {code}", "Look for an error above, and try workers=0."
        raise HeadwayError(f"worker process {worker} of {self.workers} (pid {process.pid}) {end}", fix=fix)


def _start_process(process: BaseProcess, method: str) -> None:
    try:
        process.start()
    # A fork copies everything; the other methods pickle it.
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if method == "fork":
            raise
        what = f"your code cannot be sent to worker processes ({error})"
        fix = "Define its classes and functions at the top of a module, or set workers=0."
        raise UsageError(what, where="workers", fix=fix) from error


def _run_worker(
    connection: Connection, inherited: Sequence[Connection], work: Work, generation: Any, number: int, workers: int
) -> None:
    """Runs tasks until the pipe is closed or says so."""
    for other in inherited:
        other.close()
    parent = os.getppid()
    # Ctrl-C reaches every process of the terminal; the parent decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # As many processes as cores, so each has one thread.
    torch.set_num_threads(1)
    work.start(number, workers)
    try:
        while True:
            while not connection.poll(PARENT_CHECK_S):
                if os.getppid() != parent:
                    return
            message = connection.recv()
            if message is None:
                return
            begun, task = message
            if begun != generation.value:
                send_message(connection, None)
                continue
            send_message(connection, work(task))
    # The parent is gone.
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_workers(
    owner: int, processes: Sequence[BaseProcess], connections: Sequence[Connection], generation: Any
) -> None:
    """Ends the processes: by a message, then by signals."""
    # A forked child inherits the pool, whose processes are not its own.
    if os.getpid() != owner:
        return
    generation.value += 1
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send(None)
        connection.close()
    for process in processes:
        process.join(GOODBYE_S)
        if process.is_alive():
            process.terminate()
            process.join(GOODBYE_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
