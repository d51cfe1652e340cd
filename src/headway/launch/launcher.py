"""Starts the workers of a run, serves their store and coordinator, and replaces workers that are lost."""

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
from headway.launch.hosts import Host, find_launcher_address
from headway.launch.remote_workers import RSH, RemoteWorkers
from headway.launch.worker_output import ERROR_PREFIX, WorkerOutput, clear_line
from headway.launch.workers import LocalWorkers, WorkerCrew

# Threads (the coordinator's, the workers' output) and signal handlers only queue events. The main thread takes them one
# by one, so the state of `_LaunchSession` needs no lock.

# Wait before a lost worker is replaced; doubled for each replacement that was lost before it had joined.
BACKOFF_S = 0.5
# A slot is given up after this many failed starts in a row.
FAILED_STARTS = 5
# A slot gets at most this many workers in this time: a host that kills every worker must not fill the log.
MOST_STARTS, STARTS_WINDOW_S = 6, 60.0
# After a worker fails for the whole run, the others get this long to report the same error.
GRACE_S = 2.0


def launch(
    command: Sequence[str],
    hosts: Sequence[Host],
    *,
    restart_command: Callable[[], Sequence[str]] | None = None,
    environ: Mapping[str, str] | None = None,
    resume_hint: str = "",
    timeout_s: float = 10.0,
    respawn: bool = True,
    on_rank_failure: Literal["continue", "restart"] = "continue",
    restarts: int = 3,
) -> int:
    """Runs workers to their end. Returns 0 if the run finished, else the exit status of the first worker that failed.

    A worker is a Python process that uses `CoordinatorClient.from_environment`. If it calls `leave(done=True)` and ends
    with a status other than 0, the whole run has failed: all workers are ended, and its message is shown once. A worker
    that ends in any other way was lost. The first SIGTERM or Ctrl-C is passed on as SIGTERM; the second one kills.

    Args:
        command: arguments of the Python interpreter.
        hosts: the hosts, each with its number of workers.
        restart_command: returns the command after a restart, and for a worker that replaces one lost before the run
            began. Default: the same command.
        environ: variables for each worker, added to this process's own.
        resume_hint: sentence that says how to resume if no worker is left.
        timeout_s: silence after which a worker counts as lost.
        respawn: if True, lost workers are replaced.
        on_rank_failure: `continue` without the lost worker, or `restart` all workers.
        restarts: largest number of restarts.

    Raises:
        CommunicationError: a host cannot be used, or no worker is left and none has reported an error.
        UsageError: no address of this host is known by which the others reach it.
    """
    address, restart_command = find_launcher_address(hosts), restart_command or (lambda: command)
    first, restart, environ = command, 0, environ or {}
    while True:
        with closing(
            _LaunchSession(first, restart_command, environ, hosts, address, timeout_s=timeout_s, respawn=respawn)
        ) as run:
            run.ends_on_rank_failure = on_rank_failure == "restart"
            run.run()
            if not run.lost or restart == restarts:
                return run.compute_status(resume_hint)
        restart += 1
        _say(f"All workers are started again: restart {restart} of at most {restarts}.")
        # The command may be another one now: once its folder exists, the run is resumed.
        first = restart_command()


def _say(text: str) -> None:
    print(clear_line() + ERROR_PREFIX + escape_controls(text), file=sys.stderr, flush=True)


@dataclass
class _WorkerRecord:
    """State of a worker, as the launcher knows it.

    Attributes:
        joining: True if it was started to join a run that had begun.
        member: True once it was part of a generation of the run.
        left: how it left the run (done, stopped, died, silent); None if it has not.
        status: exit status of its process; None while it runs.
        why: reason of its end if it could not be started or its host was lost; empty otherwise.
        due_s: time at which its replacement starts; None if none is planned, `inf` if it was started or given up.
    """

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
class _ProcessEnded:
    """The process of a worker has ended."""

    worker: str
    status: int
    why: str


