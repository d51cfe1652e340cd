"""Starts `headway sweep --join` on the machines of `--hosts`, by the launcher's remote shell."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import final

from headway.comm.messages import BEATS_PER_TIMEOUT
from headway.core.printable import escape_controls
from headway.launch.hosts import Host
from headway.launch.remote_workers import DEFAULT_REMOTE_SHELL, RemoteWorkers
from headway.sweep.join import HOST_NAME
from headway.sweep.slots import Event

LOG = logging.getLogger("headway.sweep")

MOST_STARTS = 3
"""Starts of a machine that has worked for the sweep, and whose program has ended."""
TAIL_LINES = 16


@final
class RemoteHosts:
    """The machines of `--hosts` besides this one.

    Args:
        folder: folder of the sweep.
        hosts: the machines, each with its number of slots.
        lease_s: silence after which a machine is lost.
        events: gets `no_hosts` with the reasons once no machine is left.
    """

    def __init__(self, folder: Path, hosts: Sequence[Host], lease_s: float, events: SimpleQueue[Event]) -> None:
        self._folder, self._hosts, self._events = folder, {host.name: host for host in hosts}, events
        self._interval_s = lease_s / BEATS_PER_TIMEOUT
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._starts = dict.fromkeys(self._hosts, 0)
        self._joined = set[str]()
        self._tails = {name: deque[str](maxlen=TAIL_LINES) for name in self._hosts}
        self._reasons: dict[str, str] = {}
        shell = os.environ.get("HEADWAY_RSH") or DEFAULT_REMOTE_SHELL
        self._shells = {
            name: RemoteWorkers(name, self._note_output, self._note_end, timeout_s=lease_s, remote_shell=shell)
            for name in self._hosts
        }
        self._waiting: SimpleQueue[str | None] = SimpleQueue()
        for name in self._hosts:
            self._waiting.put(name)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._start_all, self._beat)]
        for thread in self._threads:
            thread.start()

    @property
    def slots(self) -> int:
        """Slots of all machines that have not left."""
        return sum(host.procs for name, host in self._hosts.items() if name not in self._reasons)

    def note_join(self, host: str) -> None:
        """Notes that a worker of a machine is ready: if its program ends, it is started again."""
        self._joined.add(host)

    def close(self) -> None:
        """Ends the programs on all machines; those that were told that the sweep is over have ended already."""
        self._closing.set()
        self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        for shell in self._shells.values():
            shell.close()

    # In threads of this object.

    def _start_all(self) -> None:
        # A thread of its own: a shell reports the end of its program in a thread that must not start the next one.
        while (name := self._waiting.get()) is not None:
            self._starts[name] += 1
            self._joined.discard(name)
            slots = str(self._hosts[name].procs)
            command = ["-m", "headway", "sweep", "--join", str(self._folder), "--slots", slots]
            self._shells[name].start(name, command, {HOST_NAME: name}, inherit_output=False)

    def _beat(self) -> None:
        while not self._closing.wait(self._interval_s):
            for shell in self._shells.values():
                shell.beat()

    def _note_output(self, name: str, stream: int, lines: str) -> None:
        self._tails[name].extend(lines.splitlines())

    def _note_end(self, name: str, status: int, reason: str) -> None:
        if self._closing.is_set():
            return
        if reason:
            how = reason[0].upper() + escape_controls(reason[1:]).rstrip(".")
        elif status == 0:
            # Somebody has ended it in an orderly way, or the sweep is over.
            how = f"Host {name} has left the sweep"
        else:
            how = f"Host {name}: its program ended with status {status}"
        if status != 0 and name in self._joined and self._starts[name] < MOST_STARTS:
            LOG.warning(f"{how}. It is started again.")
            self._waiting.put(name)
            return
        said = [] if reason or status == 0 else [f"  {escape_controls(line)}" for line in self._tails[name]]
        text = "\n".join([how + (", after these messages:" if said else "."), *said])
        with self._lock:
            self._reasons[name] = text
            is_last = len(self._reasons) == len(self._hosts)
        LOG.warning(text if is_last else f"{text}\nThe sweep goes on without it.")
        if is_last:
            self._events.put(Event(-1, {"no_hosts": "\n".join(self._reasons.values())}))
