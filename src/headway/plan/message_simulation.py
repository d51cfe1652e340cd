"""A collective, or the exchange of a whole step, message by message: what each rank sends, and what it waits for.
Written apart from the closed forms of `headway.core.collectives`, to check them and to see what they leave out.

A message occupies its way for n / bandwidth and arrives a latency later; of messages that wait for a way the one that
was named first goes next, and one that waits for another way holds up no other.
Inside a host each rank has a way out of its own; what leaves a host shares the host's way out, and what comes its way
in. A rank adds one array at a time.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from headway.core.collectives import Algorithm, Link, Network
from headway.core.errors import UsageError

MAX_RANKS = 64
"""Messages grow with their square."""
MAX_CHUNKS = 256
"""Of a double tree."""
READY, FREED = 0, 1
"""Events: a message could be sent; its ways are free again."""


@final
@dataclass
class Message:
    """Attributes: after: numbers of the messages that have to be there before it is sent. adds: whether its receiver
    adds it to what it has, before it counts as there."""

    number: int
    sender: int
    receiver: int
    nbytes: float
    adds: bool
    after: list[int] = field(default_factory=list)


@final
class MessageSchedule:
    """Messages in the order in which they are named; each waits for some before it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add_message(self, sender: int, receiver: int, nbytes: float, after: Sequence[int], *, adds: bool) -> int:
        """Its number."""
        number = len(self.messages)
        self.messages.append(Message(number, sender, receiver, nbytes, adds, list(after)))
        return number

    def add_ring(
        self, ranks: Sequence[int], nbytes: float, after: dict[int, list[int]], *, sums: bool
    ) -> dict[int, list[int]]:
        """One turn around a ring of ranks: reduce-scatter if `sums`, else all-gather; each has a part of the bytes.

        Args:
            after: rank -> messages that it has to have before it begins.

        Returns:
            rank -> messages after which it is done.
        """
        count = len(ranks)
        last = {rank: list(after.get(rank, [])) for rank in ranks}
        for _ in range(count - 1):
            sent = {}
            for place, rank in enumerate(ranks):
                to = ranks[(place + 1) % count]
                sent[to] = self.add_message(rank, to, nbytes / count, last[rank], adds=sums)
            last = {rank: [sent[rank]] for rank in ranks}
        return last

    def add_tree(self, edges: Sequence[tuple[int, int]], nbytes: float) -> None:
        """Sums go up a tree to its root, and the result comes down.

        Args:
            edges: (child, parent) of all ranks but the root; a parent's own comes before those of its children.
        """
        have = defaultdict[int, list[int]](list)
        for child, parent in reversed(edges):
            have[parent].append(self.add_message(child, parent, nbytes, have[child], adds=True))
        for child, parent in edges:
            have[child] = [self.add_message(parent, child, nbytes, have[parent], adds=False)]


def schedule_messages(algorithm: Algorithm, nbytes: float, network: Network) -> MessageSchedule:
    """Messages of an all-reduce, ranks host by host.

    Raises:
        UsageError: it is none of `ring`, `tree`, `double_tree` and `two_dimensional`, or there are too many ranks.
    """
    if network.ranks > MAX_RANKS:
        raise UsageError(f"messages are simulated one by one for up to {MAX_RANKS} ranks, not {network.ranks}")
    schedule, per_host = MessageSchedule(), network.ranks_per_host
    ranks = list(range(network.ranks))
    hosts = [ranks[begin : begin + per_host] for begin in range(0, len(ranks), per_host)]
    if network.ranks == 1:
        return schedule
    if algorithm == "ring":
        _add_ring_all_reduce(schedule, ranks, nbytes, {})
    elif algorithm == "tree":
        schedule.add_tree(_build_binomial_edges(ranks), nbytes)
    elif algorithm == "double_tree":
        chunks, trees = _count_chunks(nbytes, network), [_build_binary_edges(hosts, shift) for shift in (0, 1)]
        for _ in range(chunks):
            for edges in trees:
                schedule.add_tree(edges, nbytes / 2 / chunks)
    elif algorithm == "two_dimensional":
        have = dict[int, list[int]]()
        for host in hosts:
            have |= schedule.add_ring(host, nbytes, {}, sums=True)
        for column in zip(*hosts, strict=True):
            have |= _add_ring_all_reduce(schedule, column, nbytes / per_host, have)
        for host in hosts:
            schedule.add_ring(host, nbytes, have, sums=False)
    else:
        raise UsageError(f"{algorithm} is not simulated message by message")
    return schedule


