"""Message-by-message simulation of an all-reduce, or of the whole exchange of a step.

Written apart from the closed forms of `headway.core.collectives`, to check them and to show their omissions.

A message occupies its path for bytes / bandwidth and arrives one latency later. Of the messages that wait for a path,
the one scheduled first goes next; a message that waits for another path blocks no others. Inside a host each rank has
its own outgoing path; messages between hosts share one path out of a host and one into it. A rank adds one array at a
time.
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

# The number of messages grows with the square of the ranks.
MAX_RANKS = 64
# Most chunks of a double tree.
MAX_CHUNKS = 256
# Events: a message could be sent; its paths are free again.
READY, FREED = 0, 1


@final
@dataclass
class Message:
    """One message between two ranks."""

    number: int
    sender: int
    receiver: int
    nbytes: float
    # True if the receiver adds it to its own values before it counts as complete.
    adds: bool
    # Numbers of the messages that must be complete before it is sent.
    after: list[int] = field(default_factory=list)


@final
class MessageSchedule:
    """Messages of an algorithm in scheduling order. Each waits for some of those before it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add_message(self, sender: int, receiver: int, nbytes: float, after: Sequence[int], *, adds: bool) -> int:
        """Add a message and return its number."""
        number = len(self.messages)
        self.messages.append(Message(number, sender, receiver, nbytes, adds, list(after)))
        return number

    def add_ring(
        self, ranks: Sequence[int], nbytes: float, after: dict[int, list[int]], *, sums: bool
    ) -> dict[int, list[int]]:
        """Add one turn around a ring: a reduce-scatter if `sums`, else an all-gather.

        Args:
            after: for each rank, messages that it must have before it begins.

        Returns:
            For each rank, the messages after which it is done.
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
        """Add a reduction up a tree and a broadcast down.

        Args:
            edges: (child, parent) of all ranks but the root; a parent's own edge comes before those of its children.
        """
        have = defaultdict[int, list[int]](list)
        for child, parent in reversed(edges):
            have[parent].append(self.add_message(child, parent, nbytes, have[child], adds=True))
        for child, parent in edges:
            have[child] = [self.add_message(parent, child, nbytes, have[parent], adds=False)]


def schedule_messages(algorithm: Algorithm, nbytes: float, network: Network) -> MessageSchedule:
    """Schedule the messages of an all-reduce whose ranks are numbered host by host.

    Raises:
        UsageError: the algorithm is not `ring`, `tree`, `double_tree` or `two_dimensional`, or there are too many
            ranks.
    """
    if network.ranks > MAX_RANKS:
        raise UsageError(f"a message simulation covers up to {MAX_RANKS} ranks, not {network.ranks}")
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
        # Half of each chunk goes through either tree, so that every host both receives and sends at full rate.
        chunks, trees = _count_chunks(nbytes, network), [_build_binary_edges(hosts, shift) for shift in (0, 1)]
        for _ in range(chunks):
            for edges in trees:
                schedule.add_tree(edges, nbytes / 2 / chunks)
    elif algorithm == "two_dimensional":
        # Reduce-scatter inside each host, all-reduce between hosts of the ranks that hold the same part, all-gather
        # inside.
        have = dict[int, list[int]]()
        for host in hosts:
            have |= schedule.add_ring(host, nbytes, {}, sums=True)
        for column in zip(*hosts, strict=True):
            have |= _add_ring_all_reduce(schedule, column, nbytes / per_host, have)
        for host in hosts:
            schedule.add_ring(host, nbytes, have, sums=False)
    else:
        raise UsageError(f"the message simulation has no algorithm {algorithm}")
    return schedule


def _build_binomial_edges(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Build (child, parent) edges of a binomial tree over the ranks in order, the most distant first."""
    edges, distance = list[tuple[int, int]](), 1 << (len(ranks) - 1).bit_length()
    while distance := distance // 2:
        edges += [(ranks[at + distance], ranks[at]) for at in range(0, len(ranks) - distance, 2 * distance)]
    return edges


