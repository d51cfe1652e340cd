"""The negotiator: a thread of rank 0 that collects the requests of all ranks, and tells them what to execute."""

from __future__ import annotations

import logging
import selectors
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, final

from headway.comm.hvd.connection import Connection
from headway.comm.hvd.requests import ROWWISE, Request, Response, collect_rows, find_disagreement
from headway.comm.hvd.settings import Settings
from headway.comm.hvd.timeline import Timeline
from headway.comm.messages import Message, read_int, read_text

LOG = logging.getLogger("headway.comm")

# Ranks submit named operations in any order and at any time. Operations that every rank of a process set has submitted
# are handed out to all of them, in one order; alike ones together, to share a buffer. All threads sleep until bytes
# come on a socket.

# Most rounds of a set under way: one is transferred while the other is copied. Operations that become ready meanwhile
# wait, and then share larger buffers.
ROUNDS_UNDER_WAY = 2

# Tensors that a warning names for each rank.
NAMES_SHOWN = 6

# The id of the process set of all ranks.
ALL = 0


@final
class _NegotiatedSet:
    def __init__(self, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.asked: dict[str, dict[int, Request]] = {}
        self.since: dict[str, float] = {}
        # A dict as an ordered set.
        self.ready: dict[str, None] = {}
        self.under_way = 0

    def list_waiting(self) -> list[str]:
        # The names that only some of the ranks have submitted.
        return [name for name in self.asked if name not in self.ready]


@final
class Negotiator:
    """Serves the ranks until all have ended.

    Args:
        ranks: the connection to each rank, its own included.
        algorithm: bytes of a sum over all ranks -> algorithm.
    """

    def __init__(
        self, ranks: Mapping[int, Connection], settings: Settings, timeline: Timeline, algorithm: Callable[[int], str]
    ) -> None:
        self._ranks, self._settings, self._timeline, self._algorithm = dict(ranks), settings, timeline, algorithm
        self._sets: dict[int, _NegotiatedSet] = {ALL: _NegotiatedSet(sorted(ranks))}
        self._joined: list[int] = []
        self._ended: set[int] = set()
        self._over = self._failed = False
        self._next_round_s = self._next_stall_check_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="headway-hvd-negotiator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the ranks have ended, or should have."""
        for connection in self._ranks.values():
            connection.hang_up()
        self._thread.join()

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for rank, connection in self._ranks.items():
                    selector.register(connection, selectors.EVENT_READ, rank)
                while len(self._ended) < len(self._ranks):
                    self._serve_once(selector)
            self._tell_all("over")
        # BaseException: all ranks wait for this thread, whatever the error is.
        except BaseException as error:
            self._fail(f"the negotiator on rank 0 failed: {error!r}")
            raise
        finally:
            for connection in self._ranks.values():
                connection.close()

    def _serve_once(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(self._compute_timeout_s()):
            messages = self._ranks[key.data].receive()
            if messages is None:
                selector.unregister(key.fileobj)
                self._handle_disconnect(key.data)
            for message in messages or ():
                try:
                    self._handle_message(key.data, message)
                except ValueError as error:
                    self._fail(f"rank {key.data} sent an invalid message ({error})")
        if not self._over:
            self._hand_out()
            self._check_stalls()

    def _compute_timeout_s(self) -> float | None:
        # Wait for messages until the next round, if something is ready, or until the next stall check.
        if self._over:
            return None
        checks_stalls = self._settings.stall_s and any(one.asked for one in self._sets.values())
        until = [self._next_stall_check_s] if checks_stalls else []
        if any(one.ready and one.under_way < ROUNDS_UNDER_WAY for one in self._sets.values()):
            until.append(self._next_round_s)
        return max(0.0, min(until) - monotonic()) if until else None

    def _handle_message(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "request" and not self._over:
            self._handle_request(rank, Request.from_fields(message.get("request")))
        elif kind == "done":
            one = self._sets.get(read_int(message, "process_set"))
            if one is not None:
                one.under_way -= 1
        elif kind == "stop" and not self._over:
            self._over = True
            self._tell_all("stop")
        elif kind == "fail":
            self._fail(read_text(message, "why"))
        elif kind == "ended":
            self._ended.add(rank)

    def _handle_disconnect(self, rank: int) -> None:
        if rank not in self._ended:
            self._ended.add(rank)
            self._fail(f"rank {rank} is lost: its connection ended")

    def _fail(self, why: str) -> None:
        # Only the first reason counts: the others follow from it.
        if not self._failed:
            self._over = self._failed = True
            self._tell_all("fail", why=why)

    def _tell_all(self, kind: str, **fields: Any) -> None:
        # Rank 0 last: this message may make it end this process.
        for rank in sorted(self._ranks, reverse=True):
            self._ranks[rank].send(kind, **fields)

    def _handle_request(self, rank: int, request: Request) -> None:
        if request.kind == "add_set" and (not request.splits or not set(request.splits) <= self._ranks.keys()):
            raise ValueError("a process set of ranks that are none")
        if request.kind == "remove_set" and request.root == ALL:
            raise ValueError("the process set of all ranks cannot be removed")
        if request.kind == "join":
            self._joined.append(rank)
        one = self._sets.get(request.process_set)
        # Removed meanwhile; the rank that asked has been told so.
        if one is None:
            return
        asked = one.asked.setdefault(request.name, {})
        if not asked:
            one.since[request.name] = monotonic()
        asked[rank] = request
        self._timeline.record_request(request.name, rank)
        # A rank that joins excuses itself from everything that others wait for.
        for name in one.list_waiting() if request.kind == "join" else [request.name]:
            if self._is_ready(one, name):
                self._timeline.record_agreement(name, _get_first(one.asked[name]).kind)
                one.ready[name] = None

    def _is_ready(self, one: _NegotiatedSet, name: str) -> bool:
        # Ranks that have joined are excused; join itself waits for all.
        asked = one.asked[name]
        excused = () if _get_first(asked).kind == "join" else self._list_joined(one)
        return all(rank in asked or rank in excused for rank in one.members)

    def _list_joined(self, one: _NegotiatedSet) -> list[int]:
        return self._joined if one is self._sets[ALL] else []

    def _hand_out(self) -> None:
        # HOROVOD_CYCLE_TIME is the least time between rounds: more operations become ready, and share buffers.
        now = monotonic()
        if now < self._next_round_s:
            return
        for number, one in list(self._sets.items()):
            if not one.ready or one.under_way >= ROUNDS_UNDER_WAY:
                continue
            self._next_round_s = now + self._settings.cycle_s
            self._timeline.record_cycle()
            names, one.ready = list(one.ready), {}
            for batch, error in self._fuse(one, names):
                one.under_way += 1
                response = self._build_response(number, one, batch, error)
                for rank in one.members:
                    self._ranks[rank].send("go", response=response.to_fields())

    def _fuse(self, one: _NegotiatedSet, names: Sequence[str]) -> list[tuple[list[str], str]]:
        # Alike names share a buffer of at most `fusion_bytes`; a name on which the ranks disagree fails alone.
        batches: list[tuple[list[str], str]] = []
        open_ones: dict[tuple[Any, ...], tuple[list[str], int]] = {}
        for name in names:
            request = _get_first(one.asked[name])
            error = find_disagreement(one.asked[name], bool(self._list_joined(one)))
            batch, nbytes = open_ones.get(request.fusion_key, ([], 0))
            if error or not batch or nbytes + request.nbytes > self._settings.fusion_bytes:
                batch, nbytes = [], 0
                batches.append((batch, error))
            batch.append(name)
            if not error:
                open_ones[request.fusion_key] = batch, nbytes + request.nbytes
        return batches

    def _build_response(self, number: int, one: _NegotiatedSet, names: Sequence[str], error: str) -> Response:
        asked = [one.asked.pop(name) for name in names]
        for name in names:
            del one.since[name]
        first = _get_first(asked[0])
        response = Response(number, first.kind, tuple(names), error)
        if error:
            return response
        if first.kind == "join":
            last, self._joined = self._joined[-1] if self._joined else first.root, []
            return replace(response, value=last)
        if first.kind == "add_set":
            return replace(response, value=self._add_set(first.splits))
        if first.kind == "remove_set":
            self._sets.pop(first.root, None)
        if first.kind in ROWWISE:
            response = replace(response, rows=tuple(collect_rows(requests, one.members) for requests in asked))
        if self._list_joined(one):
            response = replace(response, like=tuple(map(_get_first, asked)))
        return replace(response, algorithm=self._algorithm(sum(_get_first(requests).nbytes for requests in asked)))

    def _add_set(self, members: Sequence[int]) -> int:
        # The smallest free id: ids of removed sets are used again.
        number = next(number for number in range(1, len(self._sets) + 1) if number not in self._sets)
        self._sets[number] = _NegotiatedSet(members)
        return number

    def _check_stalls(self) -> None:
        # Warn of operations that some ranks have not submitted for `stall_s`; end the job after `stall_shutdown_s`.
        patience_s, limit_s, now = self._settings.stall_s, self._settings.stall_shutdown_s, monotonic()
        if patience_s is None or now < self._next_stall_check_s:
            return
        self._next_stall_check_s = now + patience_s
        missing: dict[int, list[str]] = {}
        longest_s = 0.0
        for one in self._sets.values():
            for name in one.list_waiting():
                waiting_s = now - one.since[name]
                # Ranks may wait in join as long as the others train.
                if waiting_s < patience_s or _get_first(one.asked[name]).kind == "join":
                    continue
                longest_s = max(longest_s, waiting_s)
                for rank in set(one.members) - set(one.asked[name]) - set(self._list_joined(one)):
                    missing.setdefault(rank, []).append(name)
        if not missing:
            return
        lacking = "; ".join(f"rank {rank} lacks {_format_names(names)}" for rank, names in sorted(missing.items()))
        text = f"for {longest_s:.0f} s some ranks have waited for operations that others have not submitted: {lacking}"
        LOG.warning("%s. Check that all ranks take the same way through the program.", text)
        if limit_s is not None and longest_s >= limit_s:
            self._fail(text)


def _get_first(asked: Mapping[int, Request]) -> Request:
    return next(iter(asked.values()))


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
