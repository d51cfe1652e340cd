"""Workers on another host, started by an agent that a remote shell starts there."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, final

from headway.comm.messages import BEATS_PER_TIMEOUT, decode, encode
from headway.core.process_group import signal_group
from headway.launch.workers import OWN_ERROR, OnEnd, OnLines

# Batch mode: several hosts would ask for passwords on one terminal at the same time.
DEFAULT_REMOTE_SHELL = "ssh -o BatchMode=yes -o ConnectTimeout=15"

# Environment variables with these prefixes are passed to workers on other hosts; the remote shell sets the rest.
PASSED_PREFIXES = ("HEADWAY_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "TORCH_")

AGENT_EXIT_TIMEOUT_S = 5.0

NO_DETAIL = "it said nothing"

# Exit status of a worker with its host lost, as after SIGKILL.
LOST_HOST_EXIT_STATUS = -9


@final
class RemoteWorkers:
    """The workers of another host. The agent is started with the first worker, and again if it has ended.

    The run's secret and the environment go through the agent's stdin, never on a command line that others can read.

    Args:
        host: the host as the remote shell takes it.
        timeout_s: silence of the agent after which the host counts as lost.
        remote_shell: the remote shell with its options; called with the host and one command.
    """

    def __init__(
        self, host: str, on_lines: OnLines, on_end: OnEnd, *, timeout_s: float, remote_shell: str = DEFAULT_REMOTE_SHELL
    ) -> None:
        self._host, self._on_lines, self._on_end, self._remote_shell = host, on_lines, on_end, remote_shell
        self._timeout_s = timeout_s
        self._agent: _AgentConnection | None = None

    def start(self, worker: str, command: Sequence[str], environ: Mapping[str, str], *, inherit_output: bool) -> None:
        """Starts a worker on the host, and the agent first if none runs; see `WorkerCrew.start`.

        `inherit_output` is ignored: output always comes through the agent.
        """
        # An agent that has ended cannot come back: a new one is started in its place.
        if self._agent is None or not self._agent.add_worker(worker):
            self.close()
            try:
                self._agent = _AgentConnection(
                    self._host, shlex.split(self._remote_shell), self._on_lines, self._on_end, worker
                )
            except OSError as error:
                self._on_end(
                    worker, LOST_HOST_EXIT_STATUS, f"the remote shell {self._remote_shell!r} cannot be run ({error})"
                )
                return
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_PREFIXES)}
        self._agent.send("start", worker=worker, command=[*command], environ={**passed_on, **environ})

    def signal(self, worker: str, signal_number: int) -> None:
        """Sends a signal through the agent; see `WorkerCrew.signal`."""
        if self._agent is not None:
            self._agent.send("signal", worker=worker, signal=signal_number)

    def beat(self) -> None:
        """Sends the agent a heartbeat, and kills it if it was silent for too long; see `WorkerCrew.beat`."""
        if self._agent is not None:
            self._agent.beat(self._timeout_s)

    def close(self) -> None:
        """Ends the agent, which kills its workers; see `WorkerCrew.close`."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None


