"""Starts the workers of a run, serves their store and coordinator, and replaces workers that are lost."""

from __future__ import annotations

import os
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Literal, final

from headway.comm.coordinator import (
    Coordinator,
    CoordinatorEvent,
    CoordinatorFailed,
    GenerationFormed,
    RunBegan,
    WorkerLeft,
    WorkerSlot,
)
from headway.comm.messages import BEATS_PER_TIMEOUT
from headway.core.errors import CommunicationError
from headway.core.hosts import choose_listening_address
from headway.core.key_value_store import StoreServer
from headway.core.printable import escape_controls
from headway.core.rendezvous import new_secret
from headway.core.signals import handle_signals
from headway.launch.hosts import Host, find_launcher_address
from headway.launch.remote_workers import DEFAULT_REMOTE_SHELL, RemoteWorkers
from headway.launch.worker_output import ERROR_PREFIX, WorkerOutput, write
from headway.launch.worker_record import WorkerRecord, as_exit_status, format_worker_id
from headway.launch.workers import OWN_ERROR, STDERR, LocalWorkers, WorkerCrew

# Threads (the coordinator's, the workers' output) and signal handlers only queue events. The main thread takes them one
# by one, so the state of `_LaunchSession` needs no lock.

# Delay before a lost worker is replaced; doubled for each replacement that was lost before it had joined.
REPLACEMENT_BACKOFF_S = 0.5
# A slot is given up after this many failed starts in a row.
MAX_FAILED_STARTS = 5
# Rate limit of the starts in one slot: a host that kills every worker must not fill the log.
MAX_STARTS_PER_WINDOW = 6
START_WINDOW_S = 60.0
# After a worker fails for the whole run, the others get this long to report the same error.
ERROR_GRACE_S = 2.0


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
    address = find_launcher_address(hosts)
    restart_command = restart_command or (lambda: command)
    environ = environ or {}
    restart = 0
    while True:
        with closing(
            _LaunchSession(command, restart_command, environ, hosts, address, timeout_s=timeout_s, respawn=respawn)
        ) as session:
            session.ends_on_rank_failure = on_rank_failure == "restart"
            session.run()
            if not session.was_ended_by_loss or restart == restarts:
                return session.compute_exit_status(resume_hint)
        restart += 1
        _say(f"All workers are started again: restart {restart} of at most {restarts}.")
        # Once its folder exists, the run is resumed.
        command = restart_command()


def _say(text: str) -> None:
    write(f"{ERROR_PREFIX}{escape_controls(text)}\n", STDERR)


@dataclass(frozen=True)
class _ProcessEnded:
    """The process of a worker has ended. `reason` is empty if only the exit status is known."""

    worker_id: str
    exit_status: int
    reason: str


