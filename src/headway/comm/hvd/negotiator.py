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
from headway.comm.hvd.requests import ROWWISE_KINDS, Request, Response, collect_rows, find_disagreement
from headway.comm.hvd.settings import Settings
from headway.comm.hvd.timeline import Timeline
from headway.comm.messages import Message, read_int, read_text

LOG = logging.getLogger("headway.comm")

# Ranks submit named operations in any order and at any time. Operations that every rank of a process set has submitted
# are handed out to all of them, in one order; alike ones together, to share a buffer. All threads sleep until bytes
# come on a socket.

# One round of a set is transferred while the other is copied. Operations that become ready meanwhile wait, and then
# share larger buffers.
MAX_PENDING_ROUNDS = 2

# In a warning, for each rank.
MAX_LISTED_NAMES = 6

GLOBAL_SET_ID = 0


@final
class _NegotiatedSet:
    """State of a process set.

    Attributes:
        members: its ranks.
        requests_by_name: requests of operations that were not handed out yet, by name and rank.
        request_times: time (`monotonic`) of the first request of each name.
        ready_names: names that all ranks have requested; a dict as an ordered set.
        pending_rounds: number of rounds under way.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.requests_by_name: dict[str, dict[int, Request]] = {}
        self.request_times: dict[str, float] = {}
        self.ready_names: dict[str, None] = {}
        self.pending_rounds = 0

    @property
    def can_start_round(self) -> bool:
        return bool(self.ready_names) and self.pending_rounds < MAX_PENDING_ROUNDS

    def list_incomplete(self) -> list[str]:
        """Returns the names that only some of the ranks have requested."""
        return [name for name in self.requests_by_name if name not in self.ready_names]


@final
class Negotiator:
    """Serves the ranks, in a thread of its own, until all have ended.

    Args:
        connections: the connection to each rank, rank 0 included.
        settings: limits and timeouts.
        timeline: records requests and agreements.
        choose_algorithm: returns the algorithm for a sum of so many bytes over all ranks.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        settings: Settings,
        timeline: Timeline,
        choose_algorithm: Callable[[int], str],
    ) -> None:
        self._connections, self._settings = dict(connections), settings
        self._timeline, self._choose_algorithm = timeline, choose_algorithm
        self._sets: dict[int, _NegotiatedSet] = {GLOBAL_SET_ID: _NegotiatedSet(sorted(connections))}
        self._joined_ranks: list[int] = []
        self._ended_ranks: set[int] = set()
        self._is_stopping = self._has_failed = False
        self._next_round_s = self._next_stall_check_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="headway-hvd-negotiator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the ranks have ended, or should have."""
        for connection in self._connections.values():
            connection.hang_up()
        self._thread.join()

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for rank, connection in self._connections.items():
                    selector.register(connection, selectors.EVENT_READ, rank)
                while len(self._ended_ranks) < len(self._connections):
                    self._serve_once(selector)
            self._send_to_all("over")
        # BaseException: all ranks wait for this thread, whatever the error is.
        except BaseException as error:
            self._fail(f"the negotiator on rank 0 failed: {error!r}")
            raise
        finally:
            for connection in self._connections.values():
                connection.close()

    def _serve_once(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(self._compute_timeout_s()):
            messages = self._connections[key.data].receive()
            if messages is None:
                selector.unregister(key.fileobj)
                self._handle_disconnect(key.data)
            for message in messages or ():
                try:
                    self._handle_message(key.data, message)
                except ValueError as error:
                    self._fail(f"rank {key.data} sent an invalid message ({error})")
        if not self._is_stopping:
            self._hand_out()
            self._check_stalls()

    def _compute_timeout_s(self) -> float | None:
        """Returns the time until the next round, if something is ready, or until the next stall check."""
        if self._is_stopping:
            return None
        deadlines_s = []
        if self._settings.stall_s and any(process_set.requests_by_name for process_set in self._sets.values()):
            deadlines_s.append(self._next_stall_check_s)
        if any(process_set.can_start_round for process_set in self._sets.values()):
            deadlines_s.append(self._next_round_s)
        return max(0.0, min(deadlines_s) - monotonic()) if deadlines_s else None

    def _handle_message(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "request" and not self._is_stopping:
            self._handle_request(rank, Request.from_fields(message.get("request")))
        elif kind == "done":
            process_set = self._sets.get(read_int(message, "process_set"))
            if process_set is not None:
                process_set.pending_rounds -= 1
        elif kind == "stop" and not self._is_stopping:
            self._is_stopping = True
            self._send_to_all("stop")
        elif kind == "fail":
            self._fail(read_text(message, "why"))
        elif kind == "ended":
            self._ended_ranks.add(rank)

    def _handle_disconnect(self, rank: int) -> None:
        if rank not in self._ended_ranks:
            self._ended_ranks.add(rank)
            self._fail(f"rank {rank} is lost: its connection ended")

    def _fail(self, reason: str) -> None:
        # Only the first reason counts: the others follow from it.
        if not self._has_failed:
            self._is_stopping = self._has_failed = True
            self._send_to_all("fail", why=reason)

    def _send_to_all(self, kind: str, **fields: Any) -> None:
        # Rank 0 last: this message may make it end this process.
        for rank in sorted(self._connections, reverse=True):
            self._connections[rank].send(kind, **fields)

    def _handle_request(self, rank: int, request: Request) -> None:
        if request.kind == "add_set" and (not request.splits or not set(request.splits) <= self._connections.keys()):
            raise ValueError("a process set of ranks that are none")
        if request.kind == "remove_set" and request.root == GLOBAL_SET_ID:
            raise ValueError("the process set of all ranks cannot be removed")
        if request.kind == "join":
            self._joined_ranks.append(rank)
        process_set = self._sets.get(request.process_set)
        # Removed meanwhile; the rank that asked has been told so.
        if process_set is None:
            return
        requests = process_set.requests_by_name.setdefault(request.name, {})
        if not requests:
            process_set.request_times[request.name] = monotonic()
        requests[rank] = request
        self._timeline.record_request(request.name, rank)
        # A rank that joins excuses itself from everything that others wait for.
        for name in process_set.list_incomplete() if request.kind == "join" else [request.name]:
            if self._is_ready(process_set, name):
                self._timeline.record_agreement(name, _get_first(process_set.requests_by_name[name]).kind)
                process_set.ready_names[name] = None

    def _is_ready(self, process_set: _NegotiatedSet, name: str) -> bool:
        # Ranks that have joined are excused; join itself waits for all.
        requests = process_set.requests_by_name[name]
        excused = () if _get_first(requests).kind == "join" else self._list_joined(process_set)
        return all(rank in requests or rank in excused for rank in process_set.members)

    def _list_joined(self, process_set: _NegotiatedSet) -> list[int]:
        return self._joined_ranks if process_set is self._sets[GLOBAL_SET_ID] else []

    def _hand_out(self) -> None:
        """Sends the operations that all ranks have requested to the ranks, if the next round is due."""
        # HOROVOD_CYCLE_TIME is the least time between rounds: more operations become ready, and share buffers.
        now = monotonic()
        if now < self._next_round_s:
            return
        for set_id, process_set in list(self._sets.items()):
            if not process_set.can_start_round:
                continue
            self._next_round_s = now + self._settings.cycle_s
            self._timeline.record_cycle()
            ready_names, process_set.ready_names = list(process_set.ready_names), {}
            for names, error in self._fuse(process_set, ready_names):
                process_set.pending_rounds += 1
                response = self._build_response(set_id, process_set, names, error)
                for rank in process_set.members:
                    self._connections[rank].send("go", response=response.to_fields())

    def _fuse(self, process_set: _NegotiatedSet, ready_names: Sequence[str]) -> list[tuple[list[str], str]]:
        """Groups names that share a buffer of at most `fusion_bytes`. Returns (names, error) of each group.

        A name on which the ranks disagree is alone, with the error.
        """
        groups: list[tuple[list[str], str]] = []
        open_groups: dict[tuple[Any, ...], tuple[list[str], int]] = {}
        for name in ready_names:
            request = _get_first(process_set.requests_by_name[name])
            error = find_disagreement(process_set.requests_by_name[name], bool(self._list_joined(process_set)))
            names, nbytes = open_groups.get(request.fusion_key, ([], 0))
            if error or not names or nbytes + request.nbytes > self._settings.fusion_bytes:
                names, nbytes = [], 0
                groups.append((names, error))
            names.append(name)
            if not error:
                open_groups[request.fusion_key] = names, nbytes + request.nbytes
        return groups

    def _build_response(self, set_id: int, process_set: _NegotiatedSet, names: Sequence[str], error: str) -> Response:
        """Builds the response for names that are executed together, and forgets their requests."""
        all_requests = [process_set.requests_by_name.pop(name) for name in names]
        for name in names:
            del process_set.request_times[name]
        first_requests = [_get_first(requests) for requests in all_requests]
        first = first_requests[0]
        response = Response(set_id, first.kind, tuple(names), error)
        if error:
            return response
        if first.kind == "join":
            last_rank = self._joined_ranks[-1] if self._joined_ranks else first.root
            self._joined_ranks = []
            return replace(response, value=last_rank)
        if first.kind == "add_set":
            return replace(response, value=self._add_set(first.splits))
        if first.kind == "remove_set":
            self._sets.pop(first.root, None)
        if first.kind in ROWWISE_KINDS:
            rows = tuple(collect_rows(requests, process_set.members) for requests in all_requests)
            response = replace(response, rows=rows)
        if self._list_joined(process_set):
            response = replace(response, like=tuple(first_requests))
        return replace(response, algorithm=self._choose_algorithm(sum(request.nbytes for request in first_requests)))

    def _add_set(self, members: Sequence[int]) -> int:
        # The smallest free id: ids of removed sets are used again.
        set_id = next(number for number in range(1, len(self._sets) + 1) if number not in self._sets)
        self._sets[set_id] = _NegotiatedSet(members)
        return set_id

    def _check_stalls(self) -> None:
        """Warns of operations that some ranks have not requested for `stall_s`; fails after `stall_shutdown_s`."""
        stall_s, shutdown_s, now = self._settings.stall_s, self._settings.stall_shutdown_s, monotonic()
        if stall_s is None or now < self._next_stall_check_s:
            return
        self._next_stall_check_s = now + stall_s
        missing_names: dict[int, list[str]] = {}
        max_wait_s = 0.0
        for process_set in self._sets.values():
            for name in process_set.list_incomplete():
                requests, wait_s = process_set.requests_by_name[name], now - process_set.request_times[name]
                # Ranks may wait in join as long as the others train.
                if wait_s < stall_s or _get_first(requests).kind == "join":
                    continue
                max_wait_s = max(max_wait_s, wait_s)
                for rank in set(process_set.members) - requests.keys() - set(self._list_joined(process_set)):
                    missing_names.setdefault(rank, []).append(name)
        if not missing_names:
            return
        lacking = "; ".join(
            f"rank {rank} lacks {_format_names(names)}" for rank, names in sorted(missing_names.items())
        )
        text = f"for {max_wait_s:.0f} s some ranks have waited for operations that others have not submitted: {lacking}"
        LOG.warning("%s. Check that all ranks take the same way through the program.", text)
        if shutdown_s is not None and max_wait_s >= shutdown_s:
            self._fail(text)


def _get_first(requests: Mapping[int, Request]) -> Request:
    return next(iter(requests.values()))


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more