@final
class _AgentConnection:
    """Connection to one run of the agent, with one thread each for its stdin, its stdout and the shell's stderr."""

    def __init__(self, host: str, remote_shell: Sequence[str], on_lines: OnLines, on_end: OnEnd, worker: str) -> None:
        self._host, self._remote_shell, self._on_lines, self._on_end = host, remote_shell, on_lines, on_end
        self._lock = threading.Lock()
        self._workers = {worker}
        self._has_ended = self._has_answered = False
        self._silent_beats = 0
        self._end_detail = NO_DETAIL
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        python = os.environ.get("HEADWAY_REMOTE_PYTHON") or sys.executable
        # The same folder and the same Python as here: a shared file system, or equal installations.
        agent = f"cd {shlex.quote(os.getcwd())} && exec {shlex.quote(python)} -m headway.launch.agent"
        # A session of its own, so that Ctrl-C in the terminal reaches the launcher alone.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [*remote_shell, host, agent], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        threads = [
            threading.Thread(target=run, name=f"{run.__name__} {host}", daemon=True)
            for run in (self._read_shell_errors, self._write_messages, self._read_messages)
        ]
        self._stderr_thread, self._writer_thread, self._reader_thread = threads
        for thread in threads:
            thread.start()

    def add_worker(self, worker: str) -> bool:
        """Adds a worker and returns True, unless the agent has ended."""
        with self._lock:
            if not self._has_ended:
                self._workers.add(worker)
            return not self._has_ended

    def send(self, kind: str, **fields: Any) -> None:
        """Queues a message to the agent."""
        self._outgoing.put(encode(kind, **fields))

    def beat(self, timeout_s: float) -> None:
        """Sends a heartbeat. Kills an agent that was silent for `timeout_s`, counted in calls of this method."""
        # Before the agent's hello only the shell's own time limit counts: logging in may take long.
        if not self._has_answered:
            return
        self._silent_beats += 1
        if self._silent_beats > BEATS_PER_TIMEOUT:
            self._end_detail = f"it was silent for {timeout_s:g} s"
            self._kill()
        # Twice the time limit: if the link is cut, the launcher gives the host up before the agent kills its workers.
        self.send("beat", patience_s=2 * timeout_s)

    def close(self) -> None:
        """Closes the agent's stdin, so that it kills its workers and ends. A shell that stays is killed."""
        self._outgoing.put(None)
        self._reader_thread.join(AGENT_EXIT_TIMEOUT_S)
        self._kill()
        for thread in (self._stderr_thread, self._writer_thread, self._reader_thread):
            thread.join()

    def _kill(self) -> None:
        """Kills the remote shell here. Its agent then finds stdin closed, and ends too."""
        # Once the process is waited for, another process may get its number.
        if not self._has_ended:
            signal_group(self._process.pid, signal.SIGKILL)

    def _write_messages(self) -> None:
        """Writes queued messages to the agent's stdin. A thread of its own, since the pipe of a hung host blocks."""
        assert self._process.stdin is not None
        # If this pipe breaks, stdout ends too, and `_read_messages` reports the loss.
        with suppress(OSError), self._process.stdin as pipe:
            while (message := self._outgoing.get()) is not None:
                pipe.write(message)
                pipe.flush()

    def _read_messages(self) -> None:
        """Reads the agent's messages until it ends, then reports all of its workers as lost."""
        exit_status, own_error = LOST_HOST_EXIT_STATUS, ""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            # Without this thread nobody would learn that a worker has ended, so an error must not end it in silence.
            try:
                for line in lines:
                    self._handle(line)
            except Exception as error:
                exit_status, own_error = 1, f"{OWN_ERROR} ({error!r})"
                # Without stdin the agent kills its workers and ends. If it hangs, `beat` kills it.
                self._outgoing.put(None)
        # The last line of the shell on stderr becomes part of the message: wait until it is read.
        self._stderr_thread.join()
        status = self._process.wait()
        self._outgoing.put(None)
        cause = f"{self._remote_shell[0]} ended with status {status}: {self._end_detail.rstrip('.')}"
        if self._has_answered:
            reason = f"host {self._host} has been lost ({cause})"
        else:
            test_command = shlex.join([*self._remote_shell, self._host, "true"])
            reason = f"host {self._host} cannot be used ({cause}). Check that this command works: {test_command}"
        # Workers that are added after this get a new agent.
        with self._lock:
            self._has_ended = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            self._on_end(worker, exit_status, own_error or reason)

    def _handle(self, line: bytes) -> None:
        try:
            message = decode(line)
        # A login shell may print a greeting first.
        except ValueError:
            return
        self._silent_beats = 0
        if message["kind"] == "hello":
            self._has_answered, self._end_detail = True, NO_DETAIL
        elif message["kind"] == "output":
            self._on_lines(message["worker"], message["stream"], message["lines"])
        elif message["kind"] == "ended":
            status, reason = message["status"], message["why"]
            with self._lock:
                self._workers.discard(message["worker"])
            self._on_end(message["worker"], status, reason)

    def _read_shell_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._end_detail = line.decode(errors="replace").strip() or self._end_detail
