"""The coordinator's side of workers on other machines: accepts them, and passes commands and answers on."""

from __future__ import annotations

import json
import logging
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, final

from headway import __version__
from headway.core.channel import tune_socket
from headway.core.channel_server import ChannelPeer, ChannelServer
from headway.core.errors import UsageError
from headway.core.hosts import choose_listening_address
from headway.core.printable import escape_controls
from headway.core.rendezvous import new_secret
from headway.core.untrusted_json import parse_object
from headway.sweep.coordinator_address import PURPOSE, CoordinatorAddress, read_address
from headway.sweep.lease import EXPIRED_STATUS, Lease, expect_links
from headway.sweep.slots import Event

LOG = logging.getLogger("headway.sweep")


@final
class RemoteWorker:
    """A worker that has joined, as a slot uses it.

    The thread of the reception calls the methods that begin with `note`.

    Attributes:
        number: number of its slot.
        host: name of its machine.
    """

    def __init__(
        self, number: int, host: str, lease: Lease, sweep: Path, put: Callable[[dict[str, Any]], None]
    ) -> None:
        self.number, self.host, self.lease = number, host, lease
        self._sweep, self._put = sweep, put
        self._ended = threading.Event()
        self._status = EXPIRED_STATUS
        self.has_left = False

    def send(self, command: dict[str, Any]) -> None:
        """Sends a command; nothing happens if the worker has just left, of which an event tells."""
        if "train" in command:
            try:
                granted = [
                    one | {"folder": self.lease.grant(one["trial"], Path(one["folder"]))} for one in command["train"]
                ]
            # The worker has returned its lease, and the news is on its way.
            except FileNotFoundError:
                return
            command = command | {"train": granted}
        self._put(command)

    def note_end(self, status: int | None) -> None:
        """Notes that the worker has ended; None: its lease has."""
        if status is not None:
            self._status, self.has_left = status, True
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """True if the worker has ended, or its lease."""
        return self._ended.is_set()

    def close(self, patience_s: float) -> int:
        """Ends the worker: it saves its trials. Then it cannot write any more. Returns its exit status."""
        if not self.has_ended:
            self._put({"stop": True})
            # The reception ends the wait if the worker goes silent.
            self._ended.wait(patience_s)
        self.lease.end(is_dead=self.has_left)
        return self._status