def _build_binomial_edges(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(child, parent) of a binomial tree in the ranks' order, the farthest first."""
    edges, distance = list[tuple[int, int]](), 1 << (len(ranks) - 1).bit_length()
    while distance := distance // 2:
        edges += [(ranks[at + distance], ranks[at]) for at in range(0, len(ranks) - distance, 2 * distance)]
    return edges


def _build_binary_edges(hosts: Sequence[Sequence[int]], shift: int) -> list[tuple[int, int]]:
    """(child, parent) of a binary tree over hosts in order, whose leaves are every second one; and inside each of a
    binary tree under its first rank.

    Sanders, Speck and Traeff 2009: with an even number of hosts the one that is shifted by one has its leaves where the
    first has inner nodes, so that each host sends about as much as any other.
    """
    heads = [hosts[(place + shift) % len(hosts)][0] for place in range(len(hosts))]
    edges = list[tuple[int, int]]()
    spans: list[tuple[int, int, int | None]] = [(1, len(heads), None)]  # from one place to another, counted from 1
    for first, last, parent in spans:
        middle = first - 1 + (1 << ((last - first + 1).bit_length() - 1))  # the largest power of two among them
        if parent is not None:
            edges.append((heads[middle - 1], parent))
        sides = ((first, middle - 1), (middle + 1, last))
        spans += [(begin, end, heads[middle - 1]) for begin, end in sides if begin <= end]
    for host in hosts:
        edges += [(host[place], host[(place - 1) // 2]) for place in range(1, len(host))]
    return edges


def _count_chunks(nbytes: float, network: Network) -> int:
    """As many as weigh a chunk's latency against what the first one delays: sqrt(D n b / a)."""
    link, count = (network.between, network.hosts) if network.hosts > 1 else (network.inside, network.ranks)
    if not link.latency_s:
        return MAX_CHUNKS
    best = math.sqrt((count - 1).bit_length() * nbytes / link.bandwidth_bytes_s / link.latency_s)
    return min(max(1, round(best)), MAX_CHUNKS)


def _find_route(message: Message, network: Network) -> tuple[Link, list[tuple[str, int]]]:
    """The link that a message takes, and the ways that it occupies."""
    source, target = (rank // network.ranks_per_host for rank in (message.sender, message.receiver))
    if source == target:
        return network.inside, [("out", message.sender)]
    return network.between, [("host out", source), ("host in", target)]


def _add_ring_all_reduce(
    schedule: MessageSchedule, ranks: Sequence[int], nbytes: float, after: dict[int, list[int]]
) -> dict[int, list[int]]:
    """An all-reduce by a ring."""
    if len(ranks) == 1:
        return {rank: after.get(rank, []) for rank in ranks}
    return schedule.add_ring(ranks, nbytes, schedule.add_ring(ranks, nbytes, after, sums=True), sums=False)


@final
@dataclass(frozen=True)
class SentMessage:
    """Seconds since the beginning. Attributes: begins, ends: of a message on its way. done: it is there, and added."""

    message: Message
    begins: float
    ends: float
    done: float


def simulate_messages(
    schedule: MessageSchedule, network: Network, *, begins: Mapping[int, float] | None = None
) -> list[SentMessage]:
    """When each message is sent, in their order.

    Args:
        begins: rank -> seconds after which it has what it sums up; default: 0 of all.
    """
    begins, routes = begins or {}, [_find_route(message, network) for message in schedule.messages]
    free, adder = defaultdict[tuple[str, int], float](float), defaultdict[int, float](float)
    left = [len(message.after) for message in schedule.messages]
    wanted = defaultdict[int, list[int]](list)
    for message in schedule.messages:
        for before in message.after:
            wanted[before].append(message.number)
    ready = [begins.get(message.sender, 0.0) for message in schedule.messages]
    events: list[tuple[float, int, int]] = [
        (ready[number], number, READY) for number, count in enumerate(left) if not count
    ]
    heapq.heapify(events)
    waiting = defaultdict[tuple[str, int], list[int]](list)
    found: dict[int, SentMessage] = {}

    def begin(number: int, at: float) -> None:
        """Sends it, if its ways are free; else it waits for the one that is busy longest, and others may pass it."""
        message, (link, ways) = schedule.messages[number], routes[number]
        busy = max(ways, key=lambda way: free[way])
        if free[busy] > at:
            heapq.heappush(waiting[busy], number)
            return
        taken = message.nbytes / link.bandwidth_bytes_s
        for way in ways:
            free[way] = at + taken
        heapq.heappush(events, (at + taken, number, FREED))
        ends = done = at + taken + link.latency_s
        if message.adds:
            own = begins.get(message.receiver, 0.0)
            done = max(ends, adder[message.receiver], own) + message.nbytes / network.reduce_bytes_s
            adder[message.receiver] = done
        found[number] = SentMessage(message, at, ends, done)
        for after in wanted[number]:
            ready[after] = max(ready[after], done)
            left[after] -= 1
            if not left[after]:
                heapq.heappush(events, (ready[after], after, READY))

    while events:
        at, number, kind = heapq.heappop(events)
        if kind == READY:
            begin(number, at)
            continue
        for way in routes[number][1]:
            while waiting[way] and free[way] <= at:
                begin(heapq.heappop(waiting[way]), at)
    return [found[number] for number in range(len(schedule.messages))]


def simulate_all_reduce(algorithm: Algorithm, nbytes: float, network: Network) -> float:
    """Of one all-reduce with nothing beside it."""
    return max(
        (one.done for one in simulate_messages(schedule_messages(algorithm, nbytes, network), network)), default=0.0
    )


@final
@dataclass(frozen=True)
class ExchangeTimeline:
    """Seconds since a step's beginning. Attributes: done: of each bucket, when the last rank has its sum. ends: of each
    rank, when it has all sums."""

    done: list[float]
    ends: list[float]


def simulate_exchange(
    algorithm: Algorithm, nbytes: Sequence[float], ready: Sequence[Sequence[float]], network: Network
) -> ExchangeTimeline:
    """Buckets one after the other: a rank begins with one as soon as it is full there and the one before is done there.

    Args:
        nbytes: of each bucket, in the order in which they are exchanged.
        ready: for each bucket, of each rank: seconds after which it is full.
    """
    free = [0.0] * network.ranks
    done = []
    for size, full in zip(nbytes, ready, strict=True):
        schedule = schedule_messages(algorithm, size, network)
        begins = {rank: max(free[rank], full[rank]) for rank in range(network.ranks)}
        free = [begins[rank] for rank in range(network.ranks)]
        for one in simulate_messages(schedule, network, begins=begins):
            free[one.message.receiver] = max(free[one.message.receiver], one.done)
            link, _ = _find_route(one.message, network)
            free[one.message.sender] = max(free[one.message.sender], one.ends - link.latency_s)
        done.append(max(free))
    return ExchangeTimeline(done, free)
