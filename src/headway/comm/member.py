"""Member: a worker's side of the Coordinator. Its thread sends signs of life and hears of the next generation."""

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
from headway.comm.messages import BEATS, Message, decode, encode, text, whole
from headway.core import channel
from headway.core.channel import Channel
from headway.core.errors import CommunicationError, FencedError, GenerationEndedError, UsageError
from headway.core.hosts import identify_host
from headway.core.key_value_store import StoreClient, build_store
from headway.core.world import CONNECT_S as MEET_S
from headway.core.world import Membership, World

if TYPE_CHECKING:
    import torch

CONNECT_S = 60.0
"""How long the launcher may take to answer the first message."""


@final
@dataclass(frozen=True)
class Generation:
    """Who trains together from now on.

    Attributes:
        number: 0 at the start; larger than that of any generation before.
        rank: of this process. size: of the generation.
        identities: what `host_identity` says on the host of each rank.
        local_ranks: number of each rank on its host, as the launcher counts: its device; it never changes.
        store_address, store_port: of the launcher's key-value store.
        lost: ids of the workers that were lost since the generation before.
        why: a sentence for the user.
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
class Member:
    """A worker of a launcher. One thread; what it learns stands in attributes that are cheap to read.

    Args:
        address, port: of the Coordinator.
        secret: of the run; the launcher gave it.
        worker: id that the launcher gave: HOST.LOCAL.ATTEMPT.
        joining: the run has begun already.

    Attributes:
        worker: its id. joining: the run had begun when it came.
        changed: the generation in use is over, this process is fenced, or the launcher is gone: `check` raises.
        regroup: newcomers wait for the members to call `next` at the same boundary.

    Raises:
        UsageError: the id is none. CommunicationError: the launcher cannot be reached, or refuses this worker.
    """

    def __init__(self, address: str, port: int, *, secret: str, worker: str, joining: bool = False) -> None:
        parts = worker.split(".")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise UsageError(f"HEADWAY_MEMBER is {worker!r}", fix="It is HOST.LOCAL.ATTEMPT; the launcher sets it.")
        self.changed = self.regroup = False
        self.worker, self.joining, self._address = worker, joining, address
        self._sending, self._state = threading.Lock(), threading.Condition()
        self._newest: Message | None = None
        self._lost: list[str] = []
        self._whys: list[str] = []
        self._went = self._used = -1
        self._on_change: Callable[[], None] | None = None
        self._end: CommunicationError | None = None
        self._answers: dict[int, bool | None] = {}
        self._nonce = 0
        self._farewell = self._closing = False
        self._secret = secret.encode()
        self._where = f"{address}:{port}"
        self._connection, self._channel = self._connect(port)
        hello = {"id": worker, "host": int(parts[0]), "local": int(parts[1]), "joining": joining}
        self._send("hello", **hello, identity=identify_host(), pid=os.getpid())
        try:
            welcome, rest = self._welcome()
        except CommunicationError:
            self._connection.close()
            raise
        self._timeout_s = float(welcome["timeout_s"])
        self._store_port = whole(welcome, "store_port")
        channel.tune_socket(self._connection, self._timeout_s)
        self._connection.settimeout(self._timeout_s)
        self._wake, self._woken = socket.socketpair()
        for message in rest:
            self._hear(message)
        self._thread = threading.Thread(target=self._run, name="member", daemon=True)
        self._thread.start()

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None) -> Member | None:
        """The member that HEADWAY_COORDINATOR, _SECRET, _MEMBER and _JOINING describe; None where there is no launcher.

        Raises:
            UsageError: they are set in part, or wrong. CommunicationError: see Member.
        """
        environ = os.environ if environ is None else environ
        where = environ.get("HEADWAY_COORDINATOR")
        if not where:
            return None
        fix = "The launcher sets HEADWAY_COORDINATOR, HEADWAY_SECRET and HEADWAY_MEMBER together; so should others."
        for name in ("HEADWAY_SECRET", "HEADWAY_MEMBER"):
            if not environ.get(name):
                raise UsageError(f"HEADWAY_COORDINATOR is set, and {name} is not", fix=fix)
        address, _, port = where.rpartition(":")
        if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"HEADWAY_COORDINATOR is {where!r}, and should be ADDRESS:PORT", fix=fix)
        return Member(
            address.strip("[]"),
            int(port),
            secret=environ["HEADWAY_SECRET"],
            worker=environ["HEADWAY_MEMBER"],
            joining=environ.get("HEADWAY_JOINING") == "1",
        )

    def here(self) -> None:
        """Says that this newcomer has nothing left to do but to join; nobody waits for it before. So does `next`."""
        self._send("here")

    def next(self) -> Generation:
        """Waits for the next generation, and says that this process is ready for it.

        While the one in use is whole, this says that the process stands at a boundary; the next one begins when all of
        its members say so, with the newcomers that wait.

        Raises:
            FencedError: this process was declared lost. CommunicationError: the launcher is gone.
        """
        asked = -1
        with self._state:
            if self._newest is None:
                self.here()
            while True:
                if self._end is not None:
                    raise self._end
                newest = self._newest
                if newest is not None:
                    number = whole(newest, "number")
                    if self._went == number > self._used:
                        return self._enter(newest)
                    if asked != number:
                        asked = number
                        self._send("ready", generation=number)
                self._state.wait()

    def world(
        self,
        generation: Generation,
        device: torch.device,
        *,
        why: str,
        timeout_s: float,
        interface: str | None,
        connect_s: float = MEET_S,
    ) -> World:
        """The world of a generation, which is given up when the generation is over, also while it comes together.

        Args:
            why: a sentence for whoever waits in it then. The rest: see `World.create`.

        Raises:
            GenerationEndedError: it is over already. CommunicationError: some rank did not come.
        """
        return World.create(
            self._store(generation),
            Membership(generation.rank, generation.size, generation.number, generation.identities),
            device,
            master=generation.store_address,
            timeout_s=timeout_s,
            connect_s=connect_s,
            interface=interface,
            on_created=lambda world: self.watch(generation.number, lambda: world.abort(why)),
            secret=self._secret,
        )

    def watch(self, number: int, on_change: Callable[[], None]) -> None:
        """Calls `on_change` once, from this Member's thread, when generation `number` is over; at once if it is."""
        with self._state:
            self._used, self._on_change = number, on_change
            self._look()
        self._wake.send(b"\0")

    def check(self) -> None:
        """Costs nothing while nothing has happened.

        Raises:
            GenerationEndedError: the generation in use is over. FencedError: this process was declared lost.
            CommunicationError: the launcher is gone.
        """
        if self.changed:
            with self._state:
                self._raise()

    def accuse(self, number: int, rank: int) -> None:
        """Says that a rank of generation `number` is alive and does not come to a collective: it is taken for lost."""
        self._send("accuse", generation=number, rank=rank)

    def confirm(self, number: int) -> None:
        """Asks the launcher whether generation `number` is still the newest: before something is made final.

        Raises:
            GenerationEndedError, FencedError, CommunicationError: it is not; see `check`.
        """
        self.check()
        with self._state:
            self._nonce += 1
            nonce = self._nonce
            self._answers[nonce] = None
            self._send("confirm", nonce=nonce, generation=number)
            self._state.wait_for(lambda: self._end is not None or self._answers[nonce] is not None)
            answer = self._answers.pop(nonce)
            if answer is None:
                self._raise()
        if not answer:
            self.check()
            raise GenerationEndedError(f"generation {number} is over")

    def bye(self, done: bool) -> None:
        """Leaves in order: the others go on without a new generation. Returns when the launcher has heard it.

        Args:
            done: the run is at its end; else it was stopped before it.

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
        """Ends the thread and the connection; without `bye` before, this process is lost to the others."""
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
            fix = "Does the launcher run, and does a firewall let this host reach it?"
            raise CommunicationError(f"the launcher cannot be reached ({error})", where=self._where, fix=fix) from error
        end.settimeout(CONNECT_S)
        return end, spoken

    def _store(self, generation: Generation) -> Any:
        try:
            return build_store(StoreClient(self._secret, generation.store_address, generation.store_port))
        except OSError as error:
            where = f"{generation.store_address}:{generation.store_port}"
            raise CommunicationError(f"the launcher's store cannot be reached ({error})", where=where) from error

    def _welcome(self) -> tuple[Message, list[Message]]:
        """The launcher's answer to the hello, and what came with it."""
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

    def _enter(self, newest: Message) -> Generation:
        members = newest["members"]
        self._used = whole(newest, "number")
        self._look()
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

    def _raise(self) -> None:
        if self._end is not None:
            raise self._end
        if self._newest is not None and whole(self._newest, "number") > self._used:
            raise GenerationEndedError("; ".join(self._whys))

    def _send(self, kind: str, **fields: Any) -> None:
        """A message; where the connection has ended, the thread says so: what it still holds has to be read first."""
        with self._sending, suppress(OSError):
            self._connection.sendall(self._channel.seal(encode(kind, **fields)))

    # The thread.

    def _run(self) -> None:
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
                        self._read()
                if (now := monotonic()) >= due and self._end is None:
                    due = max(due + beat_s, now)
                    silent_beats += 1  # counted in own beats: a pause of this process is not the launcher's silence
                    if silent_beats > BEATS:
                        self._over(CommunicationError(f"nothing was heard from the launcher for {self._timeout_s:g} s"))
                    self._send("beat")
                self._call()

    def _read(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
            for message in self._channel.feed(data):
                self._hear(decode(message))
        except OSError as error:
            what = f"the connection to the launcher broke ({error.strerror})"
            self._over(CommunicationError(what, where=self._where))
            return
        except (ValueError, KeyError, TypeError) as error:
            self._over(CommunicationError(f"the launcher says what is no message ({error})", where=self._where))
            return
        if not data and not self._farewell:
            self._over(CommunicationError("the launcher is gone", where=self._where))

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        with self._state:
            if kind == "generation":
                self._newest = message
                self._lost += message["lost"]
                self._whys.append(text(message, "why"))
                self.regroup = whole(message, "waiting") > 0
                self._look()
            elif kind == "go":
                self._went = whole(message, "number")
            elif kind == "regroup":
                self.regroup = whole(message, "waiting") > 0
            elif kind == "answer":
                if whole(message, "nonce") in self._answers:
                    self._answers[message["nonce"]] = bool(message["current"])
            elif kind == "farewell":
                self._farewell = True
            elif kind == "fenced":
                self._over(FencedError(text(message, "why")))
            self._state.notify_all()

    def _over(self, error: CommunicationError) -> None:
        with self._state:
            if self._end is None:
                self._end = error
                self._look()
                self._state.notify_all()

    def _look(self) -> None:
        self.changed = self._end is not None or (
            self._newest is not None and whole(self._newest, "number") > self._used >= 0
        )

    def _call(self) -> None:
        """Calls back, outside of the lock: what is called may use this Member."""
        with self._state:
            due = self._on_change if self.changed else None
            if due is not None:
                self._on_change = None
        if due is not None:
            due()
