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

from headway.comm.messages import BEATS, Message, decode, encode
from headway.launch.workers import OnEnd, OnLines

# Batch mode: several hosts would ask for passwords on one terminal at the same time.
RSH = "ssh -o BatchMode=yes -o ConnectTimeout=15"

# Environment variables with these prefixes are passed to workers on other hosts; the remote shell sets the rest.
PASSED_PREFIXES = ("HEADWAY_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "TORCH_")

# An agent may take this long to end.
PATIENCE_S = 5.0

NO_OUTPUT = "it said nothing"

# Exit status of a worker with its host lost, as after SIGKILL.
LOST_STATUS = -9


@final
class RemoteWorkers:
    """The workers of another host. The agent is started with the first worker, and again if it has ended.

    The run's secret and the environment go through the agent's stdin, never on a command line that others can read.

    Args:
        host: the host as the remote shell takes it.
        timeout_s: silence of the agent after which the host counts as lost.
        rsh: the remote shell with its options; called with the host and one command.
    """

    def __init__(self, host: str, on_lines: OnLines, on_end: OnEnd, *, timeout_s: float, rsh: str = RSH) -> None:
        self._host, self._on_lines, self._on_end, self._rsh = host, on_lines, on_end, rsh
        self._timeout_s = timeout_s
        self._agent: _AgentConnection | None = None

    def start(self, worker: str, command: Sequence[str], environ: Mapping[str, str], *, inherit: bool) -> None:
        # An agent that has ended cannot come back: a new one is started in its place.
        if self._agent is None or not self._agent.add_worker(worker):
            self.close()
            try:
                self._agent = _AgentConnection(self._host, shlex.split(self._rsh), self._on_lines, self._on_end, worker)
            except OSError as error:
                self._on_end(worker, LOST_STATUS, f"the remote shell {self._rsh!r} cannot be run ({error})")
                return
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_PREFIXES)}
        self._agent.send("start", worker=worker, command=[*command], environ={**passed, **environ})

    def signal(self, worker: str, number: int) -> None:
        if self._agent is not None:
            self._agent.send("signal", worker=worker, signal=number)

    def beat(self) -> None:
        if self._agent is not None:
            self._agent.beat(self._timeout_s)

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None


@final
class _AgentConnection:
    """Connection to one run of the agent: a thread each for its stdin, its stdout and the remote shell's stderr."""

    def __init__(self, host: str, rsh: Sequence[str], on_lines: OnLines, on_end: OnEnd, worker: str) -> None:
        self._host, self._rsh, self._on_lines, self._on_end = host, rsh, on_lines, on_end
        self._lock = threading.Lock()
        self._workers = {worker}
        self._has_ended = self._has_answered = False
        self._silent_beats = 0
        self._last = NO_OUTPUT
        self._orders: SimpleQueue[bytes | None] = SimpleQueue()
        python = os.environ.get("HEADWAY_REMOTE_PYTHON") or sys.executable
        # The same folder and the same Python as here: a shared file system, or equal installations.
        agent = f"cd {shlex.quote(os.getcwd())} && exec {shlex.quote(python)} -m headway.launch.agent"
        # A session of its own, so that Ctrl-C in the terminal reaches the launcher alone.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [*rsh, host, agent], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._threads = [
            threading.Thread(target=run, name=f"{run.__name__} {host}", daemon=True)
            for run in (self._read_shell_errors, self._write_orders, self._read_messages)
        ]
        for thread in self._threads:
            thread.start()

    def add_worker(self, worker: str) -> bool:
        """Adds a worker and returns True, unless the agent has ended."""
        with self._lock:
            if not self._has_ended:
                self._workers.add(worker)
            return not self._has_ended

    def send(self, kind: str, **fields: Any) -> None:
        self._orders.put(encode(kind, **fields))

    def beat(self, timeout_s: float) -> None:
        # Before the agent's hello only the shell's own time limit counts: logging in may take long.
        if not self._has_answered:
            return
        self._silent_beats += 1
        if self._silent_beats > BEATS:
            self._last = f"it was silent for {timeout_s:g} s"
            self._kill()
        # Twice the time limit: if the link is cut, the launcher gives the host up before the agent kills its workers.
        self.send("beat", patience_s=2 * timeout_s)

    def close(self) -> None:
        """Closes the agent's stdin, so that it kills its workers and ends. A shell that stays is killed."""
        self._orders.put(None)
        self._threads[-1].join(PATIENCE_S)
        self._kill()
        for thread in self._threads:
            thread.join()

    def _kill(self) -> None:
        """Kills the remote shell here. Its agent then finds stdin closed, and ends too."""
        with suppress(ProcessLookupError, PermissionError):
            # Once the process is waited for, another process may get its number.
            if not self._has_ended:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _write_orders(self) -> None:
        """Writes queued messages to the agent's stdin. A thread of its own, since the pipe of a hung host blocks."""
        assert self._process.stdin is not None
        # If this pipe breaks, stdout ends too, and `_read_messages` reports the loss.
        with suppress(OSError), self._process.stdin as end:
            while (order := self._orders.get()) is not None:
                end.write(order)
                end.flush()

    def _read_messages(self) -> None:
        """Reads the agent's messages until it ends, then reports all of its workers as lost."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    message = decode(line)
                # A login shell may print a greeting first.
                except ValueError:
                    continue
                self._handle(message)
        # The last line of the shell on stderr becomes part of the message: wait until it is read.
        self._threads[0].join()
        status = self._process.wait()
        self._orders.put(None)
        shell = f"{self._rsh[0]} ended with status {status}: {self._last.rstrip('.')}"
        if self._has_answered:
            why = f"host {self._host} has been lost ({shell})"
        else:
            by_hand = shlex.join([*self._rsh, self._host, "true"])
            why = f"host {self._host} cannot be used ({shell}). Check that this command works: {by_hand}"
        # Workers that are added after this get a new agent.
        with self._lock:
            self._has_ended = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            self._on_end(worker, LOST_STATUS, why)

    def _handle(self, message: Message) -> None:
        self._silent_beats = 0
        if message["kind"] == "hello":
            self._has_answered, self._last = True, NO_OUTPUT
        elif message["kind"] == "output":
            self._on_lines(message["worker"], message["stream"], message["lines"])
        elif message["kind"] == "ended":
            with self._lock:
                self._workers.discard(message["worker"])
            self._on_end(message["worker"], message["status"], message["why"])

    def _read_shell_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._last = line.decode(errors="replace").strip() or self._last
