"""Coordinator: tracks which workers are alive. It runs in the launcher, and its view is the truth."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Literal, final

from headway.comm.messages import BEATS_PER_TIMEOUT, Message, decode, encode, read_int, read_text
from headway.core.channel import tune_socket
from headway.core.channel_server import ChannelPeer, ChannelServer

# One thread, one TCP connection per worker. A connection that ends without a farewell is a worker that died; one that
# is silent for `timeout_s` is a worker that stopped, or whose link is cut. In both cases the coordinator announces the
# next generation to the remaining workers at once, and starts it when all of them are ready.

COORDINATOR_PURPOSE = "coordinator"

MAX_WORKER_MESSAGE_BYTES = 1 << 16

WorkerSlot = tuple[int, int]
"""The place of a worker: index of the host, rank on that host."""


@final
@dataclass(frozen=True)
class Worker:
    """A process that has said hello. `identity` is the `identify_host` of its host."""

    id: str
    slot: WorkerSlot
    identity: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.identity.partition('/')[0]}"


@final
@dataclass(frozen=True)
class GenerationFormed:
    """A generation was announced to its workers, here in the order of their ranks."""

    number: int
    workers: tuple[Worker, ...]
    reason: str


@final
@dataclass(frozen=True)
class RunBegan:
    """The first generation was complete and started. A worker lost before that is replaced at its slot."""


@final
@dataclass(frozen=True)
class WorkerLeft:
    """A worker is no longer part of the run: it said farewell (`done`, or `stopped` before the end), or was lost."""

    worker: Worker
    how: Literal["done", "stopped", "died", "silent"]


@final
@dataclass(frozen=True)
class CoordinatorFailed:
    """The coordinator has ended by an error of its own, and no worker hears of it any more."""

    error: Exception


CoordinatorEvent = GenerationFormed | RunBegan | WorkerLeft | CoordinatorFailed


@final
class Coordinator:
    """Forms generations of the workers that connect to it at `port`, first with one worker per slot.

    A generation is announced first; it runs once all of its workers are ready. A thread of its own does the work.

    Args:
        slots: the run begins when each of them has a worker.
        secret: the run's secret; a worker has to know it.
        timeout_s: silence after which a worker is lost.
        store_port: port of the key-value store on this host; passed on to the workers.
        on_event: called with every event, from the coordinator's thread.
        address: to listen on; "" for all interfaces.

    Attributes:
        port: TCP port at which it listens.
    """

    def __init__(
        self,
        slots: Iterable[WorkerSlot],
        *,
        secret: bytes,
        timeout_s: float,
        store_port: int,
        on_event: Callable[[CoordinatorEvent], None],
        address: str = "127.0.0.1",
    ) -> None:
        self._slots, self._on_event = set(slots), on_event
        self._timeout_s, self._store_port = timeout_s, store_port
        # Generation -1 comes before the first.
        self._number = -1
        self._has_begun = self._is_running = False
        self._members: list[_WorkerConnection] = []
        self._lost_members: list[tuple[str, str]] = []
        self._peers: set[_WorkerConnection] = set()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._server = ChannelServer(
            address,
            0,
            secret,
            COORDINATOR_PURPOSE,
            on_connect=self._handle_connect,
            on_message=self._handle_data,
            on_disconnect=self._handle_disconnect,
            limit_bytes=MAX_WORKER_MESSAGE_BYTES,
            prove_s=timeout_s,
        )
        self.port: int = self._server.port
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def give_up_slot(self, slot: WorkerSlot) -> None:
        """Lets the run begin without a worker for this slot."""
        self._call_soon(lambda: self._slots.discard(slot))

    def mark_dead(self, worker_id: str) -> None:
        """Declares a worker lost whose process was killed, even if a child of it still holds the connection."""

        def declare_worker_lost() -> None:
            for peer in tuple(self._peers):
                if peer.worker is not None and peer.worker.id == worker_id:
                    # Its farewell may lie unread in the socket.
                    self._server.read(peer.channel_peer)
                    if not peer.has_left:
                        self._declare_lost(peer, "died", "died")

        self._call_soon(declare_worker_lost)

    def close(self) -> None:
        """Closes all connections; workers that are still there learn that the launcher is gone."""
        if self._closing:
            return
        self._closing = True
        self._server.wake()
        self._thread.join()
        self._server.close()

    def _call_soon(self, action: Callable[[], None]) -> None:
        # The state belongs to the coordinator's thread: other threads only queue actions.
        self._calls.put(action)
        self._server.wake()

    def _run(self) -> None:
        # Whoever waits for events would wait for ever for those of a thread that has ended in silence.
        try:
            self._serve()
        except Exception as error:
            self._on_event(CoordinatorFailed(error))

    def _serve(self) -> None:
        interval_s = self._timeout_s / BEATS_PER_TIMEOUT
        next_beat_s = monotonic() + interval_s
        while not self._closing:
            self._server.poll(max(0.0, next_beat_s - monotonic()))
            while not self._calls.empty():
                self._calls.get()()
            if (now := monotonic()) >= next_beat_s:
                next_beat_s = max(next_beat_s + interval_s, now)
                self._run_heartbeat()
            # After every round of messages, so that workers that were lost together make one new generation.
            self._advance()

    # Connections.

    def _handle_connect(self, channel_peer: ChannelPeer) -> None:
        tune_socket(channel_peer.connection, self._timeout_s)
        channel_peer.of = _WorkerConnection(channel_peer)
        self._peers.add(channel_peer.of)

    def _handle_data(self, channel_peer: ChannelPeer, data: bytes) -> None:
        peer: _WorkerConnection = channel_peer.of
        try:
            self._handle_message(peer, decode(data))
        except ValueError as error:
            if peer.worker is None:
                self._dismiss(peer, "refused", str(error))
            elif not peer.has_left:
                self._declare_lost(peer, "died", f"sent an invalid message ({error})")

    def _handle_disconnect(self, channel_peer: ChannelPeer, error: str) -> None:
        peer: _WorkerConnection = channel_peer.of
        if peer.worker is not None and not peer.has_left:
            self._declare_lost(peer, "died", f"sent an invalid message ({error})" if error else "died")
        peer.has_left = True
        self._peers.discard(peer)

    def _send(self, peer: _WorkerConnection, message: bytes) -> None:
        self._server.send(peer.channel_peer, message)

    def _dismiss(self, peer: _WorkerConnection, kind: str, reason: str) -> None:
        """Sends a worker its last message, and closes the connection once that is sent."""
        peer.has_left = True
        self._send(peer, encode(kind, why=reason))
        self._server.finish_sending(peer.channel_peer)

    def _close_peer(self, peer: _WorkerConnection) -> None:
        peer.has_left = True
        self._peers.discard(peer)
        self._server.close_peer(peer.channel_peer)

    def _run_heartbeat(self) -> None:
        """Sends a heartbeat to every worker, and declares those lost that were silent for too long."""
        # Silence is counted in beats of this loop, so that a pause of this process is not taken for silence of others.
        for peer in tuple(self._peers):
            peer.silent_beats += 1
            is_silent = peer.silent_beats > BEATS_PER_TIMEOUT
            if peer.worker is None:
                if is_silent:
                    self._close_peer(peer)
            elif not peer.has_left and is_silent:
                self._declare_lost(peer, "silent", f"was silent for {self._timeout_s:g} s")
            elif not peer.has_left:
                self._send(peer, encode("beat"))

    # Messages of the workers.

    def _handle_message(self, peer: _WorkerConnection, message: Message) -> None:
        if peer.has_left:
            return
        if peer.worker is None:
            self._handle_hello(peer, message)
        else:
            peer.silent_beats = 0
            self._handle_worker_message(peer, peer.worker, message)

    def _handle_hello(self, peer: _WorkerConnection, message: Message) -> None:
        if message["kind"] != "hello":
            raise ValueError("the first message is not a hello")
        slot = (read_int(message, "host"), read_int(message, "local"))
        worker = Worker(read_text(message, "id"), slot, read_text(message, "identity"), read_int(message, "pid"))
        present_workers = [other.worker for other in self._list_present_peers() if other.worker is not None]
        if any(other.id == worker.id for other in present_workers):
            raise ValueError(f"worker {worker.id} is there already")
        if not self._has_begun:
            if message.get("joining"):
                raise ValueError("the run has not begun, there is nothing to join")
            if slot not in self._slots or any(other.slot == slot for other in present_workers):
                raise ValueError(f"there is no place {slot[0]}.{slot[1]} to fill")
        elif not message.get("joining"):
            raise ValueError("the run has begun without this worker")
        elif self._all_have_left():
            raise ValueError("the run has ended")
        peer.worker, peer.silent_beats = worker, 0
        self._send(peer, encode("welcome", timeout_s=self._timeout_s, store_port=self._store_port))
        self._announce_waiting()

    def _handle_worker_message(self, peer: _WorkerConnection, worker: Worker, message: Message) -> None:
        kind = message["kind"]
        if kind == "here":
            peer.has_arrived = True
            self._announce_waiting()
        elif kind == "ready":
            if read_int(message, "generation") == self._number and peer in self._members:
                peer.is_at_boundary |= self._is_running
                peer.is_ready = True
        elif kind == "confirm":
            is_current = read_int(message, "generation") == self._number and peer in self._members
            self._send(peer, encode("answer", nonce=read_int(message, "nonce"), current=is_current))
        elif kind == "accuse":
            self._handle_accusation(peer, read_int(message, "generation"), read_int(message, "rank"))
        elif kind == "bye":
            self._on_event(WorkerLeft(worker, "done" if message.get("done") else "stopped"))
            self._dismiss(peer, "farewell", "")
            self._announce_waiting()
        elif kind != "beat":
            raise ValueError(f"a message of unknown kind {kind!r}")

    def _handle_accusation(self, peer: _WorkerConnection, number: int, rank: int) -> None:
        # If two ranks accuse each other, the first is believed: its accusation ends the generation of the second.
        if number != self._number or peer not in self._members or not 0 <= rank < len(self._members):
            return
        accused = self._members[rank]
        if accused is not peer and not accused.has_left:
            accuser = self._members.index(peer)
            self._declare_lost(accused, "silent", f"did not come to the operation in which rank {accuser} waits for it")

    # Generations.

    def _all_have_left(self) -> bool:
        return self._has_begun and all(peer.has_left for peer in self._members)

    def _list_present_peers(self) -> list[_WorkerConnection]:
        # In the order of their slots, which becomes the order of ranks when the run begins.
        return sorted((peer for peer in self._peers if peer.worker is not None and not peer.has_left), key=_get_slot)

    def _list_waiting_peers(self) -> list[_WorkerConnection]:
        # Only newcomers that can join at once: nobody has to wait for one that still starts up.
        return [peer for peer in self._list_present_peers() if peer not in self._members and peer.has_arrived]

    def _announce_waiting(self) -> None:
        message = encode("regroup", waiting=len(self._list_waiting_peers()))
        for peer in self._members:
            if not peer.has_left:
                self._send(peer, message)

    def _declare_lost(self, peer: _WorkerConnection, how: Literal["died", "silent"], what: str) -> None:
        # `_advance` tells the others, once for all that were lost together.
        assert peer.worker is not None
        name = f"rank {self._members.index(peer)} ({peer.worker})" if peer in self._members else str(peer.worker)
        # Fenced: a worker that only seemed dead must not go on.
        self._dismiss(peer, "fenced", f"{name} {what}")
        if peer in self._members:
            self._lost_members.append((peer.worker.id, f"{name} {what}"))
        else:
            self._announce_waiting()
        self._on_event(WorkerLeft(peer.worker, how))

    def _advance(self) -> None:
        """Takes the next step that the state allows: forms a generation, ends the run, or starts a generation."""
        present = [peer for peer in self._members if not peer.has_left]
        lost_reasons = [reason for _, reason in self._lost_members]
        # 1. Before the beginning: a worker for each slot. A loss before it runs forms another one.
        if not self._has_begun:
            peers = self._list_present_peers()
            if peers != self._members and self._slots and {_get_slot(peer) for peer in peers} >= self._slots:
                self._form_generation(peers, "; ".join(["the run begins", *lost_reasons]))
        # 2. All members have left: newcomers have nobody to get the state from.
        elif not present:
            for peer in self._list_present_peers():
                self._dismiss(peer, "fenced", "nobody is left whom this worker could join")
        # 3. Members were lost: the others go on at once, without newcomers.
        elif self._lost_members:
            self._form_generation(present, "; ".join(lost_reasons))
        # 4. All members stand at a boundary: newcomers join there.
        elif self._is_running:
            if all(peer.is_at_boundary for peer in present):
                newcomers = self._list_waiting_peers()
                names = ", ".join(str(peer.worker) for peer in newcomers)
                reason = f"{names} joined" if names else "the workers met anew"
                self._form_generation(_insert_newcomers(present, newcomers), reason)
        # 5. A member has left in order before the generation ran.
        elif len(present) < len(self._members):
            self._form_generation(present, "a worker has ended")
        if (
            self._members
            and not self._is_running
            and all(peer.is_ready and not peer.has_left for peer in self._members)
        ):
            if not self._has_begun:
                self._has_begun = True
                self._on_event(RunBegan())
            self._is_running = True
            for peer in self._members:
                self._send(peer, encode("go", number=self._number))

    def _form_generation(self, members: list[_WorkerConnection], reason: str) -> None:
        """Makes these workers the next generation, in this order of ranks, and announces it to them."""
        self._number += 1
        self._members = members
        self._is_running = False
        workers = tuple(peer.worker for peer in members if peer.worker is not None)
        for peer in members:
            peer.is_ready = peer.is_at_boundary = False
        message = encode(
            "generation",
            number=self._number,
            members=[[worker.id, worker.slot[1], worker.identity] for worker in workers],
            lost=[worker_id for worker_id, _ in self._lost_members],
            why=reason,
            waiting=len(self._list_waiting_peers()),
        )
        self._lost_members.clear()
        for peer in members:
            self._send(peer, message)
        self._on_event(GenerationFormed(self._number, workers, reason))


def _get_slot(peer: _WorkerConnection) -> WorkerSlot:
    assert peer.worker is not None
    return peer.worker.slot


def _insert_newcomers(members: list[_WorkerConnection], newcomers: list[_WorkerConnection]) -> list[_WorkerConnection]:
    # Survivors keep their order; a newcomer goes behind the last member of its host, or to the end. So rank 0 always
    # has the state of the run.
    ordered = list(members)
    for newcomer in newcomers:
        host, _ = _get_slot(newcomer)
        same_host = [index for index, peer in enumerate(ordered) if _get_slot(peer)[0] == host]
        ordered.insert(same_host[-1] + 1 if same_host else len(ordered), newcomer)
    return ordered


@final
class _WorkerConnection:
    """A connection, and the state of the worker at its other end.

    Attributes:
        worker: None before its hello.
        silent_beats: heartbeats of the coordinator since the last message came.
        has_arrived: it waits for its first generation.
        is_ready: it waits for the announced generation to start.
        is_at_boundary: it has finished its part of the running generation and waits for the next one.
        has_left: it is out of the run; messages that still come are ignored.
    """

    def __init__(self, channel_peer: ChannelPeer) -> None:
        self.channel_peer = channel_peer
        self.worker: Worker | None = None
        self.silent_beats = 0
        self.has_arrived = self.is_ready = self.is_at_boundary = self.has_left = False