@final
class Reception:
    """Lets workers on other machines join a sweep, until it is closed. Call `expect_no_coordinator` first.

    Args:
        folder: folder of the sweep, which all machines see.
        address: address of this machine by which they reach it.
        lease_s: seconds of silence after which a worker is lost.
        events: gets what workers say; an event with a worker when it joins.
        numbers: numbers for slots.

    Raises:
        UsageError: the file system of the sweep has no symbolic links.
    """

    def __init__(
        self, folder: Path, address: str, lease_s: float, events: SimpleQueue[Event], numbers: Iterator[int]
    ) -> None:
        expect_links(folder)
        self._folder, self._lease_s, self._events, self._numbers = folder, lease_s, events, numbers
        self._guests: dict[ChannelPeer, _Guest] = {}
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = self._stopping = False
        secret = new_secret()
        self._server = ChannelServer(
            choose_listening_address(address),
            0,
            secret.encode(),
            PURPOSE,
            on_connect=self._handle_connect,
            on_message=self._handle_message,
            on_disconnect=self._handle_disconnect,
        )
        self.address = CoordinatorAddress(platform.node(), address, self._server.port, secret)
        self.address.write(folder)
        self._thread = threading.Thread(target=self._run, name="headway-sweep-reception", daemon=True)
        self._thread.start()

    def expect_own(self) -> None:
        """Raises UsageError if another coordinator runs this sweep by now; called before each decision is written.

        This process may have slept where locks do not hold. Between this look and the write it may sleep again.
        """
        if read_address(self._folder) != self.address:
            raise UsageError(
                "another process runs this sweep now", where=str(self._folder), fix="Leave it to that one."
            )

    def stop_all(self, *, is_over: bool) -> None:
        """Asks all workers to save their trials and leave; they end, if the sweep is over."""

        def stop() -> None:
            self._stopping = True
            for peer in self._guests:
                self._send(peer, {"stop": True, "over": is_over})

        self._call(stop)

    def close(self) -> None:
        """Closes all connections."""
        self._closing = True
        self._server.wake()
        self._thread.join()
        self._server.close()
        for guest in self._guests.values():
            guest.lease.end(is_dead=guest.worker is None)
        self.address.remove(self._folder)

    # The rest runs in the thread of the reception.

    def _call(self, action: Callable[[], None]) -> None:
        self._calls.put(action)
        self._server.wake()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._server.poll(self._lease_s / 10)
                try:
                    while True:
                        self._calls.get_nowait()()
                except Empty:
                    pass
                self._end_expired()
        # The coordinator would wait for ever for events of a thread that has ended in silence.
        except Exception as error:
            self._events.put(Event(-1, {"reception_failed": repr(error)}))

    def _send(self, peer: ChannelPeer, message: dict[str, Any]) -> None:
        self._server.send(peer, json.dumps(message).encode())

    def _handle_connect(self, peer: ChannelPeer) -> None:
        tune_socket(peer.connection, self._lease_s)

    def _handle_message(self, peer: ChannelPeer, data: bytes) -> None:
        message = parse_object(data)
        guest = self._guests.get(peer)
        if guest is None:
            self._welcome(peer, message)
        elif "beat" in message:
            guest.heard_s = monotonic()
            self._send(peer, {"beat": message["beat"]})
        elif "ready" in message:
            self._seat(peer, guest, message)
        elif "left" in message:
            self._dismiss(peer, guest, message["left"])
        elif guest.worker is not None:
            for trial in _list_ended(message):
                guest.lease.give_back(trial)
            self._events.put(Event(guest.worker.number, message))

    def _welcome(self, peer: ChannelPeer, message: dict[str, Any]) -> None:
        host, version = escape_controls(str(message.get("join"))), message.get("version")
        if version != __version__:
            what = f"{host} has version {version} of Headway, and the coordinator on {self.address.host} {__version__}"
            self._send(peer, {"refused": what})
            self._server.finish_sending(peer)
            return
        if self._stopping:
            self._server.close_peer(peer)
            return
        self._guests[peer] = _Guest(host, Lease(self._folder))
        self._send(peer, {"welcome": self._guests[peer].lease.name, "lease_s": self._lease_s})

    def _seat(self, peer: ChannelPeer, guest: _Guest, message: dict[str, Any]) -> None:
        guest.heard_s = monotonic()
        guest.worker = RemoteWorker(
            next(self._numbers),
            guest.host,
            guest.lease,
            self._folder,
            lambda command: self._call(lambda: self._send(peer, command)),
        )
        self._events.put(Event(guest.worker.number, message, guest.worker))

    def _dismiss(self, peer: ChannelPeer, guest: _Guest, status: int) -> None:
        """The process of a worker has ended, and its machine says so."""
        del self._guests[peer]
        self._server.finish_sending(peer)
        if guest.worker is None:
            guest.lease.end(is_dead=True)
        else:
            guest.worker.note_end(status)
            self._events.put(Event(guest.worker.number, None))

    def _handle_disconnect(self, peer: ChannelPeer, why: str) -> None:
        guest = self._guests.get(peer)
        if guest is None:
            return
        if guest.worker is None:
            # It was not ready, so it holds nothing.
            del self._guests[peer]
            guest.lease.end(is_dead=True)
            return
        # It may live: its trials are given away when its lease ends.
        guest.is_gone = True
        self._events.put(Event(guest.worker.number, {"unreachable": True}))

    def _end_expired(self) -> None:
        now = monotonic()
        for peer, guest in tuple(self._guests.items()):
            if guest.worker is None or (now < guest.heard_s + self._lease_s and not self._has_returned(guest)):
                continue
            del self._guests[peer]
            self._server.close_peer(peer)
            if not self._has_returned(guest):
                what = f"A worker on {guest.host} has not answered for {self._lease_s:g} s"
                LOG.warning(f"{what}: others train what it trained.")
            guest.worker.note_end(None)
            self._events.put(Event(guest.worker.number, None))

    @staticmethod
    def _has_returned(guest: _Guest) -> bool:
        return guest.is_gone and guest.lease.is_returned


@final
class _Guest:
    """A machine's connection for one worker."""

    def __init__(self, host: str, lease: Lease) -> None:
        self.host, self.lease = host, lease
        self.worker: RemoteWorker | None = None
        self.heard_s = monotonic()
        self.is_gone = False


def _list_ended(message: dict[str, Any]) -> list[int]:
    """Returns the trials that a worker does not hold any more after an answer."""
    if "ended" in message:
        return list(message["ended"])
    outcome = message.get("outcome")
    return [outcome["trial"]] if outcome is not None and outcome["kind"] != "done" else []