@final
class _LaunchSession:
    """One start of all workers, up to the end of the last one.

    Attributes:
        ends_on_rank_failure: if True, a lost worker ends all others.
        lost: True if that has happened.
    """

    def __init__(
        self,
        command: Sequence[str],
        restart_command: Callable[[], Sequence[str]],
        environ: Mapping[str, str],
        hosts: Sequence[Host],
        address: str,
        *,
        timeout_s: float,
        respawn: bool,
    ) -> None:
        self._command, self._restart_command = command, restart_command
        self._environ, self._hosts = environ, tuple(hosts)
        self._address, self._respawn = address, respawn
        # Host by host, so that ranks of one host are neighbours in the order of ranks.
        self._slots = [(host, local) for host, one in enumerate(hosts) for local in range(one.procs)]
        self._events: SimpleQueue[CoordinatorEvent | _ProcessEnded | int] = SimpleQueue()
        self._workers: dict[str, _WorkerRecord] = {}
        self._members: set[str] = set()
        self._ended_workers: list[_WorkerRecord] = []
        self._began = self._stopping = False
        self._failed: _WorkerRecord | None = None
        self._patience_s = timeout_s
        self._kill_times: dict[str, float] = {}
        self._failures: defaultdict[WorkerSlot, int] = defaultdict(int)
        self._start_times: defaultdict[WorkerSlot, deque[float]] = defaultdict(lambda: deque(maxlen=MOST_STARTS))
        self._last_reason = ""
        self.ends_on_rank_failure = self.lost = False
        self._beat_s = timeout_s / BEATS
        self._next_beat = monotonic()
        self._output = WorkerOutput({_format_worker_id(slot, 0): rank for rank, slot in enumerate(self._slots)})
        # A new secret for each start: workers of an earlier start, if any survive, cannot connect.
        self._secret = new_secret()
        listens = choose_listening_address(address)
        self._store = StoreServer(self._secret.encode(), listens)
        self._coordinator = Coordinator(
            self._slots,
            secret=self._secret.encode(),
            timeout_s=timeout_s,
            store_port=self._store.port,
            on_event=self._receive_event,
            address=listens,
        )
        rsh = os.environ.get("HEADWAY_RSH") or RSH
        show, ended = self._output.show, lambda *end: self._events.put(_ProcessEnded(*end))
        self._crews: list[WorkerCrew] = [
            LocalWorkers(show, ended)
            if host.is_local
            else RemoteWorkers(host.name, show, ended, timeout_s=timeout_s, rsh=rsh)
            for host in hosts
        ]

    def run(self) -> None:
        """Starts all workers and runs until the last one has ended."""
        with self._catch_signals():
            for slot in self._slots:
                self._start_worker(slot, 0)
            while not self._is_over():
                # Woken by an event, or by the next thing that is due.
                with suppress(Empty):
                    self._handle_event(self._events.get(timeout=self._compute_wait_s()))
                self._run_due()

    def close(self) -> None:
        """Kills the remaining workers, and closes the coordinator and the store."""
        # Workers first: they use the coordinator and the store to their end.
        for crew in self._crews:
            crew.close()
        self._output.close()
        self._coordinator.close()
        self._store.close()

    def _receive_event(self, event: CoordinatorEvent) -> None:
        """Receives an event in the coordinator's thread."""
        # Here and not in `_handle_event`: output that follows the event already belongs to the new ranks.
        if isinstance(event, GenerationFormed):
            self._output.set_ranks({worker.id: rank for rank, worker in enumerate(event.workers)})
        elif isinstance(event, RunBegan):
            self._output.release()
        self._events.put(event)

    def _catch_signals(self) -> AbstractContextManager[None]:
        return handle_signals(lambda number, frame: self._events.put(number), signal.SIGTERM, signal.SIGINT)

    # Workers come and go.

    def _start_worker(self, slot: WorkerSlot, attempt: int) -> None:
        """Starts the worker of a slot, with its environment variables; `attempt` counts the replacements."""
        host, local = slot
        rank = self._slots.index(slot)
        worker = _WorkerRecord(_format_worker_id(slot, attempt), slot, rank, joining=self._began)
        self._workers[worker.id] = worker
        # In HOST:PORT an IPv6 address needs brackets.
        coordinator = f"[{self._address}]" if ":" in self._address else self._address
        environ = {
            **self._environ,
            "HEADWAY_COORDINATOR": f"{coordinator}:{self._coordinator.port}",
            "HEADWAY_SECRET": self._secret,
            "HEADWAY_MEMBER": worker.id,
            "HEADWAY_JOINING": str(int(worker.joining)),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._slots)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self._hosts[host].procs),
        }
        # A worker that joins gets its rank from the generation; until then its output is marked as joining.
        if not worker.joining:
            self._output.set_ranks({worker.id: rank})
        command = self._restart_command() if attempt and not worker.joining else self._command
        self._crews[host].start(worker.id, command, environ, inherit=rank == 0 and not worker.joining)

    def _handle_event(self, event: CoordinatorEvent | _ProcessEnded | int) -> None:
        """Handles an event of the coordinator, the end of a process, or the number of a signal."""
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
                    # Its connection is closed, but the process may still have to print its error.
                    if event.how == "died":
                        self._kill_times[worker.id] = monotonic() + self._patience_s
                    elif event.how == "silent" and not self._began:
                        self._kill_times[worker.id] = monotonic()
                    self._handle_end(worker)
            case _ProcessEnded():
                worker = self._workers[event.worker]
                worker.status, worker.why = event.status, event.why
                self._ended_workers.append(worker)
                # A signal ended it. A child may still hold its connection open, so the coordinator would not notice.
                if event.status < 0:
                    self._coordinator.mark_dead(worker.id)
                self._handle_end(worker)
                if self._failed is None:
                    self._output.show_last_words(worker.id)
            # The first signal lets the workers save and leave; the second one kills them.
            case _:
                self._signal_workers(signal.SIGKILL if self._stopping else signal.SIGTERM)
                self._stopping, self.lost = True, False

    def _note_members(self) -> None:
        """Marks the workers of the generation as members of the run, once the run has begun."""
        if self._began:
            for member in self._members:
                worker = self._workers[member]
                worker.member = True
                self._failures[worker.slot] = 0

    def _handle_end(self, worker: _WorkerRecord) -> None:
        """Decides what follows when a worker has left, or its process has ended, or both."""
        # A worker that said farewell is judged when its process has ended, by the exit status.
        in_order = worker.left in ("done", "stopped")
        if self._failed or self.lost or (in_order and worker.status is None):
            return
        if self._began and in_order and worker.member:
            # Done, but with an error status: this is an error of the run, such as a full disk, and no loss.
            if worker.left == "done" and (worker.status or 0) > 0:
                self._end_run(worker)
        elif self._stopping:
            return
        elif self._began:
            if self.ends_on_rank_failure:
                self.lost = True
                # A worker that died may still print its error: it has a time limit of its own.
                for other in self._workers.values():
                    if other.left != "died":
                        self._kill_times[other.id] = monotonic()
            else:
                self._schedule_replacement(worker)
        # Before the run began: status 0 means that there was nothing to do.
        elif worker.status == 0:
            self._coordinator.give_up_slot(worker.slot)
        elif worker.status is not None:
            # A signal before the run began may be chance (memory is short); an error that the worker reports is not.
            by_chance = worker.status < 0 and not worker.why and self._failures[worker.slot] + 1 < FAILED_STARTS
            if self._respawn and by_chance:
                self._schedule_replacement(worker)
            else:
                self._end_run(worker)

    def _end_run(self, worker: _WorkerRecord) -> None:
        """Ends the run because of this worker."""
        self._failed = worker
        # Workers that have said farewell are about to end by themselves: they get the time limit of silence on top.
        for other in self._workers.values():
            leaving = other.left in ("done", "stopped")
            self._kill_times[other.id] = monotonic() + GRACE_S + leaving * self._patience_s

    def _schedule_replacement(self, worker: _WorkerRecord) -> None:
        """Schedules a replacement: at once for a silent worker, else when its process has ended."""
        ending = worker.left == "died" and worker.status is None
        if ending or worker.due_s is not None or not self._respawn or (self._began and not self._members):
            return
        # A lost host loses all of its workers for one reason, which is shown once.
        if worker.why and worker.why != self._last_reason:
            self._last_reason = worker.why
            _say(f"{worker.why}.")
        failures = self._failures[worker.slot] = 0 if worker.member else self._failures[worker.slot] + 1
        if failures >= FAILED_STARTS:
            worker.due_s = inf
            name = self._describe_worker(worker)
            _say(f"{name} is not replaced any more: {failures} processes in a row were lost before they had joined.")
            return
        starts = self._start_times[worker.slot]
        worker.due_s = monotonic() + BACKOFF_S * 2**failures
        # The oldest of the last six starts limits the rate.
        if len(starts) == MOST_STARTS:
            worker.due_s = max(worker.due_s, starts[0] + STARTS_WINDOW_S)

    def _signal_workers(self, number: int) -> None:
        for worker in self._workers.values():
            if worker.status is None:
                self._crews[worker.slot[0]].signal(worker.id, number)

    # Time passes.

    def _list_due_starts(self) -> dict[str, float]:
        """Lists the workers to be replaced, each with the time of its replacement."""
        if self._stopping or self._failed or self.lost or (self._began and not self._members):
            return {}
        dues = {worker.id: worker.due_s for worker in self._workers.values() if worker.due_s is not None}
        return {worker: due_s for worker, due_s in dues.items() if due_s < inf}

    def _compute_wait_s(self) -> float:
        """Computes the time until the next beat, kill or replacement."""
        due_s = min(self._next_beat, *self._kill_times.values(), *self._list_due_starts().values(), inf)
        return max(0.0, due_s - monotonic())

    def _run_due(self) -> None:
        """Sends the beats, starts the replacements and kills the workers that are due."""
        now = monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            for crew in self._crews:
                crew.beat()
            if self._failed is None:
                self._output.beat()
        for name in [name for name, due_s in self._list_due_starts().items() if due_s <= now]:
            worker = self._workers[name]
            # A silent worker may still wake up, so it is killed before its slot is filled.
            worker.due_s, self._kill_times[name] = inf, now
            self._start_times[worker.slot].append(now)
            self._start_worker(worker.slot, int(name.rpartition(".")[2]) + 1)
        for name in [name for name, due_s in self._kill_times.items() if due_s <= now]:
            del self._kill_times[name]
            if self._workers[name].status is None:
                self._crews[self._workers[name].slot[0]].signal(name, signal.SIGKILL)

    def _is_over(self) -> bool:
        running = [worker for worker in self._workers.values() if worker.status is None]
        if self._began and not self._members and not self._stopping:
            # Newcomers and silent workers would wait for ever; the others end by themselves.
            for worker in running:
                if worker.left in (None, "silent"):
                    self._crews[worker.slot[0]].signal(worker.id, signal.SIGKILL)
        return not running and not self._list_due_starts()

    # The end.

    def compute_status(self, resume_hint: str) -> int:
        """Returns the exit status of the run; see `launch`."""
        if self._failed is not None:
            return self._report_failure(self._failed)
        # Members decide: a newcomer that was ended with the run says nothing about its result.
        for left in ("done", "stopped"):
            members = [worker for worker in self._ended_workers if worker.left == left and worker.member]
            if statuses := [_as_exit_status(worker.status) for worker in members]:
                return max(statuses) if left == "done" else max(1, *statuses)
        if self._stopping:
            _say("Stopped.")
            return 1
        if not self._began:
            return 0
        lost = [worker for worker in self._ended_workers if worker.member]
        # A positive status means that the worker has printed its error; a signal leaves no words.
        spoke = next((worker for worker in lost if (worker.status or 0) > 0), None)
        if spoke is None:
            raise CommunicationError(f"no worker is left: {self._describe_end(lost[-1])}", fix=resume_hint)
        _say(f"No worker is left. {resume_hint}".rstrip())
        return _as_exit_status(spoke.status)

    def _report_failure(self, failed: _WorkerRecord) -> int:
        """Prints the errors of the workers that failed, each once, and returns the exit status."""
        ended = [worker for worker in self._ended_workers if worker.left != "died" or not self._began]
        statuses = {worker.id: worker.status for worker in ended if worker.status is not None and worker.status > 0}
        self._output.show_failure(statuses, failed.status or 0)
        if failed.id in statuses and not failed.why:
            return statuses[failed.id]
        raise CommunicationError(self._describe_end(failed), fix="Its output is above.")

    def _describe_worker(self, worker: _WorkerRecord) -> str:
        host, local = worker.slot
        return f"worker {local} on host {self._hosts[host].name}"

    def _describe_end(self, worker: _WorkerRecord) -> str:
        """Describes the end of a worker that has printed no error itself."""
        if worker.why:
            return worker.why
        if worker.left == "silent":
            return f"{self._describe_worker(worker)} did not respond at the start and was ended"
        number = -(worker.status or 0)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = " (as the kernel does if memory is short)" if number == signal.SIGKILL else ""
        return f"{self._describe_worker(worker)} was ended by {name}{hint}"


def _format_worker_id(slot: WorkerSlot, attempt: int) -> str:
    """Formats HOST.LOCAL.ATTEMPT: a replacement in the same slot has another id."""
    return f"{slot[0]}.{slot[1]}.{attempt}"


def _as_exit_status(status: int | None) -> int:
    """Returns a positive exit status, also for a process that a signal has ended."""
    return abs(status or 0) and max(1, status or 0)
