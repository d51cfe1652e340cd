"""`headway sweep --join SWEEP`: gives a machine's processors or GPUs to a sweep that a coordinator elsewhere runs.

For each slot one thread connects to the coordinator, starts a worker, and passes commands and answers on. If the worker
or the connection ends, the worker saves its trials, and the thread connects again.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import secrets
import shlex
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from headway import __version__
from headway.core.channel import Channel, connect, tune_socket
from headway.core.cpu_count import count_usable_cores
from headway.core.errors import CommunicationError, HeadwayError, UsageError
from headway.core.signals import handle_signals
from headway.core.untrusted_json import parse_object
from headway.sweep.child import Child
from headway.sweep.coordinator_address import ANSWER_S, PURPOSE, CoordinatorAddress, read_address
from headway.sweep.lease import EXPIRED_STATUS, return_lease
from headway.sweep.slots import list_gpus, share_machine, start_worker
from headway.sweep.sweep_folder import describe_sweep_resume

LOG = logging.getLogger("headway.sweep")

HOST_NAME = "HEADWAY_SWEEP_HOST"
"""Variable with the name by which the user knows this machine, if the sweep has started this program itself."""
MOST_DEATHS = 3
"""Workers of a slot that die one after another without a result, until the machine leaves the sweep."""
TAIL_LINES = 12
"""Last lines of a dead worker's log that are shown."""
_LOOK_S = 0.3


def join_sweep(folder: Path, slots: int | None = None, wait_s: float = 600.0) -> None:
    """Trains trials of a sweep on this machine until the sweep ends.

    Args:
        slots: processes that train at once; None: one for each GPU, else one for each core.
        wait_s: seconds to wait for a coordinator, at the start and whenever it has gone.

    Raises:
        HeadwayError: no coordinator comes, it refuses this machine, or workers die here.
    """
    gpus = list_gpus()
    shares = share_machine(slots or len(gpus) or count_usable_cores(), gpus)
    stopping = threading.Event()
    seats = [_Seat(folder, number, cpus, gpu, stopping, wait_s) for number, (cpus, gpu) in enumerate(shares)]
    with handle_signals(lambda *_: stopping.set(), signal.SIGTERM, signal.SIGINT):
        for seat in seats:
            seat.thread.start()
        while any(seat.thread.is_alive() for seat in seats):
            # A machine on which one slot cannot work leaves the sweep whole.
            if any(seat.error is not None for seat in seats):
                stopping.set()
            if stopping.is_set():
                for seat in seats:
                    seat.stop()
            # In pieces: Python runs handlers of signals between them.
            for seat in seats:
                seat.thread.join(_LOOK_S / len(seats))
    for seat in seats:
        if seat.error is not None:
            raise seat.error
    LOG.info("Left the sweep." if stopping.is_set() else "The sweep has ended.")


@final
class _Seat:
    """One slot of this machine.

    Attributes:
        error: why this machine cannot work for the sweep.
    """

    def __init__(
        self, folder: Path, number: int, cpus: Sequence[int], gpu: str | None, stopping: threading.Event, wait_s: float
    ) -> None:
        self._folder, self._number, self._cpus, self._gpu = folder, number, cpus, gpu
        self._stopping, self._wait_s = stopping, wait_s
        self._visit: _Visit | None = None
        self._deaths = 0
        self.error: HeadwayError | None = None
        self.thread = threading.Thread(target=self._run, name=f"headway-seat-{number}")

    def stop(self) -> None:
        """Makes the worker save its trials, and the thread end."""
        if (visit := self._visit) is not None:
            visit.stop()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and (found := self._meet()) is not None:
                self._visit = visit = _Visit(self._folder, *found)
                is_over = visit.run(self._number, self._cpus, self._gpu)
                self._visit = None
                self._judge(visit)
                if is_over:
                    return
        except HeadwayError as error:
            self.error = error
        # A thread that ends in silence would leave a slot empty for ever.
        except Exception as error:
            fix = f"Join again: headway sweep --join {shlex.quote(str(self._folder))}"
            self.error = HeadwayError(f"slot {self._number} of this machine has ended ({error!r})", fix=fix)
            self.error.__cause__ = error

    def _judge(self, visit: _Visit) -> None:
        """Counts workers that died by themselves. Raises HeadwayError if this machine cannot train."""
        if visit.status is None or visit.status in (0, EXPIRED_STATUS) or visit.was_closed:
            return
        self._deaths = 1 if visit.has_trained else self._deaths + 1
        # An error before it was ready would come again; a signal may not.
        has_refused = not visit.was_ready and visit.status > 0
        if not has_refused and self._deaths < MOST_DEATHS:
            LOG.warning(f"A worker ended with status {visit.status}; another one takes its place.")
            return
        what = f"a worker ended with status {visit.status}"
        what += " before it was ready" if has_refused else f", as {MOST_DEATHS} did one after another"
        raise HeadwayError(f"{what}, after these last messages:\n{visit.read_tail()}", where=str(visit.log))

    def _meet(self) -> tuple[CoordinatorAddress, socket.socket, Channel] | None:
        """Waits for a coordinator, and connects to it. Returns None if the sweep has ended or this program is stopped.

        Raises:
            HeadwayError: none has come.
        """
        until_s, told = time.monotonic() + self._wait_s, False
        while not self._stopping.is_set():
            if (address := read_address(self._folder)) is not None:
                with suppress(OSError, CommunicationError):
                    return address, *connect(
                        address.address, address.port, address.secret.encode(), PURPOSE, timeout_s=ANSWER_S
                    )
            elif (self._folder / "result.json").exists():
                return None
            if not told and self._number == 0:
                LOG.info(f"Waiting up to {self._wait_s:g} s for the coordinator of {self._folder}.")
            told = True
            if time.monotonic() > until_s:
                command = describe_sweep_resume(self._folder)
                fix = f"Start it with --joinable or --hosts, or continue it: {command}. Then join again."
                raise HeadwayError(f"no coordinator of {self._folder} answers", fix=fix)
            self._stopping.wait(_LOOK_S)
        return None


