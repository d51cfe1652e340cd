"""Connections of asynchronous training: a group of two ranks for each pair of a server and a worker.

A lost worker breaks its own connections and no other, so the rest goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headway.core.group import Group
from headway.core.world import World

HEADER_NUMBERS = 8

NO_TIMEOUT_S = 10 * 365 * 86400.0
"""A wait for another rank may last: for a slow step, for slower ranks, for the end of a segment. A rank that is gone
breaks its connections, and one that is silent is dropped once the launcher has declared it lost."""
SEND_S, SLOWEST_BYTES_S = 60.0, 1e6
"""A thread of the other rank waits for whatever is sent, so that only the network takes time. Without a limit, a send
would not end if its connection broke in the moment in which it began: Gloo then forgets it."""


@final
class Pair:
    """The connection to one other rank. One thread uses it at a time."""

    def __init__(self, group: Group) -> None:
        self._group, self._other = group, 1 - group.rank

    def send(self, tensor: Tensor) -> None:
        """Sends a tensor that the other rank is about to receive. Raises CommunicationError if that rank is gone."""
        self._group.send(tensor, self._other, timeout_s=SEND_S + tensor.nbytes / SLOWEST_BYTES_S).wait()

    def receive(self, into: Tensor) -> None:
        """Receives a tensor of known shape. Raises CommunicationError if the other rank is gone."""
        self._group.recv(into, self._other).wait()

    def send_numbers(self, *numbers: float) -> None:
        """Sends up to HEADER_NUMBERS numbers; whole ones are exact below 2^53."""
        self.send(torch.tensor([*numbers, *(0.0,) * (HEADER_NUMBERS - len(numbers))], dtype=torch.float64))

    def receive_numbers(self) -> list[float]:
        """Receives HEADER_NUMBERS numbers."""
        numbers = torch.empty(HEADER_NUMBERS, dtype=torch.float64)
        self.receive(numbers)
        return list(map(float, numbers))

    def abort(self) -> None:
        """Ends the connection; a thread that waits in it gets an error."""
        self._group.interrupt(self._other)


@final
@dataclass(frozen=True)
class ServerPairs:
    """The connections of this rank. Ranks 0 to `servers` - 1 are servers, and every rank is a worker.

    Attributes:
        servers: number of servers.
        rank, size: this rank and the number of ranks.
        to_servers: the connection as a worker to each server; this rank itself is absent.
        to_workers: the connection as a server to each worker.
        lead: the connection of the leader with each follower, for the order of updates.
    """

    servers: int
    rank: int
    size: int
    to_servers: dict[int, Pair]
    to_workers: dict[int, Pair]
    lead: dict[int, Pair]

    @staticmethod
    def connect(world: World, servers: int) -> ServerPairs:
        """Connects the ranks of a world. Every rank calls it with the same number of servers, at most that of ranks."""
        pairs = ServerPairs(servers, world.rank, world.size, {}, {}, {})

        def connect(ranks: tuple[int, int], name: str) -> Pair:
            return Pair(world.create_group(ranks, name=name, backend="gloo", timeout_s=NO_TIMEOUT_S))

        # In one order on all ranks: a group of two is built while both are at it.
        for server in range(servers):
            for worker in range(world.size):
                if server != worker and world.rank in (server, worker):
                    pair = connect((server, worker), "server")
                    if world.rank == server:
                        pairs.to_workers[worker] = pair
                    else:
                        pairs.to_servers[server] = pair
        for follower in range(1, servers):
            if world.rank in (0, follower):
                pairs.lead[follower] = connect((0, follower), "order of updates")
        return pairs

    def drop(self, worker: int) -> None:
        """Ends the connections with a rank that is lost; its threads then see that it is gone."""
        for pairs in (self.to_workers, self.to_servers, self.lead):
            if worker in pairs:
                pairs[worker].abort()

    def abort(self) -> None:
        """Ends all connections."""
        for pair in (*self.to_workers.values(), *self.to_servers.values(), *self.lead.values()):
            pair.abort()
