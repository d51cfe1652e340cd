"""Remote: the crew of another host, reached through a remote shell and the agent that it starts there."""

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
from headway.launch.workers import Ended, Show

RSH = "ssh -o BatchMode=yes -o ConnectTimeout=15"
"""A password cannot be asked for: several hosts would ask at once."""

HANDED_ON = ("HEADWAY_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "TORCH_")
"""Beginnings of the names of this process's variables that workers on other hosts are given too."""

PATIENCE_S = 5.0
"""How long an agent may take to end."""

SILENCE = "it said nothing"

LOST = -9
"""The status of a worker whose host is gone."""


@final
class Remote:
    """A crew on another host. Its agent is started with the first worker, and anew where it has ended meanwhile.

    Nothing secret stands on a command line: what workers are given goes through the agent's stdin.

    Args:
        host: as the remote shell takes it.
        timeout_s: silence of the agent after which the host is taken for lost.
        rsh: the remote shell and its options; called with the host and one command.
    """

    def __init__(self, host: str, show: Show, ended: Ended, *, timeout_s: float, rsh: str = RSH) -> None:
        self._host, self._show, self._ended, self._rsh = host, show, ended, rsh
        self._timeout_s = timeout_s
        self._agent: _Agent | None = None

    def start(self, worker: str, command: Sequence[str], environ: Mapping[str, str], *, inherit: bool) -> None:
        if self._agent is None or not self._agent.takes(worker):
            self.close()
            try:
                self._agent = _Agent(self._host, shlex.split(self._rsh), self._show, self._ended, worker)
            except OSError as error:
                self._ended(worker, LOST, f"the remote shell {self._rsh!r} cannot be run ({error})")
                return
        handed_on = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
        self._agent.send("start", worker=worker, command=[*command], environ={**handed_on, **environ})

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
class _Agent:
    """One run of the agent. A thread each speaks to it, hears it, and hears what the remote shell complains of."""

    def __init__(self, host: str, rsh: Sequence[str], show: Show, ended: Ended, worker: str) -> None:
        self._host, self._rsh, self._show, self._ended = host, rsh, show, ended
        self._lock = threading.Lock()
        self._workers = {worker}
        self._gone = self._came = False
        self._silent_beats = 0
        self._last = SILENCE
        self._orders: SimpleQueue[bytes | None] = SimpleQueue()
        python = os.environ.get("HEADWAY_REMOTE_PYTHON") or sys.executable
        there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.quote(python)} -m headway.launch.agent"
        pipe = subprocess.PIPE  # and a session of its own: the terminal's Ctrl-C reaches the launcher alone
        self._process = subprocess.Popen(
            [*rsh, host, there], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._threads = [
            threading.Thread(target=run, name=f"{run.__name__} {host}", daemon=True)
            for run in (self._hear_shell, self._speak, self._hear)
        ]
        for thread in self._threads:
            thread.start()

    def takes(self, worker: str) -> bool:
        """Takes a worker over, unless the agent has ended."""
        with self._lock:
            if not self._gone:
                self._workers.add(worker)
            return not self._gone

    def send(self, kind: str, **fields: Any) -> None:
        self._orders.put(encode(kind, **fields))

    def beat(self, timeout_s: float) -> None:
        if not self._came:  # how long a shell takes to get there is its own affair
            return
        self._silent_beats += 1
        if self._silent_beats > BEATS:
            self._last = f"it was silent for {timeout_s:g} s"
            self._kill()
        self.send("beat", patience_s=2 * timeout_s)

    def close(self) -> None:
        """Closes the agent's stdin: it kills its workers and ends. A shell that does not end then is killed."""
        self._orders.put(None)
        self._threads[-1].join(PATIENCE_S)
        self._kill()
        for thread in self._threads:
            thread.join()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            if not self._gone:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _speak(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as end:  # where it breaks, hearing ends too
            while (order := self._orders.get()) is not None:
                end.write(order)
                end.flush()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    message = decode(line)
                except ValueError:  # what a shell says when it is entered
                    continue
                self._heed(message)
        self._threads[0].join()  # what it complained of
        status = self._process.wait()
        self._orders.put(None)
        shell = f"{self._rsh[0]} ended with status {status}: {self._last.rstrip('.')}"
        if self._came:
            why = f"host {self._host} has been lost ({shell})"
        else:
            by_hand = shlex.join([*self._rsh, self._host, "true"])
            why = f"host {self._host} cannot be used ({shell}). Does this work: {by_hand}"
        with self._lock:
            self._gone = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            self._ended(worker, LOST, why)

    def _heed(self, message: Message) -> None:
        self._silent_beats = 0
        if message["kind"] == "hello":
            self._came, self._last = True, SILENCE
        elif message["kind"] == "output":
            self._show(message["worker"], message["stream"], message["lines"])
        elif message["kind"] == "ended":
            with self._lock:
                self._workers.discard(message["worker"])
            self._ended(message["worker"], message["status"], message["why"])

    def _hear_shell(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._last = line.decode(errors="replace").strip() or self._last
