"""Coordinator: who is alive. It lives in the launcher, outside of all workers, and its view is the truth.

One thread with one TCP connection a worker. A connection that ends without a farewell is a worker that died; one on
which nothing comes for `timeout_s` is a worker that stopped, or whose link is cut. Either way those that remain are
told the next generation at once; when all of them are ready for it, they go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Literal, final

from headway.comm.messages import BEATS, Message, decode, encode, text, whole
from headway.core.channel import tune_socket
from headway.core.channel_server import ChannelPeer, ChannelServer

PURPOSE = "coordinator"

LIMIT_BYTES = 1 << 16
"""The longest message that a worker may send."""

Slot = tuple[int, int]
"""A place for a worker: number of the host, number on that host."""


@final
@dataclass(frozen=True)
class Worker:
    """A process that has said hello. `identity`: what `host_identity` says there."""

    id: str
    slot: Slot
    identity: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.identity.partition('/')[0]}"


@final
@dataclass(frozen=True)
class Formed:
    """A generation was announced to its workers, here in the order of their ranks."""

    number: int
    workers: tuple[Worker, ...]
    why: str


@final
@dataclass(frozen=True)
class Began:
    """The first generation was complete, and went. Until then the place of a worker that is lost waits for another."""


@final
@dataclass(frozen=True)
class Left:
    """A worker is no longer part of the run: it said farewell (`done`, or `stopped` before the end), or was lost."""

    worker: Worker
    how: Literal["done", "stopped", "died", "silent"]


Event = Formed | Began | Left


@final
class Coordinator:
    """Forms generations of the workers that connect to it.

    The run begins with a worker for each slot, ranks in the order of slots. Survivors keep their order; a newcomer goes
    behind the last of its host, or to the end, so that rank 0 always has the run's state.

    Args:
        slots: the run begins when there is a worker for each of them.
        secret: of the run: a worker has to know it.
        timeout_s: silence after which a worker is lost.
        store_port: of the key-value store beside this; handed on to the workers.
        tell: called with every Event, from the coordinator's thread.
        address: to listen on; "" for all interfaces.

    Attributes:
        port: where it listens.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        *,
        secret: bytes,
        timeout_s: float,
        store_port: int,
        tell: Callable[[Event], None],
        address: str = "127.0.0.1",
    ) -> None:
        self._slots, self._tell = set(slots), tell
        self._timeout_s, self._store_port = timeout_s, store_port
        self._number, self._began, self._went = -1, False, False
        self._members: list[_Peer] = []
        self._lost: list[tuple[str, str]] = []
        self._peers: set[_Peer] = set()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._server = ChannelServer(
            address,
            0,
            secret,
            PURPOSE,
            on_connect=self._came,
            on_message=self._read,
            on_disconnect=self._gone,
            limit_bytes=LIMIT_BYTES,
            prove_s=timeout_s,
        )
        self.port: int = self._server.port
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def give_up(self, slot: Slot) -> None:
        """The run begins without a worker for this slot."""
        self._call(lambda: self._slots.discard(slot))

    def dead(self, worker: str) -> None:
        """This worker's process was killed: it is lost even where a child of it still holds the connection."""

        def lose() -> None:
            for peer in tuple(self._peers):
                if peer.worker is not None and peer.worker.id == worker:
                    self._server.read(peer.end)  # its farewell may lie there
                    if not peer.left:
                        self._lose(peer, "died", "died")

        self._call(lose)

    def close(self) -> None:
        """Ends all connections: whoever still is there learns that the launcher is gone."""
        if self._closing:
            return
        self._closing = True
        self._server.wake()
        self._thread.join()
        self._server.close()

    def _call(self, action: Callable[[], None]) -> None:
        self._calls.put(action)
        self._server.wake()

    def _run(self) -> None:
        beat_s = self._timeout_s / BEATS
        due = monotonic() + beat_s
        while not self._closing:
            self._server.poll(max(0.0, due - monotonic()))
            while not self._calls.empty():
                self._calls.get()()
            if (now := monotonic()) >= due:
                due = max(due + beat_s, now)
                self._beat()
            self._settle()

    # Connections.

    def _came(self, end: ChannelPeer) -> None:
        tune_socket(end.connection, self._timeout_s)
        end.of = _Peer(end)
        self._peers.add(end.of)

    def _read(self, end: ChannelPeer, data: bytes) -> None:
        peer: _Peer = end.of
        try:
            self._heed(peer, decode(data))
        except ValueError as error:
            if peer.worker is None:
                self._turn_away(peer, "refused", str(error))
            elif not peer.left:
                self._lose(peer, "died", f"sent what is no message ({error})")

    def _gone(self, end: ChannelPeer, why: str) -> None:
        peer: _Peer = end.of
        if peer.worker is not None and not peer.left:
            self._lose(peer, "died", f"sent what is no message ({why})" if why else "died")
        peer.left = True
        self._peers.discard(peer)

    def _send(self, peer: _Peer, line: bytes) -> None:
        self._server.send(peer.end, line)

    def _turn_away(self, peer: _Peer, kind: str, why: str) -> None:
        """The last message."""
        peer.left = True
        self._send(peer, encode(kind, why=why))
        self._server.finish_sending(peer.end)

    def _close(self, peer: _Peer) -> None:
        peer.left = True
        self._peers.discard(peer)
        self._server.close_peer(peer.end)

    def _beat(self) -> None:
        """Sends a sign of life and counts those that did not come. Counted in beats of this loop, so that a pause of
        this process is not taken for the silence of the others."""
        for peer in tuple(self._peers):
            peer.silent_beats += 1
            silent = peer.silent_beats > BEATS
            if peer.worker is None:
                if silent:
                    self._close(peer)
            elif not peer.left and silent:
                self._lose(peer, "silent", f"was silent for {self._timeout_s:g} s")
            elif not peer.left:
                self._send(peer, encode("beat"))

    # What workers say.

    def _heed(self, peer: _Peer, message: Message) -> None:
        if peer.left:
            return
        if peer.worker is None:
            self._hello(peer, message)
        else:
            peer.silent_beats = 0
            self._hear(peer, peer.worker, message)

    def _hello(self, peer: _Peer, message: Message) -> None:
        if message["kind"] != "hello":
            raise ValueError("the first message is no hello")
        slot = (whole(message, "host"), whole(message, "local"))
        worker = Worker(text(message, "id"), slot, text(message, "identity"), whole(message, "pid"))
        present = [other.worker for other in self._present() if other.worker is not None]
        if any(other.id == worker.id for other in present):
            raise ValueError(f"worker {worker.id} is there already")
        if not self._began:
            if message.get("joining"):
                raise ValueError("the run has not begun, there is nothing to join")
            if slot not in self._slots or any(other.slot == slot for other in present):
                raise ValueError(f"there is no place {slot[0]}.{slot[1]} to fill")
        elif not message.get("joining"):
            raise ValueError("the run has begun without this worker")
        elif self._over():
            raise ValueError("the run has ended")
        peer.worker, peer.silent_beats = worker, 0
        self._send(peer, encode("welcome", timeout_s=self._timeout_s, store_port=self._store_port))
        self._say_who_waits()

    def _hear(self, peer: _Peer, worker: Worker, message: Message) -> None:
        kind = message["kind"]
        if kind == "here":
            peer.here = True
            self._say_who_waits()
        elif kind == "ready":
            if whole(message, "generation") == self._number and peer in self._members:
                peer.leaving |= self._went
                peer.ready = True
        elif kind == "confirm":
            current = whole(message, "generation") == self._number and peer in self._members
            self._send(peer, encode("answer", nonce=whole(message, "nonce"), current=current))
        elif kind == "accuse":
            self._accuse(peer, whole(message, "generation"), whole(message, "rank"))
        elif kind == "bye":
            self._tell(Left(worker, "done" if message.get("done") else "stopped"))
            self._turn_away(peer, "farewell", "")
            self._say_who_waits()
        elif kind != "beat":
            raise ValueError(f"a message of unknown kind {kind!r}")

    def _accuse(self, peer: _Peer, number: int, rank: int) -> None:
        """Of two that accuse each other the first is believed: the generation is over then."""
        if number != self._number or peer not in self._members or not 0 <= rank < len(self._members):
            return
        accused = self._members[rank]
        if accused is not peer and not accused.left:
            by = self._members.index(peer)
            self._lose(accused, "silent", f"did not come to the operation in which rank {by} waits for it")

    # Generations.

    def _over(self) -> bool:
        return self._began and all(peer.left for peer in self._members)

    def _present(self) -> list[_Peer]:
        """The workers of the run, in the order of their slots."""
        return sorted((peer for peer in self._peers if peer.worker is not None and not peer.left), key=_slot)

    def _waiting(self) -> list[_Peer]:
        """Those of them that have nothing left to do but to join: nobody has to wait for them."""
        return [peer for peer in self._present() if peer not in self._members and peer.here]

    def _say_who_waits(self) -> None:
        line = encode("regroup", waiting=len(self._waiting()))
        for peer in self._members:
            if not peer.left:
                self._send(peer, line)

    def _lose(self, peer: _Peer, how: Literal["died", "silent"], what: str) -> None:
        """Takes a worker out of the run; `_settle` tells the others, once for all that were lost together."""
        assert peer.worker is not None
        was = f"rank {self._members.index(peer)} ({peer.worker})" if peer in self._members else str(peer.worker)
        self._turn_away(peer, "fenced", f"{was} {what}")
        if peer in self._members:
            self._lost.append((peer.worker.id, f"{was} {what}"))
        else:
            self._say_who_waits()
        self._tell(Left(peer.worker, how))

    def _settle(self) -> None:
        """Does what the state now asks for: begin, go, form the next generation, end."""
        present = [peer for peer in self._members if not peer.left]
        if not self._began:
            workers = self._present()
            if workers != self._members and self._slots and {_slot(peer) for peer in workers} >= self._slots:
                self._form(workers, "; ".join(["the run begins", *(why for _, why in self._lost)]))
        elif not present:
            for peer in self._present():
                self._turn_away(peer, "fenced", "nobody is left whom this worker could join")
        elif self._lost:
            self._form(present, "; ".join(why for _, why in self._lost))
        elif self._went:
            if all(peer.leaving for peer in present):
                newcomers = self._waiting()
                names = ", ".join(str(peer.worker) for peer in newcomers)
                self._form(_joined(present, newcomers), f"{names} joined" if names else "the workers met anew")
        elif len(present) < len(self._members):
            self._form(present, "a worker has ended")
        if self._members and not self._went and all(peer.ready and not peer.left for peer in self._members):
            if not self._began:
                self._began = True
                self._tell(Began())
            self._went = True
            for peer in self._members:
                self._send(peer, encode("go", number=self._number))

    def _form(self, members: list[_Peer], why: str) -> None:
        self._number, self._went, self._members = self._number + 1, False, members
        workers = tuple(peer.worker for peer in members if peer.worker is not None)
        for peer in members:
            peer.ready = peer.leaving = False
        line = encode(
            "generation",
            number=self._number,
            members=[[worker.id, worker.slot[1], worker.identity] for worker in workers],
            lost=[worker for worker, _ in self._lost],
            why=why,
            waiting=len(self._waiting()),
        )
        self._lost.clear()
        for peer in members:
            self._send(peer, line)
        self._tell(Formed(self._number, workers, why))


def _slot(peer: _Peer) -> Slot:
    assert peer.worker is not None
    return peer.worker.slot


def _joined(members: list[_Peer], newcomers: list[_Peer]) -> list[_Peer]:
    """Each newcomer behind the last member of its host, or at the end."""
    out = list(members)
    for peer in newcomers:
        same = [place for place, other in enumerate(out) if _slot(other)[0] == _slot(peer)[0]]
        out.insert(same[-1] + 1 if same else len(out), peer)
    return out


@final
class _Peer:
    """A connection, and what is known of the worker at its other end.

    Attributes:
        worker: None before its hello.
        silent_beats: of the coordinator, since something came.
        here: it waits for its first generation. ready: for the generation to go. leaving: for the next one.
        left: it is out of the run; what still comes from it is not looked at.
    """

    def __init__(self, end: ChannelPeer) -> None:
        self.end = end
        self.worker: Worker | None = None
        self.silent_beats = 0
        self.here = self.ready = self.leaving = self.left = False