@final
class _LaunchSession:
    """One start of all workers, up to the end of the last one.

    Attributes:
        ends_on_rank_failure: if True, a lost worker ends all others; set before `run`.
        was_ended_by_loss: True if that has happened.
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
        self._slots = [(index, local_rank) for index, host in enumerate(hosts) for local_rank in range(host.procs)]
        self._events: SimpleQueue[CoordinatorEvent | _ProcessEnded | int] = SimpleQueue()
        self._workers: dict[str, WorkerRecord] = {}
        self._member_ids: set[str] = set()
        self._ended_workers: list[WorkerRecord] = []
        self._has_begun = self._is_stopping = False
        self._failed_worker: WorkerRecord | None = None
        self._timeout_s = timeout_s
        self._kill_times: dict[str, float] = {}
        self._failed_starts: defaultdict[WorkerSlot, int] = defaultdict(int)
        self._start_times: defaultdict[WorkerSlot, deque[float]] = defaultdict(
            lambda: deque(maxlen=MAX_STARTS_PER_WINDOW)
        )
        self._last_shown_reason = ""
        self.ends_on_rank_failure = self.was_ended_by_loss = False
        self._beat_interval_s = timeout_s / BEATS_PER_TIMEOUT
        self._next_beat_s = monotonic()
        self._output = WorkerOutput({format_worker_id(slot, 0): rank for rank, slot in enumerate(self._slots)})
        # A new secret for each start: workers of an earlier start, if any survive, cannot connect.
        self._secret = new_secret()
        listening_address = choose_listening_address(address)
        self._store = StoreServer(self._secret.encode(), listening_address)
        self._coordinator = Coordinator(
            self._slots,
            secret=self._secret.encode(),
            timeout_s=timeout_s,
            store_port=self._store.port,
            on_event=self._receive_event,
            address=listening_address,
        )
        rsh = os.environ.get("HEADWAY_RSH") or DEFAULT_REMOTE_SHELL
        self._crews: list[WorkerCrew] = [
            LocalWorkers(self._output.show, self._receive_process_end)
            if host.is_local
            else RemoteWorkers(
                host.name, self._output.show, self._receive_process_end, timeout_s=timeout_s, remote_shell=rsh
            )
            for host in hosts
        ]

    def run(self) -> None:
        """Starts all workers and runs until the last one has ended."""
        with self._catch_signals():
            for slot in self._slots:
                self._start_worker(slot, 0)
            while not self._is_over():
                # Woken by an event, or by the next action that is due.
                with suppress(Empty):
                    self._handle_event(self._events.get(timeout=self._compute_wait_s()))
                self._run_due_actions()

    def close(self) -> None:
        """Kills the remaining workers, and closes the coordinator and the store."""
        # Workers first: they use the coordinator and the store to their end.
        for crew in self._crews:
            crew.close()
        self._output.close()
        self._coordinator.close()
        self._store.close()

    def _receive_process_end(self, worker_id: str, exit_status: int, reason: str) -> None:
        """Queues the end of a process. Called in the threads of the crews."""
        self._events.put(_ProcessEnded(worker_id, exit_status, reason))

    def _receive_event(self, event: CoordinatorEvent) -> None:
        """Queues an event of the coordinator. Called in the coordinator's thread."""
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
        host, local_rank = slot
        rank = self._slots.index(slot)
        worker = WorkerRecord(
            format_worker_id(slot, attempt), slot, self._hosts[host].name, rank, is_joining=self._has_begun
        )
        self._workers[worker.id] = worker
        # In HOST:PORT an IPv6 address needs brackets.
        coordinator = f"[{self._address}]" if ":" in self._address else self._address
        environ = {
            **self._environ,
            "HEADWAY_COORDINATOR": f"{coordinator}:{self._coordinator.port}",
            "HEADWAY_SECRET": self._secret,
            "HEADWAY_MEMBER": worker.id,
            "HEADWAY_JOINING": str(int(worker.is_joining)),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._slots)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self._hosts[host].procs),
        }
        # A worker that joins gets its rank from the generation; until then its output is marked as joining.
        if not worker.is_joining:
            self._output.set_ranks({worker.id: rank})
        command = self._restart_command() if attempt and not worker.is_joining else self._command
        self._crews[host].start(worker.id, command, environ, inherit_output=rank == 0 and not worker.is_joining)

    def _handle_event(self, event: CoordinatorEvent | _ProcessEnded | int) -> None:
        """Handles an event of the coordinator, the end of a process, or the number of a signal."""
        match event:
            case GenerationFormed():
                self._member_ids = {worker.id for worker in event.workers}
                self._mark_members()
            case RunBegan():
                self._has_begun = True
                self._mark_members()
            case WorkerLeft():
                self._member_ids.discard(event.worker.id)
                if worker := self._workers.get(event.worker.id):
                    worker.how_left = event.how
                    # Its connection is closed, but the process may still have to print its error.
                    if event.how == "died":
                        self._kill_times[worker.id] = monotonic() + self._timeout_s
                    elif event.how == "silent" and not self._has_begun:
                        self._kill_times[worker.id] = monotonic()
                    self._handle_worker_end(worker)
            case _ProcessEnded():
                worker = self._workers[event.worker_id]
                worker.exit_status = event.exit_status
                worker.reason = event.reason
                self._ended_workers.append(worker)
                # A signal ended it, or the launcher. A child may still hold its connection open, unnoticed by the
                # coordinator.
                if event.exit_status < 0 or event.reason:
                    self._coordinator.mark_dead(worker.id)
                self._handle_worker_end(worker)
                if self._failed_worker is None:
                    self._output.show_last_words(worker.id)
            # `close` kills the workers.
            case CoordinatorFailed():
                raise CommunicationError(f"{OWN_ERROR} ({event.error!r})")
            # The first signal lets the workers save and leave; the second one kills them.
            case _:
                self._signal_workers(signal.SIGKILL if self._is_stopping else signal.SIGTERM)
                self._is_stopping = True
                self.was_ended_by_loss = False

    def _mark_members(self) -> None:
        """Marks the workers of the generation as members of the run, once the run has begun."""
        if self._has_begun:
            for worker_id in self._member_ids:
                worker = self._workers[worker_id]
                worker.is_member = True
                self._failed_starts[worker.slot] = 0

    def _handle_worker_end(self, worker: WorkerRecord) -> None:
        """Decides what follows when a worker has left, or its process has ended, or both.

        Before the run began, a worker that fails is replaced or ends the run. Later a lost member is replaced, or ends
        all others (`ends_on_rank_failure`).
        """
        # A worker that said farewell is judged when its process has ended, by the exit status.
        if self._failed_worker or self.was_ended_by_loss or (worker.said_farewell and worker.exit_status is None):
            return
        if self._has_begun and worker.said_farewell and worker.is_member:
            # Done, but with an error status: this is an error of the run, such as a full disk, and no loss.
            if worker.how_left == "done" and (worker.exit_status or 0) > 0:
                self._end_run(worker)
        elif self._is_stopping:
            return
        elif self._has_begun:
            if self.ends_on_rank_failure:
                self.was_ended_by_loss = True
                # A worker that died may still print its error: it has a time limit of its own.
                for other in self._workers.values():
                    if other.how_left != "died":
                        self._kill_times[other.id] = monotonic()
            else:
                self._schedule_replacement(worker)
        # Before the run began: status 0 means that there was nothing to do.
        elif worker.exit_status == 0:
            self._coordinator.give_up_slot(worker.slot)
        elif worker.exit_status is not None:
            # A signal before the run began may be chance (memory is short); an error that the worker reports is not.
            may_be_chance = worker.exit_status < 0 and not worker.reason
            if self._respawn and may_be_chance and self._failed_starts[worker.slot] + 1 < MAX_FAILED_STARTS:
                self._schedule_replacement(worker)
            else:
                self._end_run(worker)

    def _end_run(self, worker: WorkerRecord) -> None:
        """Ends the run because of this worker: schedules the end of all others."""
        self._failed_worker = worker
        # Workers that have said farewell are about to end by themselves: they get the time limit of silence on top.
        for other in self._workers.values():
            extra_s = self._timeout_s if other.said_farewell else 0.0
            self._kill_times[other.id] = monotonic() + ERROR_GRACE_S + extra_s

    def _schedule_replacement(self, worker: WorkerRecord) -> None:
        """Schedules a replacement: at once for a silent worker, else when its process has ended."""
        is_still_ending = worker.how_left == "died" and worker.exit_status is None
        if is_still_ending or worker.replacement_due_s is not None or not self._respawn or self._has_lost_all_members():
            return
        # A lost host loses all of its workers for one reason, which is shown once.
        if worker.reason and worker.reason != self._last_shown_reason:
            self._last_shown_reason = worker.reason
            _say(f"{worker.reason}.")
        failed_starts = 0 if worker.is_member else self._failed_starts[worker.slot] + 1
        self._failed_starts[worker.slot] = failed_starts
        if failed_starts >= MAX_FAILED_STARTS:
            worker.replacement_due_s = inf
            what = f"{failed_starts} processes in a row were lost before they had joined"
            _say(f"{worker} is not replaced any more: {what}.")
            return
        start_times = self._start_times[worker.slot]
        worker.replacement_due_s = monotonic() + REPLACEMENT_BACKOFF_S * 2**failed_starts
        # The oldest of the last six starts limits the rate.
        if len(start_times) == MAX_STARTS_PER_WINDOW:
            worker.replacement_due_s = max(worker.replacement_due_s, start_times[0] + START_WINDOW_S)

    def _signal_worker(self, worker: WorkerRecord, signal_number: int) -> None:
        if signal_number == signal.SIGKILL:
            worker.note_kill()
        self._crews[worker.slot[0]].signal(worker.id, signal_number)

    def _signal_workers(self, signal_number: int) -> None:
        for worker in self._list_running():
            self._signal_worker(worker, signal_number)

    # Time passes.

    def _list_running(self) -> list[WorkerRecord]:
        return [worker for worker in self._workers.values() if worker.exit_status is None]

    def _has_lost_all_members(self) -> bool:
        return self._has_begun and not self._member_ids

    def _list_replacement_times(self) -> dict[str, float]:
        """Lists the ids of the workers to be replaced, each with the time of its replacement."""
        if self._is_stopping or self._failed_worker or self.was_ended_by_loss or self._has_lost_all_members():
            return {}
        workers = self._workers.values()
        return {
            worker.id: due_s for worker in workers if (due_s := worker.replacement_due_s) is not None and due_s < inf
        }

    def _compute_wait_s(self) -> float:
        """Computes the time until the next beat, kill or replacement."""
        due_s = min(self._next_beat_s, *self._kill_times.values(), *self._list_replacement_times().values(), inf)
        return max(0.0, due_s - monotonic())

    def _run_due_actions(self) -> None:
        """Sends the beats, starts the replacements and kills the workers that are due."""
        now = monotonic()
        if now >= self._next_beat_s:
            self._next_beat_s = now + self._beat_interval_s
            for crew in self._crews:
                crew.beat()
            if self._failed_worker is None:
                self._output.beat()
        for worker_id in [worker_id for worker_id, due_s in self._list_replacement_times().items() if due_s <= now]:
            worker = self._workers[worker_id]
            worker.replacement_due_s = inf
            # A silent worker may still wake up, so it is killed before its slot is filled.
            self._kill_times[worker_id] = now
            self._start_times[worker.slot].append(now)
            self._start_worker(worker.slot, int(worker_id.rpartition(".")[2]) + 1)
        for worker_id in [worker_id for worker_id, due_s in self._kill_times.items() if due_s <= now]:
            del self._kill_times[worker_id]
            if self._workers[worker_id].exit_status is None:
                self._signal_worker(self._workers[worker_id], signal.SIGKILL)

    def _is_over(self) -> bool:
        """Returns True if no worker runs or will be started. Kills those that would wait for ever."""
        running = self._list_running()
        if self._has_lost_all_members() and not self._is_stopping:
            # Newcomers and silent workers; the others end by themselves.
            for worker in running:
                if worker.how_left in (None, "silent"):
                    self._signal_worker(worker, signal.SIGKILL)
        return not running and not self._list_replacement_times()

    # The end.

    def compute_exit_status(self, resume_hint: str) -> int:
        """Returns the exit status of the run, and shows the reason if it failed; see `launch`."""
        if self._failed_worker is not None:
            return self._report_failure(self._failed_worker)
        # Members decide: a newcomer that was ended with the run says nothing about its result.
        members = [worker for worker in self._ended_workers if worker.is_member]
        for how_left in ("done", "stopped"):
            if statuses := [as_exit_status(worker.exit_status) for worker in members if worker.how_left == how_left]:
                return max(statuses) if how_left == "done" else max(1, *statuses)
        if self._is_stopping:
            _say("Stopped.")
            return 1
        if not self._has_begun:
            return 0
        # A positive status means that the worker has printed its error; a signal leaves no words.
        has_spoken = [worker for worker in members if (worker.exit_status or 0) > 0 and not worker.reason]
        reporting_worker = next(iter(has_spoken), None)
        if reporting_worker is None:
            # Those that the launcher has killed ended because of others.
            last_worker = next((worker for worker in reversed(members) if not worker.kill_note), members[-1])
            raise CommunicationError(f"no worker is left: {last_worker.describe_end(self._has_begun)}", fix=resume_hint)
        _say(f"No worker is left. {resume_hint}".rstrip())
        return as_exit_status(reporting_worker.exit_status)

    def _report_failure(self, failed: WorkerRecord) -> int:
        """Prints the errors of the workers that failed, each once, and returns the exit status."""
        ended = [worker for worker in self._ended_workers if worker.how_left != "died" or not self._has_begun]
        status_by_id = {worker.id: status for worker in ended if (status := worker.exit_status or 0) > 0}
        self._output.show_failure(status_by_id, failed.exit_status or 0)
        if failed.id in status_by_id and not failed.reason:
            return status_by_id[failed.id]
        raise CommunicationError(failed.describe_end(self._has_begun))