@final
class _Visit:
    """One worker of this machine, from a connection to the coordinator until the end of either.

    Attributes:
        was_ready: the worker was ready to train.
        has_trained: a trial came to its step.
        was_closed: the worker ended because it was asked to.
        status: exit status of the worker; None: there was none.
    """

    def __init__(self, folder: Path, address: CoordinatorAddress, connection: socket.socket, channel: Channel) -> None:
        self._folder, self._address, self.connection, self._channel = folder, address, connection, channel
        self._lock = threading.Lock()
        self._child: Child | None = None
        self.was_ready = self.has_trained = self.was_closed = self._is_over = False
        self.status: int | None = None
        self._host = os.environ.get(HOST_NAME) or platform.node()
        self.log = folder / "logs"

    def run(self, number: int, cpus: Sequence[int], gpu: str | None) -> bool:
        """Returns True if the sweep is over. Raises UsageError if the coordinator refuses this machine."""
        lease, lease_s = "", 0.0
        with self.connection:
            self._send({"join": self._host, "version": __version__})
            for message in self._receive():
                if "refused" in message:
                    fix = "Use the same installation on all machines."
                    raise UsageError(message["refused"], where=str(self._folder), fix=fix)
                if "stop" in message:
                    self._is_over |= bool(message.get("over"))
                    self.stop()
                elif "welcome" in message:
                    lease, lease_s = message["welcome"], message["lease_s"]
                    tune_socket(self.connection, lease_s)
                    self._start(lease_s, number, cpus, gpu)
                elif self._child is not None:
                    self._child.send(self._place(message))
            if self._child is not None:
                self.was_closed |= self.status is None
                # Its lease ends it sooner if the coordinator is gone.
                self.status = self._child.close(2 * lease_s)
                return_lease(self._folder, lease)
            self._send({"left": self.status})
            # The end of the other side: it has read the last message.
            with suppress(OSError):
                self.connection.settimeout(5.0)
                while self.connection.recv(1 << 12):
                    pass
        return self._is_over

    def stop(self) -> None:
        """Makes the worker save its trials and end; called from any thread, and more than once."""
        self.was_closed = True
        if self._child is not None:
            self._child.send({"stop": True})
        else:
            self._stop_reading()

    def _stop_reading(self) -> None:
        # Answers still go out: what was saved, and that the worker has ended.
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def _start(self, lease_s: float, number: int, cpus: Sequence[int], gpu: str | None) -> None:
        name = f"{re.sub(r'[^A-Za-z0-9.-]', '_', self._host)}-{number}-{secrets.token_hex(3)}"
        self.log = self._folder / "logs" / f"{name}.log"
        self._child = start_worker(self._folder, name, cpus, gpu, self._pass_on, self._note_end, [str(lease_s)])
        LOG.info(f"Slot {number} works for the coordinator on {self._address.host}.")

    def _place(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a command with paths of this machine, where the sweep's folder may have another path."""
        if "train" in message:
            message["train"] = [one | {"folder": str(self._folder / one["folder"])} for one in message["train"]]
        return message

    def _pass_on(self, message: dict[str, Any]) -> None:
        """Passes an answer of the worker on; called in the thread that reads them."""
        self.was_ready |= "ready" in message
        outcome = message.get("outcome")
        self.has_trained |= outcome is not None and outcome["kind"] == "done"
        self._send(message)

    def _note_end(self, status: int) -> None:
        """Ends the reading of commands, when the worker has ended; called in the thread that reads its answers."""
        if self.status is None:
            self.status = status
        self._stop_reading()

    def _send(self, message: dict[str, Any]) -> None:
        # A coordinator that is gone is noticed by reading.
        with self._lock, suppress(OSError):
            self.connection.sendall(self._channel.seal(json.dumps(message).encode()))

    def _receive(self) -> Any:
        """Yields the messages of the coordinator until the connection ends."""
        with suppress(OSError, ValueError):
            data = b""
            while True:
                for message in self._channel.feed(data):
                    yield parse_object(message)
                if not (data := self.connection.recv(1 << 16)):
                    return

    def read_tail(self) -> str:
        """Returns the last messages of the worker."""
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        return "(none)"
