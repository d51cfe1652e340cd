"""A worker's side of the Coordinator: its thread sends heartbeats and hears of the next generation."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, final

from headway.comm.coordinator import COORDINATOR_PURPOSE
from headway.comm.messages import BEATS_PER_TIMEOUT, Message, decode, encode, read_int, read_text
from headway.core.channel import Channel, connect, tune_socket
from headway.core.errors import CommunicationError, FencedError, GenerationEndedError, UsageError
from headway.core.hosts import identify_host
from headway.core.key_value_store import StoreClient, build_store
from headway.core.world import CONNECT_S as WORLD_CONNECT_S
from headway.core.world import Membership, World

if TYPE_CHECKING:
    import torch

# The launcher may take this long to answer the first message.
LAUNCHER_CONNECT_S = 60.0


@final
@dataclass(frozen=True)
class Generation:
    """The ranks that train together from now on.

    Attributes:
        number: 0 at the start; larger than that of any generation before.
        rank: rank of this process.
        size: number of ranks.
        identities: the `identify_host` of each rank's host.
        local_ranks: local rank of each rank, as the launcher counts; selects the device and never changes.
        store_address, store_port: address of the launcher's key-value store.
        lost_workers: ids of the workers that were lost since the generation before.
        reason: reason of the change, a sentence for the user.
    """

    number: int
    rank: int
    size: int
    identities: tuple[str, ...]
    local_ranks: tuple[int, ...]
    store_address: str
    store_port: int
    lost_workers: tuple[str, ...]
    reason: str


@final
class CoordinatorClient:
    """The connection of a worker to its launcher. One thread; its state is in attributes that are cheap to read.

    Args:
        address, port: address of the Coordinator.
        secret: the run's secret, from the launcher.
        worker: id from the launcher: HOST.LOCAL.ATTEMPT.
        joining: True if the run has begun already.

    Attributes:
        has_changed: the generation in use is over, this process is fenced, or the launcher is gone: `check` raises.
        has_newcomers: new workers wait for the members to call `wait_for_generation` at the same boundary.

    Raises:
        UsageError: `worker` is not an id.
        CommunicationError: the launcher cannot be reached, or refuses this worker.
    """

    def __init__(self, address: str, port: int, *, secret: str, worker: str, joining: bool = False) -> None:
        parts = worker.split(".")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            fix = "Set it to HOST.LOCAL.ATTEMPT, as the launcher does."
            raise UsageError(f"HEADWAY_MEMBER is {worker!r}", fix=fix)
        self.has_changed = self.has_newcomers = False
        self.worker, self.joining, self._address = worker, joining, address
        self._send_lock, self._condition = threading.Lock(), threading.Condition()
        self._announced: Message | None = None
        self._lost_workers: list[str] = []
        self._reasons: list[str] = []
        # Generation numbers: the newest that runs, and the one that this process uses.
        self._started_number = self._current_number = -1
        self._on_change: Callable[[], None] | None = None
        # A callback that repeats is called once for each change, counted here.
        self._repeats, self._num_changes, self._num_called = False, 0, -1
        self._final_error: CommunicationError | None = None
        self._confirmations: dict[int, bool | None] = {}
        self._nonce = 0
        self._has_left = self._closing = False
        self._secret = secret.encode()
        self._where = f"{address}:{port}"
        self._connection, self._channel = self._connect(port)
        # The constructor returns only after the launcher has accepted this worker.
        hello = {"id": worker, "host": int(parts[0]), "local": int(parts[1]), "joining": joining}
        self._send("hello", **hello, identity=identify_host(), pid=os.getpid())
        try:
            welcome, later_messages = self._receive_welcome()
        except CommunicationError:
            self._connection.close()
            raise
        self._timeout_s = float(welcome["timeout_s"])
        self._store_port = read_int(welcome, "store_port")
        tune_socket(self._connection, self._timeout_s)
        self._connection.settimeout(self._timeout_s)
        # A byte in this pair wakes the thread from its wait for the connection.
        self._wake_sender, self._wake_receiver = socket.socketpair()
        for message in later_messages:
            self._handle_message(message)
        self._thread = threading.Thread(target=self._run, name="member", daemon=True)
        self._thread.start()

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None) -> CoordinatorClient | None:
        """Connects to the launcher that HEADWAY_COORDINATOR, _SECRET, _MEMBER and _JOINING name.

        Returns None if they are not set. Raises UsageError if they are set in part, or wrong; else as the constructor.
        """
        environ = os.environ if environ is None else environ
        coordinator = environ.get("HEADWAY_COORDINATOR")
        if not coordinator:
            return None
        fix = "Set HEADWAY_COORDINATOR, HEADWAY_SECRET and HEADWAY_MEMBER together, as the launcher does."
        for name in ("HEADWAY_SECRET", "HEADWAY_MEMBER"):
            if not environ.get(name):
                raise UsageError(f"HEADWAY_COORDINATOR is set, and {name} is not", fix=fix)
        address, _, port = coordinator.rpartition(":")
        if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"HEADWAY_COORDINATOR is {coordinator!r}, and should be ADDRESS:PORT", fix=fix)
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
        """Tells the launcher that this process is ready for the next generation, waits for it, and enters it.

        Raises:
            FencedError: this process was declared lost.
            CommunicationError: the launcher is gone.
        """
        # While the generation in use is whole, "ready" tells that this process is at a boundary; the next one begins
        # when all members are, together with the newcomers that wait. Sent once for each announced generation.
        last_ready_number = -1
        with self._condition:
            if self._announced is None:
                self.announce_arrival()
            while True:
                if self._final_error is not None:
                    raise self._final_error
                if self._announced is not None:
                    number = read_int(self._announced, "number")
                    if self._started_number == number > self._current_number:
                        return self._enter_generation(self._announced)
                    if last_ready_number != number:
                        last_ready_number = number
                        self._send("ready", generation=number)
                self._condition.wait()

    def build_world(
        self,
        generation: Generation,
        device: torch.device,
        *,
        abort_reason: str,
        timeout_s: float,
        interface: str | Sequence[str] | None,
        connect_s: float = WORLD_CONNECT_S,
    ) -> World:
        """Builds the world of a generation. It is aborted when the generation is over, also while ranks still connect.

        Args:
            abort_reason: reason that ranks waiting in the world get then. The others: see `World.create`.

        Raises:
            GenerationEndedError: the generation is over already.
            CommunicationError: some rank did not come.
        """
        return World.create(
            self._open_store(generation),
            Membership(generation.rank, generation.size, generation.number, generation.identities),
            device,
            master=generation.store_address,
            timeout_s=timeout_s,
            connect_s=connect_s,
            interface=interface,
            on_created=lambda world: self.watch_generation(generation.number, lambda: world.abort(abort_reason)),
            secret=self._secret,
        )

    def watch_generation(self, number: int, on_change: Callable[[], None], *, repeats: bool = False) -> None:
        """Calls `on_change` once, from the client's thread, when generation `number` is over; at once if it is.

        Args:
            repeats: calls it again for each later announcement.
        """
        with self._condition:
            self._current_number, self._on_change, self._repeats, self._num_called = number, on_change, repeats, -1
            self._update_has_changed()
        # The generation may be over already: the thread then calls `on_change` at once.
        self._wake_sender.send(b"\0")

    def list_members(self) -> tuple[str, ...]:
        """Returns the ids of the workers of the newest generation that was announced; none if this process is out."""
        with self._condition:
            if self._announced is None or self._final_error is not None:
                return ()
            return tuple(worker for worker, _, _ in self._announced["members"])

    def check(self) -> None:
        """Raises if the generation is over. Reads one attribute while nothing has happened.

        Raises:
            GenerationEndedError: the generation in use is over.
            FencedError: this process was declared lost.
            CommunicationError: the launcher is gone.
        """
        if self.has_changed:
            with self._condition:
                self._raise_change()

    def wait_for_change(self, timeout_s: float) -> None:
        """Waits until `has_changed` is True, at most `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self.has_changed, timeout_s)

    def accuse(self, number: int, rank: int) -> None:
        """Reports a rank of generation `number` that is alive and does not come to a collective: it becomes lost."""
        self._send("accuse", generation=number, rank=rank)

    def confirm(self, number: int) -> None:
        """Asks the launcher whether generation `number` is still the newest; call it before something is made final.

        Raises GenerationEndedError, FencedError or CommunicationError if it is not; see `check`.
        """
        self.check()
        with self._condition:
            self._nonce += 1
            # Several threads may ask at the same time: the nonce tells their answers apart.
            nonce = self._nonce
            self._confirmations[nonce] = None
            self._send("confirm", nonce=nonce, generation=number)
            self._condition.wait_for(lambda: self._final_error is not None or self._confirmations[nonce] is not None)
            is_current = self._confirmations.pop(nonce)
            if is_current is None:
                self._raise_change()
        if not is_current:
            self.check()
            raise GenerationEndedError(f"generation {number} is over")

    def leave(self, done: bool) -> None:
        """Leaves in order: the others go on without a new generation. Returns when the launcher has acknowledged it.

        Args:
            done: True if the run is complete, False if it was stopped before its end.

        Raises:
            FencedError: this process was declared lost before.
            CommunicationError: the launcher is gone.
        """
        with self._condition:
            # A generation that forms from now on is not a concern of this process.
            self._on_change = None
            self._send("bye", done=done)
            self._condition.wait_for(lambda: self._has_left or self._final_error is not None)
            if self._final_error is not None:
                raise self._final_error

    def close(self) -> None:
        """Ends the thread and the connection; without `leave` before, this process is lost to the others."""
        if self._closing:
            return
        self._closing = True
        self._wake_sender.send(b"\0")
        # Before the sockets are closed: the thread reads from them.
        self._thread.join()
        for end in (self._connection, self._wake_sender, self._wake_receiver):
            end.close()

    def _connect(self, port: int) -> tuple[socket.socket, Channel]:
        try:
            connection, channel = connect(
                self._address, port, self._secret, COORDINATOR_PURPOSE, timeout_s=LAUNCHER_CONNECT_S
            )
        except OSError as error:
            fix = "Check that the launcher runs, and that no firewall keeps this host from reaching it."
            raise CommunicationError(f"the launcher cannot be reached ({error})", where=self._where, fix=fix) from error
        connection.settimeout(LAUNCHER_CONNECT_S)
        return connection, channel

    def _open_store(self, generation: Generation) -> Any:
        try:
            return build_store(StoreClient(self._secret, generation.store_address, generation.store_port))
        except OSError as error:
            where = f"{generation.store_address}:{generation.store_port}"
            raise CommunicationError(f"the launcher's store cannot be reached ({error})", where=where) from error

    def _receive_welcome(self) -> tuple[Message, list[Message]]:
        """Receives the answer to the hello. Returns it, and messages that came with it, to be handled later."""
        messages: list[Message] = []
        try:
            while not messages:
                data = self._connection.recv(1 << 16)
                if not data:
                    raise CommunicationError("the launcher has ended", where=self._where)
                messages = [decode(line) for line in self._channel.feed(data)]
        except (OSError, ValueError) as error:
            raise CommunicationError(f"the launcher does not answer ({error})", where=self._where) from error
        if messages[0]["kind"] != "welcome":
            reason = messages[0].get("why", "no reason given")
            raise CommunicationError(f"the launcher refuses worker {self.worker}: {reason}", where=self._where)
        return messages[0], messages[1:]

    def _enter_generation(self, announcement: Message) -> Generation:
        # The order of the members is that of the ranks.
        members = announcement["members"]
        self._current_number = read_int(announcement, "number")
        self._update_has_changed()
        generation = Generation(
            number=self._current_number,
            rank=[worker for worker, _, _ in members].index(self.worker),
            size=len(members),
            identities=tuple(identity for _, _, identity in members),
            local_ranks=tuple(local for _, local, _ in members),
            store_address=self._address,
            store_port=self._store_port,
            lost_workers=tuple(self._lost_workers),
            reason="; ".join(self._reasons),
        )
        # Each loss and reason is reported once.
        self._lost_workers.clear()
        self._reasons.clear()
        return generation

    def _raise_change(self) -> None:
        """Raises the error of a client whose generation is over; see `check`."""
        if self._final_error is not None:
            raise self._final_error
        if self._announced is not None and read_int(self._announced, "number") > self._current_number:
            raise GenerationEndedError("; ".join(self._reasons))

    def _send(self, kind: str, **fields: Any) -> None:
        # A broken connection is reported by the thread: it has to read first what the connection still holds.
        with self._send_lock, suppress(OSError):
            self._connection.sendall(self._channel.seal(encode(kind, **fields)))

    # The thread.

    def _run(self) -> None:
        # Wait for messages, but not longer than until the next heartbeat is due.
        interval_s = self._timeout_s / BEATS_PER_TIMEOUT
        next_beat_s = monotonic()
        silent_beats = 0
        with selectors.DefaultSelector() as selector:
            for end in (self._connection, self._wake_receiver):
                selector.register(end, selectors.EVENT_READ)
            while not (self._closing or self._has_left or self._final_error):
                for key, _ in selector.select(max(0.0, next_beat_s - monotonic())):
                    if key.fileobj is self._wake_receiver:
                        self._wake_receiver.recv(4096)
                    else:
                        silent_beats = 0
                        self._read_messages()
                if (now := monotonic()) >= next_beat_s and self._final_error is None:
                    next_beat_s = max(next_beat_s + interval_s, now)
                    # Counted in own beats: a pause of this process is not the launcher's silence.
                    silent_beats += 1
                    if silent_beats > BEATS_PER_TIMEOUT:
                        what = f"nothing was heard from the launcher for {self._timeout_s:g} s"
                        self._fail(CommunicationError(what))
                    self._send("beat")
                self._call_on_change()

    def _read_messages(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
            for message in self._channel.feed(data):
                self._handle_message(decode(message))
        except OSError as error:
            what = f"the connection to the launcher broke ({error.strerror})"
            self._fail(CommunicationError(what, where=self._where))
            return
        except (ValueError, KeyError, TypeError) as error:
            what = f"the launcher sent an invalid message ({error})"
            self._fail(CommunicationError(what, where=self._where))
            return
        if not data and not self._has_left:
            self._fail(CommunicationError("the launcher is gone", where=self._where))

    def _handle_message(self, message: Message) -> None:
        kind = message["kind"]
        with self._condition:
            # An announced generation ends the one in use; it runs when all of its members are ready.
            if kind == "generation":
                self._announced = message
                self._num_changes += 1
                self._lost_workers += message["lost"]
                self._reasons.append(read_text(message, "why"))
                self.has_newcomers = read_int(message, "waiting") > 0
                self._update_has_changed()
            elif kind == "go":
                self._started_number = read_int(message, "number")
            elif kind == "regroup":
                self.has_newcomers = read_int(message, "waiting") > 0
            elif kind == "answer":
                if read_int(message, "nonce") in self._confirmations:
                    self._confirmations[message["nonce"]] = bool(message["current"])
            elif kind == "farewell":
                self._has_left = True
            # The launcher has declared this process lost: it must not go on, even if it is alive.
            elif kind == "fenced":
                self._fail(FencedError(read_text(message, "why")))
            self._condition.notify_all()

    def _fail(self, error: CommunicationError) -> None:
        # The first error counts; all later calls raise it.
        with self._condition:
            if self._final_error is None:
                self._final_error = error
                self._num_changes += 1
                self._update_has_changed()
                self._condition.notify_all()

    def _update_has_changed(self) -> None:
        self.has_changed = self._final_error is not None or (
            self._announced is not None and read_int(self._announced, "number") > self._current_number >= 0
        )

    def _call_on_change(self) -> None:
        with self._condition:
            callback = self._on_change if self.has_changed and self._num_called != self._num_changes else None
            if callback is not None:
                self._num_called = self._num_changes
                self._on_change = callback if self._repeats else None
        # Outside of the lock: the callback may use this client.
        if callback is not None:
            callback()
