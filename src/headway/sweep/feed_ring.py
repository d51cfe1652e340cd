"""The ring of a feed: where each batch lies in shared memory, and which readers are not done with it."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

from headway.data.batch import Batch
from headway.sweep.batch_memory import BatchMemory, PackedBatch
from headway.sweep.feed import send

SLOTS = 4
"""Batches from that of the slowest reader to that of the fastest one. A feed takes so many times a batch in memory."""
PATIENCE = 200.0
"""Batches that the others could have trained on, while they wait for one reader, until it is detached."""


@final
@dataclass(eq=False)
class _Reader:
    """A process that reads the feed.

    Attributes:
        held: position and memory of the batches that it was sent and is not done with.
        known: numbers of the memories that it has mapped.
        done: batches that it is done with.
    """

    connection: socket.socket
    slot: int
    began: float
    held: deque[tuple[int, int]] = field(default_factory=deque)
    known: set[int] = field(default_factory=set)
    done: int = 0
    done_at: float = 0.0

    @property
    def pace_s(self) -> float:
        """Mean seconds in which it is done with a batch."""
        return (self.done_at - self.began) / max(self.done, 1)


@final
class Feed:
    """One stream of batches for readers that begin at one position.

    A batch lies in memory until every reader is done with it. If the others wait for a reader while they could have
    trained on `patience` batches, it is detached: what it still reads stays as it is, and other memory takes its place.

    Args:
        request: what the readers read, without the position.
        begin: opens the stream at a position.
        expected: numbers of the readers; the feed begins once each of them has joined, or will not.
        tell: called with an event.
        patience: see above.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        begin: Callable[[int], Iterator[Batch]],
        expected: set[int],
        tell: Callable[[dict[str, Any]], None],
        patience: float = PATIENCE,
    ) -> None:
        self._request, self._begin, self._expected, self._tell = request, begin, expected, tell
        self._patience = patience
        self._readers: list[_Reader] = []
        self._memories: dict[int, BatchMemory] = {}
        self._stream: Iterator[Batch] | None = None
        self._position, self._next = 0, 0
        self._created = 0
        self._waiting_since: float | None = None

    @property
    def is_over(self) -> bool:
        """True if nobody reads any more, and nobody will join."""
        return not self._readers and not self._expected

    @property
    def is_ready(self) -> bool:
        """True if the next batch can be sent now."""
        return bool(self._readers) and not self._expected and (len(self._list_held()) < SLOTS)

    def join(self, connection: socket.socket, hello: Mapping[str, Any]) -> bool:
        """Takes a reader in; returns False if it reads something else, or was not expected."""
        slot = hello["slot"]
        if slot not in self._expected:
            return False
        self._expected.discard(slot)
        if not self._readers:
            self._position = hello["position"]
        request = {**self._request, "position": self._position}
        if any(hello.get(key) != value for key, value in request.items()):
            return False
        self._readers.append(_Reader(connection, slot, time.monotonic()))
        return True

    def leave(self, slot: int) -> None:
        """Notes that a reader has no more to read; it may never have joined."""
        self._expected.discard(slot)

    def drop(self, connection: socket.socket) -> None:
        """Lets a reader go whose connection has ended."""
        self._readers = [one for one in self._readers if one.connection is not connection]

    def note_done(self, connection: socket.socket, position: int) -> None:
        """Notes that a reader is done with a batch."""
        for reader in self._readers:
            if reader.connection is connection and reader.held and reader.held[0][0] == position:
                reader.held.popleft()
                reader.done, reader.done_at = reader.done + 1, time.monotonic()

    def serve(self) -> None:
        """Sends the next batch to all readers, if it is ready."""
        if self._stream is None:
            self._stream = self._begin(self._position)
        batch = next(self._stream)
        packed, position = PackedBatch(batch), int(batch.positions[0])
        number, dropped = self._find_memory(packed.size)
        memory = self._memories[number]
        memory.write(packed)
        packet = {"position": position, "memory": number, "size": memory.size, "header": packed.text}
        for reader in tuple(self._readers):
            new = [] if number in reader.known else [memory.descriptor]
            try:
                send(reader.connection, {**packet, "dropped": dropped}, *new)
            # It has ended; the end of its connection is read later.
            except OSError:
                self._readers.remove(reader)
                continue
            if not reader.known:
                # Before, it waited for the others to join.
                reader.began = time.monotonic()
            reader.known.add(number)
            reader.held.append((position, number))
        self._waiting_since = None

    def _list_held(self) -> set[int]:
        return {number for reader in self._readers for _, number in reader.held}

    def _find_memory(self, size: int) -> tuple[int, list[int]]:
        """Returns the number of memory that no reader uses, and those that are no more."""
        held, dropped = self._list_held(), list[int]()
        for number in sorted(self._memories.keys() - held):
            if self._memories[number].size >= size:
                return number, dropped
            # Steps have grown.
            self._memories.pop(number).close()
            dropped.append(number)
        self._created += 1
        self._memories[self._created] = BatchMemory(size)
        return self._created, dropped

    def check_patience(self, now: float) -> float | None:
        """Detaches readers for which the others have waited too long; returns when to look again."""
        waiting = [one for one in self._readers if not one.held]
        if self.is_ready or self._expected or not waiting or len(waiting) == len(self._readers):
            self._waiting_since = None
            return None
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        patience_s = self._patience * max(one.pace_s for one in waiting)
        if now < self._waiting_since + patience_s:
            return self._waiting_since + patience_s
        oldest = min(one.held[0][0] for one in self._readers if one.held)
        for reader in [one for one in self._readers if one.held and one.held[0][0] == oldest]:
            self._detach(reader)
        self._waiting_since = None
        return None

    def _detach(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        # It may still read what it holds, so nothing is written there any more.
        for _, number in reader.held:
            if (memory := self._memories.pop(number, None)) is not None:
                memory.close()
        with suppress(OSError):
            send(reader.connection, {"end": "it fell behind the others"})
            # Closed once the reader has ended: what is on its way to it must arrive.
            reader.connection.shutdown(socket.SHUT_WR)
        self._tell({"detached": reader.slot, "position": reader.held[0][0]})

    def close(self, why: str = "") -> None:
        """Ends the stream, and tells the readers that are left why."""
        for reader in self._readers:
            with suppress(OSError):
                send(reader.connection, {"end": why})
                reader.connection.shutdown(socket.SHUT_WR)
        for memory in self._memories.values():
            memory.close()
        if self._stream is not None and hasattr(self._stream, "close"):
            self._stream.close()
