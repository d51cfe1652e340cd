"""A worker's side of the Coordinator: its thread sends heartbeats and hears of the next generation."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, final

from headway.comm.coordinator import PURPOSE
from headway.comm.messages import BEATS, Message, decode, encode, read_int, read_text
from headway.core import channel
from headway.core.channel import Channel
from headway.core.errors import CommunicationError, FencedError, GenerationEndedError, UsageError
from headway.core.hosts import identify_host
from headway.core.key_value_store import StoreClient, build_store
from headway.core.world import CONNECT_S as MEET_S
from headway.core.world import Membership, World

if TYPE_CHECKING:
    import torch

# How long the launcher may take to answer the first message.
CONNECT_S = 60.0


@final
@dataclass(frozen=True)
class Generation:
    """The ranks that train together from now on.

    Attributes:
        number: 0 at the start; larger than that of any generation before.
        rank: of this process. size: number of ranks.
        identities: the `identify_host` of each rank's host.
        local_ranks: number of each rank on its host, as the launcher counts; selects the device and never changes.
        store_address, store_port: of the launcher's key-value store.
        lost: ids of the workers that were lost since the generation before.
        why: reason of the change, a sentence for the user.
    """

    number: int
    rank: int
    size: int
    identities: tuple[str, ...]
    local_ranks: tuple[int, ...]
    store_address: str
    store_port: int
    lost: tuple[str, ...]
    why: str


@final
class CoordinatorClient:
    """The connection of a worker to its launcher. One thread; its state is in attributes that are cheap to read.

    Args:
        address, port: of the Coordinator.
        secret: the run's secret, from the launcher.
        worker: id from the launcher: HOST.LOCAL.ATTEMPT.
        joining: the run has begun already.

    Attributes:
        has_changed: the generation in use is over, this process is fenced, or the launcher is gone: `check` raises.
        has_newcomers: new workers wait for the members to call `wait_for_generation` at the same boundary.

    Raises:
        UsageError: `worker` is not an id. CommunicationError: the launcher cannot be reached, or refuses this worker.
    """

    def __init__(self, address: str, port: int, *, secret: str, worker: str, joining: bool = False) -> None:
        parts = worker.split(".")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            fix = "Set it to HOST.LOCAL.ATTEMPT, as the launcher does."
            raise UsageError(f"HEADWAY_MEMBER is {worker!r}", fix=fix)
        self.has_changed = self.has_newcomers = False
        self.worker, self.joining, self._address = worker, joining, address
        self._sending, self._state = threading.Lock(), threading.Condition()
        self._newest: Message | None = None
        self._lost: list[str] = []
        self._whys: list[str] = []
        # Generation numbers: the newest that has started, and the one that this process uses.
        self._went = self._used = -1
        self._on_change: Callable[[], None] | None = None
        self._end: CommunicationError | None = None
        self._answers: dict[int, bool | None] = {}
        self._nonce = 0
        self._farewell = self._closing = False
        self._secret = secret.encode()
        self._where = f"{address}:{port}"
        self._connection, self._channel = self._connect(port)
        # The constructor returns only after the launcher has accepted this worker.
        hello = {"id": worker, "host": int(parts[0]), "local": int(parts[1]), "joining": joining}
        self._send("hello", **hello, identity=identify_host(), pid=os.getpid())
        try:
            welcome, rest = self._receive_welcome()
        except CommunicationError:
            self._connection.close()
            raise
        self._timeout_s = float(welcome["timeout_s"])
        self._store_port = read_int(welcome, "store_port")
        channel.tune_socket(self._connection, self._timeout_s)
        self._connection.settimeout(self._timeout_s)
        # A byte in this pair wakes the thread from its wait for the connection.
        self._wake, self._woken = socket.socketpair()
        for message in rest:
            self._handle_message(message)
        self._thread = threading.Thread(target=self._run, name="member", daemon=True)
        self._thread.start()

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None) -> CoordinatorClient | None:
        """Connects to the launcher that HEADWAY_COORDINATOR, _SECRET, _MEMBER and _JOINING name; None if unset.

        It raises as CoordinatorClient does, and UsageError if they are set in part, or wrong.
        """
        environ = os.environ if environ is None else environ
        where = environ.get("HEADWAY_COORDINATOR")
        if not where:
            return None
        fix = "Set HEADWAY_COORDINATOR, HEADWAY_SECRET and HEADWAY_MEMBER together, as the launcher does."
        for name in ("HEADWAY_SECRET", "HEADWAY_MEMBER"):
            if not environ.get(name):
                raise UsageError(f"HEADWAY_COORDINATOR is set, and {name} is not", fix=fix)
        address, _, port = where.rpartition(":")
        if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"HEADWAY_COORDINATOR is {where!r}, and should be ADDRESS:PORT", fix=fix)
        return CoordinatorClient(
            address.strip("[]"),
            int(port),
            secret=environ["HEADWAY_SECRET"],
            worker=environ["HEADWAY_MEMBER"],
            joining=environ.get("HEADWAY_JOINING") == "1",
        )

    def announce_arrival(self) -> None:
        """Tells the launcher that this newcomer is ready to join. `wait_for_generation` does so, too."""
        self._send("here")

    def wait_for_generation(self) -> Generation:
        """Waits for the next generation, and tells the launcher that this process is ready for it.

        Raises:
            FencedError: this process was declared lost. CommunicationError: the launcher is gone.
        """
        # While the generation in use is whole, "ready" tells that this process is at a boundary; the next one begins
        # when all members are, together with the newcomers that wait.
        # Say "ready" once for each generation that is announced while this waits; enter the one that goes.
        asked = -1
        with self._state:
            if self._newest is None:
                self.announce_arrival()
            while True:
                if self._end is not None:
                    raise self._end
                newest = self._newest
                if newest is not None:
                    number = read_int(newest, "number")
                    if self._went == number > self._used:
                        return self._enter_generation(newest)
                    if asked != number:
                        asked = number
                        self._send("ready", generation=number)
                self._state.wait()

    def build_world(
        self,
        generation: Generation,
        device: torch.device,
        *,
        why: str,
        timeout_s: float,
        interface: str | None,
        connect_s: float = MEET_S,
    ) -> World:
        """Builds the world of a generation. It is aborted when the generation is over, also while ranks still connect.

        Args:
            why: reason that ranks waiting in the world get then. The others: see `World.create`.

        Raises:
            GenerationEndedError: the generation is over already. CommunicationError: some rank did not come.
        """
        return World.create(
            self._open_store(generation),
            Membership(generation.rank, generation.size, generation.number, generation.identities),
            device,
            master=generation.store_address,
            timeout_s=timeout_s,
            connect_s=connect_s,
            interface=interface,
            on_created=lambda world: self.watch_generation(generation.number, lambda: world.abort(why)),
            secret=self._secret,
        )

    def watch_generation(self, number: int, on_change: Callable[[], None]) -> None:
        """Calls `on_change` once, from the client's thread, when generation `number` is over; at once if it is."""
        with self._state:
            self._used, self._on_change = number, on_change
            self._update_has_changed()
        self._wake.send(b"\0")

    def check(self) -> None:
        """Raises if the generation is over. Reads one attribute while nothing has happened.

        Raises:
            GenerationEndedError: the generation in use is over. FencedError: this process was declared lost.
            CommunicationError: the launcher is gone.
        """
        if self.has_changed:
            with self._state:
                self._raise_change()

    def accuse(self, number: int, rank: int) -> None:
        """Reports a rank of generation `number` that is alive and does not come to a collective: it becomes lost."""
        self._send("accuse", generation=number, rank=rank)

    def confirm(self, number: int) -> None:
        """Asks the launcher whether generation `number` is still the newest; call it before something is made final.

        Raises:
            GenerationEndedError, FencedError, CommunicationError: it is not; see `check`.
        """
        self.check()
        with self._state:
            self._nonce += 1
            # Several threads may ask at the same time: the nonce tells their answers apart.
            nonce = self._nonce
            self._answers[nonce] = None
            self._send("confirm", nonce=nonce, generation=number)
            self._state.wait_for(lambda: self._end is not None or self._answers[nonce] is not None)
            answer = self._answers.pop(nonce)
            if answer is None:
                self._raise_change()
        if not answer:
            self.check()
            raise GenerationEndedError(f"generation {number} is over")

    def leave(self, done: bool) -> None:
        """Leaves in order: the others go on without a new generation. Returns when the launcher has acknowledged it.

        Args:
            done: the run is complete; False: it was stopped before its end.

        Raises:
            FencedError, CommunicationError: it was out already, or the launcher is gone.
        """
        with self._state:
            self._on_change = None
            self._send("bye", done=done)
            self._state.wait_for(lambda: self._farewell or self._end is not None)
            if self._end is not None:
                raise self._end

    def close(self) -> None:
        """Ends the thread and the connection; without `leave` before, this process is lost to the others."""
        if self._closing:
            return
        self._closing = True
        self._wake.send(b"\0")
        self._thread.join()
        for end in (self._connection, self._wake, self._woken):
            end.close()

    def _connect(self, port: int) -> tuple[socket.socket, Channel]:
        try:
            end, spoken = channel.connect(self._address, port, self._secret, PURPOSE, timeout_s=CONNECT_S)
        except OSError as error:
            fix = "Check that the launcher runs, and that no firewall keeps this host from reaching it."
            raise CommunicationError(f"the launcher cannot be reached ({error})", where=self._where, fix=fix) from error
        end.settimeout(CONNECT_S)
        return end, spoken

    def _open_store(self, generation: Generation) -> Any:
        try:
            return build_store(StoreClient(self._secret, generation.store_address, generation.store_port))
        except OSError as error:
            where = f"{generation.store_address}:{generation.store_port}"
            raise CommunicationError(f"the launcher's store cannot be reached ({error})", where=where) from error

    def _receive_welcome(self) -> tuple[Message, list[Message]]:
        # The answer to the hello; messages that came with it are handled once the attributes are there.
        messages: list[Message] = []
        try:
            while not messages:
                data = self._connection.recv(1 << 16)
                if not data:
                    raise CommunicationError("the launcher has ended", where=self._where)
                messages = [decode(one) for one in self._channel.feed(data)]
        except (OSError, ValueError) as error:
            raise CommunicationError(f"the launcher does not answer ({error})", where=self._where) from error
        if messages[0]["kind"] != "welcome":
            why = messages[0].get("why", "no reason given")
            raise CommunicationError(f"the launcher refuses worker {self.worker}: {why}", where=self._where)
        return messages[0], messages[1:]

    def _enter_generation(self, newest: Message) -> Generation:
        # The order of the members is that of the ranks.
        members = newest["members"]
        self._used = read_int(newest, "number")
        self._update_has_changed()
        found = Generation(
            number=self._used,
            rank=[worker for worker, _, _ in members].index(self.worker),
            size=len(members),
            identities=tuple(identity for _, _, identity in members),
            local_ranks=tuple(local for _, local, _ in members),
            store_address=self._address,
            store_port=self._store_port,
            lost=tuple(self._lost),
            why="; ".join(self._whys),
        )
        self._lost.clear()
        self._whys.clear()
        return found

    def _raise_change(self) -> None:
        if self._end is not None:
            raise self._end
        if self._newest is not None and read_int(self._newest, "number") > self._used:
            raise GenerationEndedError("; ".join(self._whys))

    def _send(self, kind: str, **fields: Any) -> None:
        # A broken connection is reported by the thread: it has to read first what the connection still holds.
        with self._sending, suppress(OSError):
            self._connection.sendall(self._channel.seal(encode(kind, **fields)))

    # The thread.

    def _run(self) -> None:
        # Wait for messages, but not longer than until the next heartbeat is due.
        beat_s = self._timeout_s / BEATS
        due, silent_beats = monotonic(), 0
        with selectors.DefaultSelector() as selector:
            for end in (self._connection, self._woken):
                selector.register(end, selectors.EVENT_READ)
            while not (self._closing or self._farewell or self._end):
                for key, _ in selector.select(max(0.0, due - monotonic())):
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                    else:
                        silent_beats = 0
                        self._read_messages()
                if (now := monotonic()) >= due and self._end is None:
                    due = max(due + beat_s, now)
                    # Counted in own beats: a pause of this process is not the launcher's silence.
                    silent_beats += 1
                    if silent_beats > BEATS:
                        what = f"nothing was heard from the launcher for {self._timeout_s:g} s"
                        self._end_with(CommunicationError(what))
                    self._send("beat")
                self._call_on_change()

    def _read_messages(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
            for message in self._channel.feed(data):
                self._handle_message(decode(message))
        except OSError as error:
            what = f"the connection to the launcher broke ({error.strerror})"
            self._end_with(CommunicationError(what, where=self._where))
            return
        except (ValueError, KeyError, TypeError) as error:
            what = f"the launcher sent an invalid message ({error})"
            self._end_with(CommunicationError(what, where=self._where))
            return
        if not data and not self._farewell:
            self._end_with(CommunicationError("the launcher is gone", where=self._where))

    def _handle_message(self, message: Message) -> None:
        kind = message["kind"]
        with self._state:
            # An announced generation ends the one in use; it goes when all of its members are ready.
            if kind == "generation":
                self._newest = message
                self._lost += message["lost"]
                self._whys.append(read_text(message, "why"))
                self.has_newcomers = read_int(message, "waiting") > 0
                self._update_has_changed()
            elif kind == "go":
                self._went = read_int(message, "number")
            elif kind == "regroup":
                self.has_newcomers = read_int(message, "waiting") > 0
            elif kind == "answer":
                if read_int(message, "nonce") in self._answers:
                    self._answers[message["nonce"]] = bool(message["current"])
            elif kind == "farewell":
                self._farewell = True
            # The launcher has declared this process lost: it must not go on, even if it is alive.
            elif kind == "fenced":
                self._end_with(FencedError(read_text(message, "why")))
            self._state.notify_all()

    def _end_with(self, error: CommunicationError) -> None:
        # The first error counts; all later calls raise it.
        with self._state:
            if self._end is None:
                self._end = error
                self._update_has_changed()
                self._state.notify_all()

    def _update_has_changed(self) -> None:
        self.has_changed = self._end is not None or (
            self._newest is not None and read_int(self._newest, "number") > self._used >= 0
        )

    def _call_on_change(self) -> None:
        with self._state:
            due = self._on_change if self.has_changed else None
            if due is not None:
                self._on_change = None
        # Outside of the lock: the callback may use this client.
        if due is not None:
            due()