def _build_binary_edges(hosts: Sequence[Sequence[int]], shift: int) -> list[tuple[int, int]]:
    """Build (child, parent) edges of a binary tree over hosts, whose leaves are every second host, and of one inside
    each host.

    Sanders, Speck and Traeff 2009: for an even number of hosts the tree shifted by one has its leaves at the inner
    nodes of the first, so that each host sends about as much as any other.
    """
    heads = [hosts[(place + shift) % len(hosts)][0] for place in range(len(hosts))]
    edges = list[tuple[int, int]]()
    # Spans (first, last, parent) of places counted from 1. The root of a span is its largest power of two.
    spans: list[tuple[int, int, int | None]] = [(1, len(heads), None)]
    for first, last, parent in spans:
        middle = first - 1 + (1 << ((last - first + 1).bit_length() - 1))
        if parent is not None:
            edges.append((heads[middle - 1], parent))
        sides = ((first, middle - 1), (middle + 1, last))
        spans += [(begin, end, heads[middle - 1]) for begin, end in sides if begin <= end]
    for host in hosts:
        edges += [(host[place], host[(place - 1) // 2]) for place in range(1, len(host))]
    return edges


def _count_chunks(nbytes: float, network: Network) -> int:
    """Count the chunks that balance the latency of a chunk against the delay of the first one: sqrt(D n b / a)."""
    link, count = (network.between, network.hosts) if network.hosts > 1 else (network.inside, network.ranks)
    if not link.latency_s:
        return MAX_CHUNKS
    best = math.sqrt((count - 1).bit_length() * nbytes / link.bandwidth_bytes_s / link.latency_s)
    return min(max(1, round(best)), MAX_CHUNKS)


def _find_route(message: Message, network: Network) -> tuple[Link, list[tuple[str, int]]]:
    """Return the link of a message and the paths that it occupies."""
    source, target = (rank // network.ranks_per_host for rank in (message.sender, message.receiver))
    if source == target:
        return network.inside, [("out", message.sender)]
    return network.between, [("host out", source), ("host in", target)]


def _add_ring_all_reduce(
    schedule: MessageSchedule, ranks: Sequence[int], nbytes: float, after: dict[int, list[int]]
) -> dict[int, list[int]]:
    """Add an all-reduce by a ring."""
    if len(ranks) == 1:
        return {rank: after.get(rank, []) for rank in ranks}
    return schedule.add_ring(ranks, nbytes, schedule.add_ring(ranks, nbytes, after, sums=True), sums=False)


@final
@dataclass(frozen=True)
class SentMessage:
    """Times of a message, in seconds since the beginning."""

    message: Message
    # Begin and end of the transfer.
    begins: float
    ends: float
    # Time at which the receiver can go on: the message has arrived and is added.
    done: float


def simulate_messages(
    schedule: MessageSchedule, network: Network, *, begins: Mapping[int, float] | None = None
) -> list[SentMessage]:
    """Simulate the messages of a schedule. Returns their times in scheduling order.

    Args:
        begins: for each rank, seconds after which its values exist; default 0.
    """
    begins, routes = begins or {}, [_find_route(message, network) for message in schedule.messages]
    free, adder = defaultdict[tuple[str, int], float](float), defaultdict[int, float](float)
    left = [len(message.after) for message in schedule.messages]
    wanted = defaultdict[int, list[int]](list)
    for message in schedule.messages:
        for before in message.after:
            wanted[before].append(message.number)
    ready = [begins.get(message.sender, 0.0) for message in schedule.messages]
    # Discrete events in order of time, then of message number: ties go to the message scheduled first.
    events: list[tuple[float, int, int]] = [
        (ready[number], number, READY) for number, count in enumerate(left) if not count
    ]
    heapq.heapify(events)
    waiting = defaultdict[tuple[str, int], list[int]](list)
    finished: dict[int, SentMessage] = {}

    def begin(number: int, at: float) -> None:
        """Send a message if its paths are free; else queue it at the path that is busy longest, and let others pass."""
        message, (link, paths) = schedule.messages[number], routes[number]
        busy = max(paths, key=lambda path: free[path])
        if free[busy] > at:
            heapq.heappush(waiting[busy], number)
            return
        taken = message.nbytes / link.bandwidth_bytes_s
        for path in paths:
            free[path] = at + taken
        heapq.heappush(events, (at + taken, number, FREED))
        ends = done = at + taken + link.latency_s
        # A rank adds one array at a time, and only after its own values exist.
        if message.adds:
            own = begins.get(message.receiver, 0.0)
            done = max(ends, adder[message.receiver], own) + message.nbytes / network.reduce_bytes_s
            adder[message.receiver] = done
        finished[number] = SentMessage(message, at, ends, done)
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
        # Each freed path may admit several waiting messages, until one of them occupies it.
        for path in routes[number][1]:
            while waiting[path] and free[path] <= at:
                begin(heapq.heappop(waiting[path]), at)
    return [finished[number] for number in range(len(schedule.messages))]


def simulate_all_reduce(algorithm: Algorithm, nbytes: float, network: Network) -> float:
    """Simulate one all-reduce on an idle network, in seconds."""
    return max(
        (one.done for one in simulate_messages(schedule_messages(algorithm, nbytes, network), network)), default=0.0
    )


@final
@dataclass(frozen=True)
class ExchangeTimeline:
    """Times of a simulated exchange, in seconds since the beginning of the step."""

    # For each bucket, when the last rank has its sum.
    done: list[float]
    # For each rank, the time at which it has all sums.
    ends: list[float]


def simulate_exchange(
    algorithm: Algorithm, nbytes: Sequence[float], ready: Sequence[Sequence[float]], network: Network
) -> ExchangeTimeline:
    """Simulate the exchange of buckets, one after the other.

    A rank begins with a bucket as soon as the bucket is full there and the one before it is done there.

    Args:
        nbytes: of each bucket, in the order of the exchange.
        ready: for each bucket, for each rank: seconds after which it is full.
    """
    free = [0.0] * network.ranks
    done = []
    for size, full in zip(nbytes, ready, strict=True):
        schedule = schedule_messages(algorithm, size, network)
        begins = {rank: max(free[rank], full[rank]) for rank in range(network.ranks)}
        free = [begins[rank] for rank in range(network.ranks)]
        for one in simulate_messages(schedule, network, begins=begins):
            # A rank is free for the next bucket when it has received and added everything, and its own messages have
            # left.
            free[one.message.receiver] = max(free[one.message.receiver], one.done)
            link, _ = _find_route(one.message, network)
            free[one.message.sender] = max(free[one.message.sender], one.ends - link.latency_s)
        done.append(max(free))
    return ExchangeTimeline(done, free)
