"""The launcher: starts a run's workers, keeps the store and the coordinator for them, replaces those that are lost."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Literal, final

from headway.comm.coordinator import Coordinator, CoordinatorEvent, GenerationFormed, RunBegan, WorkerLeft, WorkerSlot
from headway.comm.messages import BEATS
from headway.core.errors import CommunicationError
from headway.core.hosts import choose_listening_address
from headway.core.key_value_store import StoreServer
from headway.core.printable import escape_controls
from headway.core.rendezvous import new_secret
from headway.core.signals import handle_signals
from headway.launch.hosts import Host, own_address
from headway.launch.remote_workers import RSH, Remote
from headway.launch.worker_output import SENTENCE, Output, clear_line
from headway.launch.workers import Crew, Workers

BACKOFF_S = 0.5
"""Before a lost worker is replaced; doubled for each replacement that was lost before it had joined."""
FAILED_STARTS = 5
"""In a row, after which a place is given up."""
STARTS, WITHIN_S = 6, 60.0
"""A place gets at most so many workers in so many seconds."""
GRACE_S = 2.0
"""Where one worker fails so that the run does, the others get so long to say the same."""


def launch(
    command: Sequence[str],
    hosts: Sequence[Host],
    *,
    again: Callable[[], Sequence[str]] | None = None,
    environ: Mapping[str, str] | None = None,
    how: str = "",
    timeout_s: float = 10.0,
    respawn: bool = True,
    on_rank_failure: Literal["continue", "restart"] = "continue",
    restarts: int = 3,
) -> int:
    """Runs workers to their end, and returns 0 where the run finished, else the exit status of the first that failed.

    A worker is a Python process that uses `CoordinatorClient.from_environment`. One that leaves with
    `leave(done=True)`, and then ends with another status than 0 has failed for all: all are ended, and what it said is
    said once. One that ends otherwise was lost. The first SIGTERM or Ctrl-C is passed on as SIGTERM; the second kills.

    Args:
        command: Python's arguments.
        hosts: with how many workers each.
        again: gives the command after a restart, and that of who takes the place of a worker that was lost before the
            run began; default: the same one.
        environ: of each worker, beside this process's own.
        how: sentence that says how to go on where no worker is left.
        timeout_s: silence after which a worker is lost.
        respawn: lost workers are replaced.
        on_rank_failure: `continue`: the others go on without a lost one; `restart`: all are ended and started again.
        restarts: at most so many.

    Raises:
        CommunicationError: a host cannot be used, or no worker is left and none has said why.
        UsageError: it cannot be told how other hosts reach this one.
    """
    address, again = own_address(hosts), again or (lambda: command)
    first, restart, environ = command, 0, environ or {}
    while True:
        with closing(_Launch(first, again, environ, hosts, address, timeout_s=timeout_s, respawn=respawn)) as run:
            run.ends_on_rank_failure = on_rank_failure == "restart"
            run.run()
            if not run.lost or restart == restarts:
                return run.status(how)
        restart += 1
        _say(f"All workers begin again: restart {restart} of at most {restarts}.")
        first = again()


def _say(text: str) -> None:
    print(clear_line() + SENTENCE + escape_controls(text), file=sys.stderr, flush=True)


@dataclass
class _Worker:
    """What is known of a worker. `left`: how it left the run; `status`: with which its process ended; `due_s`: when
    another one takes its place."""

    id: str
    slot: WorkerSlot
    rank: int
    joining: bool
    member: bool = False
    left: str | None = None
    status: int | None = None
    why: str = ""
    due_s: float | None = None


@dataclass(frozen=True)
class _Ended:
    worker: str
    status: int
    why: str


@final
class _Launch:
    """From the start of all workers to the end of the last. Events of threads and signals come through one queue.

    Attributes:
        ends_on_rank_failure: a worker that is lost takes the others with it. lost: one was.
    """

    def __init__(
        self,
        command: Sequence[str],
        again: Callable[[], Sequence[str]],
        environ: Mapping[str, str],
        hosts: Sequence[Host],
        address: str,
        *,
        timeout_s: float,
        respawn: bool,
    ) -> None:
        self._command, self._again, self._environ, self._hosts = command, again, environ, tuple(hosts)
        self._address, self._respawn = address, respawn
        self._slots = [(host, local) for host, one in enumerate(hosts) for local in range(one.procs)]
        self._events: SimpleQueue[CoordinatorEvent | _Ended | int] = SimpleQueue()
        self._workers: dict[str, _Worker] = {}
        self._members: set[str] = set()
        self._ended: list[_Worker] = []
        self._began = self._stopping = False
        self._failed: _Worker | None = None
        self._patience_s = timeout_s
        self._kills: dict[str, float] = {}
        self._failures: defaultdict[WorkerSlot, int] = defaultdict(int)
        self._started: defaultdict[WorkerSlot, deque[float]] = defaultdict(lambda: deque(maxlen=STARTS))
        self._said = ""
        self.ends_on_rank_failure = self.lost = False
        self._beat_s = timeout_s / BEATS
        self._next_beat = monotonic()
        self._output = Output({_id(slot, 0): rank for rank, slot in enumerate(self._slots)})
        self._secret = new_secret()
        listens = choose_listening_address(address)
        self._store = StoreServer(self._secret.encode(), listens)
        self._coordinator = Coordinator(
            self._slots,
            secret=self._secret.encode(),
            timeout_s=timeout_s,
            store_port=self._store.port,
            on_event=self._hear,
            address=listens,
        )
        rsh = os.environ.get("HEADWAY_RSH") or RSH
        show, ended = self._output.show, lambda *end: self._events.put(_Ended(*end))
        self._crews: list[Crew] = [
            Workers(show, ended) if host.here else Remote(host.name, show, ended, timeout_s=timeout_s, rsh=rsh)
            for host in hosts
        ]

    def run(self) -> None:
        """From the start to the end of the last worker."""
        with self._signals():
            for slot in self._slots:
                self._start(slot, 0)
            while not self._is_over():
                with suppress(Empty):
                    self._take(self._events.get(timeout=self._wait_s()))
                self._do_what_is_due()

    def close(self) -> None:
        """Kills what is left, and ends the coordinator and the store."""
        for crew in self._crews:
            crew.close()
        self._output.close()
        self._coordinator.close()
        self._store.close()

    def _hear(self, event: CoordinatorEvent) -> None:
        """In the coordinator's thread: what comes next in the output is of the new ranks."""
        if isinstance(event, GenerationFormed):
            self._output.place({worker.id: rank for rank, worker in enumerate(event.workers)})
        elif isinstance(event, RunBegan):
            self._output.release()
        self._events.put(event)

    def _signals(self) -> AbstractContextManager[None]:
        return handle_signals(lambda number, frame: self._events.put(number), signal.SIGTERM, signal.SIGINT)

    # Workers come and go.

    def _start(self, slot: WorkerSlot, attempt: int) -> None:
        host, local = slot
        rank = self._slots.index(slot)
        worker = _Worker(_id(slot, attempt), slot, rank, joining=self._began)
        self._workers[worker.id] = worker
        where = f"[{self._address}]" if ":" in self._address else self._address
        environ = {
            **self._environ,
            "HEADWAY_COORDINATOR": f"{where}:{self._coordinator.port}",
            "HEADWAY_SECRET": self._secret,
            "HEADWAY_MEMBER": worker.id,
            "HEADWAY_JOINING": str(int(worker.joining)),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._slots)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self._hosts[host].procs),
        }
        if not worker.joining:
            self._output.place({worker.id: rank})
        command = self._again() if attempt and not worker.joining else self._command
        self._crews[host].start(worker.id, command, environ, inherit=rank == 0 and not worker.joining)

    def _take(self, event: CoordinatorEvent | _Ended | int) -> None:
        match event:
            case GenerationFormed():
                self._members = {worker.id for worker in event.workers}
                self._note_members()
            case RunBegan():
                self._began = True
                self._note_members()
            case WorkerLeft():
                self._members.discard(event.worker.id)
                if worker := self._workers.get(event.worker.id):
                    worker.left = event.how
                    if event.how == "died":  # it has closed its connection, and may still have to say why
                        self._kills[worker.id] = monotonic() + self._patience_s
                    elif event.how == "silent" and not self._began:
                        self._kills[worker.id] = monotonic()
                    self._after(worker)
            case _Ended():
                worker = self._workers[event.worker]
                worker.status, worker.why = event.status, event.why
                self._ended.append(worker)
                if event.status < 0:
                    self._coordinator.mark_dead(worker.id)
                self._after(worker)
                if self._failed is None:
                    self._output.ended(worker.id)
            case _:
                self._signal(signal.SIGKILL if self._stopping else signal.SIGTERM)
                self._stopping, self.lost = True, False

    def _note_members(self) -> None:
        if self._began:
            for member in self._members:
                worker = self._workers[member]
                worker.member = True
                self._failures[worker.slot] = 0

    def _after(self, worker: _Worker) -> None:
        """A worker has left, or its process has ended, or both."""
        in_order = worker.left in ("done", "stopped")
        if self._failed or self.lost or (in_order and worker.status is None):
            return
        if self._began and in_order and worker.member:
            if worker.left == "done" and (worker.status or 0) > 0:
                self._fail(worker)
        elif self._stopping:
            return
        elif self._began:
            if self.ends_on_rank_failure:
                self.lost = True
                for other in self._workers.values():
                    if other.left != "died":
                        self._kills[other.id] = monotonic()
            else:
                self._replace(worker)
        elif worker.status == 0:  # it found nothing to do
            self._coordinator.give_up_slot(worker.slot)
        elif worker.status is not None:
            by_chance = worker.status < 0 and not worker.why and self._failures[worker.slot] + 1 < FAILED_STARTS
            if self._respawn and by_chance:
                self._replace(worker)
            else:
                self._fail(worker)

    def _fail(self, worker: _Worker) -> None:
        """Why it has ended is why the run ends."""
        self._failed = worker
        for other in self._workers.values():
            leaving = other.left in ("done", "stopped")
            self._kills[other.id] = monotonic() + GRACE_S + leaving * self._patience_s

    def _replace(self, worker: _Worker) -> None:
        """Another one is to take its place: at once where it was silent, else when its process has ended."""
        ending = worker.left == "died" and worker.status is None
        if ending or worker.due_s is not None or not self._respawn or (self._began and not self._members):
            return
        if worker.why and worker.why != self._said:
            self._said = worker.why
            _say(f"{worker.why}.")
        failures = self._failures[worker.slot] = 0 if worker.member else self._failures[worker.slot] + 1
        if failures >= FAILED_STARTS:
            worker.due_s = inf
            _say(f"{self._name(worker)} is given up: {failures} workers in a row were lost before they had joined.")
            return
        started = self._started[worker.slot]
        worker.due_s = monotonic() + BACKOFF_S * 2**failures
        if len(started) == STARTS:
            worker.due_s = max(worker.due_s, started[0] + WITHIN_S)

    def _signal(self, number: int) -> None:
        for worker in self._workers.values():
            if worker.status is None:
                self._crews[worker.slot[0]].signal(worker.id, number)

    # Time passes.

    def _waiting(self) -> dict[str, float]:
        """Places to be filled again, and when."""
        if self._stopping or self._failed or self.lost or (self._began and not self._members):
            return {}
        dues = {worker.id: worker.due_s for worker in self._workers.values() if worker.due_s is not None}
        return {worker: due_s for worker, due_s in dues.items() if due_s < inf}

    def _wait_s(self) -> float:
        return max(0.0, min(self._next_beat, *self._kills.values(), *self._waiting().values(), inf) - monotonic())

    def _do_what_is_due(self) -> None:
        now = monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            for crew in self._crews:
                crew.beat()
            if self._failed is None:
                self._output.beat()
        for name in [name for name, due_s in self._waiting().items() if due_s <= now]:
            worker = self._workers[name]
            worker.due_s, self._kills[name] = inf, now  # it was silent, and may still wake
            self._started[worker.slot].append(now)
            self._start(worker.slot, int(name.rpartition(".")[2]) + 1)
        for name in [name for name, due_s in self._kills.items() if due_s <= now]:
            del self._kills[name]
            if self._workers[name].status is None:
                self._crews[self._workers[name].slot[0]].signal(name, signal.SIGKILL)

    def _is_over(self) -> bool:
        running = [worker for worker in self._workers.values() if worker.status is None]
        if self._began and not self._members and not self._stopping:
            for worker in running:  # newcomers and silent ones; the others end by themselves
                if worker.left in (None, "silent"):
                    self._crews[worker.slot[0]].signal(worker.id, signal.SIGKILL)
        return not running and not self._waiting()

    # The end.

    def status(self, how: str) -> int:
        """With which the launcher ends; see `launch`."""
        if self._failed is not None:
            return self._of_failure(self._failed)
        for left in ("done", "stopped"):
            members = [worker for worker in self._ended if worker.left == left and worker.member]
            if statuses := [_positive(worker.status) for worker in members]:
                return max(statuses) if left == "done" else max(1, *statuses)
        if self._stopping:
            _say("Stopped.")
            return 1
        if not self._began:
            return 0
        lost = [worker for worker in self._ended if worker.member]
        spoke = next((worker for worker in lost if (worker.status or 0) > 0), None)
        if spoke is None:
            raise CommunicationError(f"no worker is left: {self._end_of(lost[-1])}", fix=how)
        _say(f"No worker is left. {how}".rstrip())
        return _positive(spoke.status)

    def _of_failure(self, failed: _Worker) -> int:
        """One or all have failed for the run: what they said, once."""
        ended = [worker for worker in self._ended if worker.left != "died" or not self._began]
        statuses = {worker.id: worker.status for worker in ended if worker.status is not None and worker.status > 0}
        self._output.failed(statuses, failed.status or 0)
        if failed.id in statuses and not failed.why:
            return statuses[failed.id]
        raise CommunicationError(self._end_of(failed))

    def _name(self, worker: _Worker) -> str:
        host, local = worker.slot
        return f"worker {local} on host {self._hosts[host].name}"

    def _end_of(self, worker: _Worker) -> str:
        if worker.why:
            return worker.why
        if worker.left == "silent":
            return f"{self._name(worker)} was silent for too long at the start, and was ended"
        number = -(worker.status or 0)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = " (as the kernel does where memory is short)" if number == signal.SIGKILL else ""
        return f"{self._name(worker)} was ended by {name}{hint}"


def _id(slot: WorkerSlot, attempt: int) -> str:
    return f"{slot[0]}.{slot[1]}.{attempt}"


def _positive(status: int | None) -> int:
    """An exit status, also for a process that a signal has ended."""
    return abs(status or 0) and max(1, status or 0)
