"""The threads of a server: one for each worker of another process, and one for the order of updates."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, final

import torch

from headway.core.errors import CommunicationError
from headway.parallel.flat_tensors import encode_state
from headway.parallel.pairs import Pair, ServerPairs
from headway.parallel.server import Event, LeadServer, Push, ShardServer, build_end_error

PULL, PUSH, STATE = 0.0, 1.0, 2.0
"""First number of a worker's message: it asks for weights, brings gradients, or asks for the state at the end."""
OVER, LEASE = 0.0, 1.0
"""First number of an answer: the segment is over and the state follows, or a step and its weights."""

LOG = logging.getLogger("headway.parallel")

EVENT_KINDS = ("apply", "give", "drop", "end")

State = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""Scalars (JSON) and tensors by name."""


T = TypeVar("T")


@final
class ServerHost:
    """Serves the workers of one segment.

    Args:
        server: this server's weights.
        lead: the order of updates, if this is server 0.
        pairs: connections to the other ranks; None: this process trains alone.
        collect_state: returns the state of this server; called once, when all updates are applied.
        events: on server 0: the queue of each follower, as given to `lead`.
    """

    def __init__(
        self,
        server: ShardServer,
        lead: LeadServer | None,
        pairs: ServerPairs | None,
        collect_state: Callable[[], State],
        events: dict[int, queue.SimpleQueue[Event]],
    ) -> None:
        self.server, self.lead, self._pairs, self._events = server, lead, pairs, events
        # One for all workers: what differs between two calls, such as newcomers, would let them do different things.
        self._state = _Once(collect_state)
        self._encoded = _Once(lambda: encode_state(*self._state.get()))
        self.error: BaseException | None = None
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        if pairs is None:
            return
        for worker, pair in pairs.to_workers.items():
            serve = self._serve_as_lead if lead is not None else self._serve_as_follower
            self._start(serve, worker, pair)
        for follower, pair in pairs.lead.items():
            if lead is not None:
                self._start(self._send_events, follower, pair)
            else:
                self._start(self._follow, follower, pair)

    def finish(self) -> None:
        """Waits until every worker has got its last answer."""
        for thread in self._threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """Ends all threads, after an error."""
        if self.lead is not None:
            self.lead.fail(build_end_error())
            self.lead.end()
        self._release()
        if self._pairs is not None and self._threads:
            self._pairs.abort()
        for thread in self._threads:
            thread.join()

    def collect_state(self) -> State:
        """Returns the state of this server, the same for all workers."""
        return self._state.get()

    def wait_until_over(self) -> None:
        """Waits until all updates are applied here."""
        if self.lead is None:
            self._is_over.wait()
        if self.error is not None:
            raise self.error

    def _start(self, run: Callable[[int, Pair], None], rank: int, pair: Pair) -> None:
        def guard() -> None:
            try:
                run(rank, pair)
            # The main thread raises it.
            except BaseException as error:
                self.error = self.error or error
                if self.lead is not None:
                    self.lead.fail(error)
                self._release()
                # Other ranks may wait for what this thread had to do.
                if self._pairs is not None:
                    self._pairs.abort()

        self._threads.append(threading.Thread(target=guard, name=f"server of {rank}", daemon=True))
        self._threads[-1].start()

    def _release(self) -> None:
        self._is_over.set()
        for outbox in self.server.outboxes.values():
            outbox.cancel()

    def _serve_as_lead(self, worker: int, pair: Pair) -> None:
        lead, server = self.lead, self.server
        assert lead is not None
        try:
            while True:
                kind, loss, bad, stops, *_ = pair.receive_numbers()
                push = None
                if kind == PUSH:
                    pair.receive(server.inboxes[worker].data)
                    push = Push(loss, int(bad), bool(stops))
                lease = lead.exchange(worker, push)
                if lease is None:
                    _send_state(pair, self._encoded.get())
                    return
                hint = -1 if lease.next is None else lease.next
                pair.send_numbers(LEASE, lease.step, lease.version, hint)
                pair.send(server.outboxes[worker].wait().data)
        # Only its connection is gone: the others go on, and its step is leased to one of them.
        except CommunicationError:
            # Without a server they do not.
            if lead.drop(worker) and worker not in self._events:
                LOG.warning(f"The connection to rank {worker} ended, and the others go on without it.")

    def _serve_as_follower(self, worker: int, pair: Pair) -> None:
        server = self.server
        with suppress(CommunicationError):
            while True:
                kind, *_ = pair.receive_numbers()
                if kind == STATE:
                    self.wait_until_over()
                    _send_state(pair, self._encoded.get())
                    return
                if kind == PUSH:
                    pair.receive(server.inboxes[worker].data)
                    # From here on the worker may tell the leader to apply it.
                    pair.send_numbers(PUSH)
                else:
                    pair.send(server.outboxes[worker].wait().data)

    def _send_events(self, follower: int, pair: Pair) -> None:
        while True:
            event = self._events[follower].get()
            pair.send_numbers(EVENT_KINDS.index(event.kind), event.worker, event.lr, event.is_stale)
            if event.kind == "end":
                return

    def _follow(self, follower: int, pair: Pair) -> None:
        while True:
            kind, worker, lr, is_stale, *_ = pair.receive_numbers()
            event = Event(EVENT_KINDS[int(kind)], int(worker), lr, bool(is_stale))
            if event.kind == "end":
                self._is_over.set()
                return
            self.server.handle(event)


@final
class _Once(Generic[T]):
    """A value that the first thread to ask for it builds."""

    def __init__(self, build: Callable[[], T]) -> None:
        self._build, self._lock = build, threading.Lock()
        self._values: list[T] = []

    def get(self) -> T:
        with self._lock:
            if not self._values:
                self._values.append(self._build())
            return self._values[0]


def _send_state(pair: Pair, data: torch.Tensor) -> None:
    pair.send_numbers(OVER, len(data))
    pair.send(data)
