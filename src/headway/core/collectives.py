"""The cost of collectives by the alpha-beta model: pure functions of message bytes and a network.

A message of n bytes takes `latency_s + n / bandwidth_bytes_s` on a link; summing n bytes takes `n / reduce_bytes_s`
(Hockney 1994; Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
section 4). There are M hosts with L ranks each, N = M L; the ranks of a host share its link to other hosts.

| algorithm          | steps                                                                                          |
|--------------------|------------------------------------------------------------------------------------------------|
| `ring`             | reduce-scatter and all-gather around all ranks (Patarasuk and Yuan 2009)                       |
| `tree`             | binomial tree over the ranks in order: sums go up, the result comes down                       |
| `halving_doubling` | halving, then doubling (Rabenseifner 2004); ranks beyond a power of two fold in                |
| `double_tree`      | two binary trees with half of the bytes each, in chunks (Sanders, Speck and Traeff 2009)       |
| `leader`           | sum inside the host, ring among first ranks, broadcast (Jia et al. 2018, arXiv 1807.11205)     |
| `two_dimensional`  | reduce-scatter inside, all-reduce of each slice across hosts, all-gather inside                |
| `torus`            | the same, with the hosts in a nearly square grid (Mikami et al. 2018, arXiv 1811.05233)        |
| `parameter_server` | all ranks push to as many server hosts as there are hosts, and pull                            |
| `shared_server`    | servers on the ranks' own hosts: ranks to their host, hosts to each other's parts, and back    |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final, get_args

import numpy as np

from headway.core.errors import UsageError

Algorithm = Literal[
    "ring",
    "tree",
    "halving_doubling",
    "double_tree",
    "leader",
    "two_dimensional",
    "torus",
    "parameter_server",
    "shared_server",
]
RankOrder = Literal["block", "round_robin"]

# Bounds of the chosen bucket size, in bytes.
SMALLEST_BUCKET, LARGEST_BUCKET = 256 << 10, 32 << 20


@final
@dataclass(frozen=True)
class Link:
    """A full-duplex link between two ranks.

    Raises:
        UsageError: the latency is negative, or the bandwidth is not positive.
    """

    latency_s: float
    bandwidth_bytes_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bandwidth_bytes_s > 0):
            raise UsageError(f"{self} is not a link", fix="Set latency_s to 0 or more and bandwidth_bytes_s above 0.")

    def seconds(self, nbytes: float) -> float:
        """Returns the seconds that one message takes."""
        return self.latency_s + nbytes / self.bandwidth_bytes_s


@final
@dataclass(frozen=True)
class Network:
    """Hosts, the ranks on each, and the links between them.

    Attributes:
        inside: link between two ranks of a host while all of its ranks communicate.
        between: link between two hosts; all ranks of a host share its bandwidth.
        reduce_bytes_s: speed at which a rank adds one array to another, in bytes of one of them.

    Raises:
        UsageError: there is no host or rank, or a speed is not positive.
    """

    hosts: int
    ranks_per_host: int
    inside: Link
    between: Link
    reduce_bytes_s: float

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1 or not self.reduce_bytes_s > 0:
            raise UsageError(f"{self} is not a network", fix="Set the counts to 1 or more and reduce_bytes_s above 0.")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@final
@dataclass(frozen=True)
class LinearCost:
    """A cost that is linear in the bytes. It fits every algorithm but the double tree, which splits into chunks."""

    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes * self.s_per_byte


def predict_seconds(
    algorithm: Algorithm, nbytes: float, network: Network, *, wire_ratio: float = 1.0, order: RankOrder = "block"
) -> float:
    """Predicts the seconds of one operation on an idle network.

    Args:
        nbytes: bytes of each rank's array.
        wire_ratio: bytes on the link over bytes of the array: 0.5 for fp16 messages of fp32. The hierarchical
            algorithms (leader, two_dimensional, torus) compress messages between hosts, the others every message.
        order: order of the ranks: host by host, or each on another host than the one before. It matters to `ring`,
            `tree` and `halving_doubling`; the others know the hosts.
    """
    # The only cost that is not linear: its best number of chunks depends on the bytes.
    if algorithm == "double_tree" and network.ranks > 1:
        return _cost_double_tree(nbytes, network, wire_ratio, None)
    return predict_cost(algorithm, network, wire_ratio=wire_ratio, order=order).seconds(nbytes)


@lru_cache(maxsize=1024)
def predict_cost(
    algorithm: Algorithm, network: Network, *, wire_ratio: float = 1.0, order: RankOrder = "block"
) -> LinearCost:
    """Returns latency and seconds per byte; arguments as in `predict_seconds`.

    For `double_tree` these are its limits for 0 bytes and for many.
    """
    if network.ranks == 1:
        return LinearCost(0.0, 0.0)
    # Hierarchical algorithms: the sum of their phases, which follow each other.
    if algorithm in ("leader", "two_dimensional", "torus"):
        parts = _cost_phases(algorithm, network, wire_ratio)
        return LinearCost(sum(part.latency_s for part in parts), sum(part.s_per_byte for part in parts))
    if algorithm == "ring":
        return _cost_ring(network, wire_ratio, order)
    if algorithm == "tree":
        return _cost_tree(network, wire_ratio, order)
    if algorithm == "halving_doubling":
        return _cost_halving_doubling(network, wire_ratio, order)
    if algorithm == "double_tree":
        return LinearCost(
            _cost_double_tree(0, network, wire_ratio, 1.0),
            2 * wire_ratio * _get_slowest_beta(network) + _get_gamma(network),
        )
    if algorithm == "parameter_server":
        return _cost_parameter_server(network, wire_ratio)
    if algorithm == "shared_server":
        return _cost_shared_server(network, wire_ratio)
    raise UsageError(f"there is no algorithm {algorithm!r}", fix=f"Use one of: {', '.join(get_args(Algorithm))}.")


def count_bytes_out_of_host(
    algorithm: Algorithm, nbytes: float, network: Network, *, wire_ratio: float = 1.0, order: RankOrder = "block"
) -> float:
    """Returns the payload that the busiest host sends to others; arguments as in `predict_seconds`.

    Headers add 2 to 4 %. For `parameter_server` it is that of a worker host.
    """
    m, n_ranks, per_host = network.hosts, network.ranks, network.ranks_per_host
    if m == 1:
        return 0.0
    # Round robin: each rank's neighbour is on another host, so all ranks of a host send over its link.
    many = per_host if order == "round_robin" else 1
    if algorithm == "ring":
        share = 2 * many * (n_ranks - 1) / n_ranks
    elif algorithm == "tree":
        share = float(_count_tree_traffic(m, per_host, order)[0])
    elif algorithm == "halving_doubling":
        # Beyond a power of two, one more message folds a host in.
        power = 1 << (m.bit_length() - 1)
        share = many * (2 * (power - 1) / power + (power != m))
    elif algorithm == "double_tree":
        # An inner node of one tree is a leaf of the other: at most 2 arrays leave a host, fewer with 2 or 3 hosts.
        share = {2: 1.0, 3: 1.5}.get(m, 2.0)
    elif algorithm == "parameter_server":
        share = float(per_host)
    # The hierarchical algorithms and shared_server: reduce-scatter and all-gather among hosts.
    else:
        share = 2 * (m - 1) / m
    return share * nbytes * wire_ratio


def predict_phase_costs(
    algorithm: Algorithm, network: Network, *, wire_ratio: float = 1.0
) -> tuple[LinearCost, LinearCost, LinearCost]:
    """Returns the costs inside the host, between hosts, and inside again; flat algorithms have only the second."""
    if network.ranks > 1 and algorithm in ("leader", "two_dimensional", "torus"):
        return _cost_phases(algorithm, network, wire_ratio)
    return LinearCost(0.0, 0.0), predict_cost(algorithm, network, wire_ratio=wire_ratio), LinearCost(0.0, 0.0)


def predict_phases(
    algorithm: Algorithm, nbytes: float, network: Network, *, wire_ratio: float = 1.0
) -> tuple[float, float, float]:
    """Returns the seconds of each phase of `predict_phase_costs`."""
    # Not linear, and the phases of its chunks overlap: all in one.
    if algorithm == "double_tree":
        return 0.0, predict_seconds(algorithm, nbytes, network, wire_ratio=wire_ratio), 0.0
    first, second, third = (
        part.seconds(nbytes) for part in predict_phase_costs(algorithm, network, wire_ratio=wire_ratio)
    )
    return first, second, third


def choose_algorithm(
    nbytes: float,
    network: Network,
    among: Sequence[Algorithm] = ("ring", "tree", "leader", "two_dimensional"),
    *,
    wire_ratio: float = 1.0,
    order: RankOrder = "block",
) -> tuple[float, Algorithm]:
    """Returns the fewest predicted seconds and their algorithm; the first of equal ones."""
    costs = {name: predict_seconds(name, nbytes, network, wire_ratio=wire_ratio, order=order) for name in among}
    best = min(costs, key=lambda name: costs[name])
    return costs[best], best


def choose_bucket_for_cost(total_bytes: float, cost: LinearCost) -> int:
    """Chooses the bucket size that reduces `total_bytes` of gradients soonest, 256 KiB to 32 MiB.

    Let an operation on b bytes take alpha + b beta. Buckets overlap with the backward pass, and the link is busy for
    (n / b) alpha + n beta. After the last gradient one more bucket, alpha + b beta, is exposed. The sum
    n alpha / b + b beta + ... has its minimum at b = sqrt(n alpha / beta).
    """
    # A measured line may be flat within its noise.
    if cost.s_per_byte <= 0:
        return LARGEST_BUCKET
    best = math.sqrt(total_bytes * cost.latency_s / cost.s_per_byte)
    return int(min(max(best, SMALLEST_BUCKET), LARGEST_BUCKET))


def _count_doublings(count: int) -> int:
    """Returns the doublings from 1 to at least `count`."""
    return (count - 1).bit_length()


def _factor_grid(count: int) -> tuple[int, int]:
    """Returns the two factors of `count` that are closest to each other, the larger first."""
    smaller = next(side for side in range(math.isqrt(count), 0, -1) if count % side == 0)
    return count // smaller, smaller


def _get_gamma(network: Network) -> float:
    return 1 / network.reduce_bytes_s


def _get_betas(network: Network) -> tuple[float, float]:
    """Returns the seconds per byte inside hosts and between them; 0 if no messages go there."""
    inside = 1 / network.inside.bandwidth_bytes_s if network.ranks_per_host > 1 else 0.0
    return inside, 1 / network.between.bandwidth_bytes_s if network.hosts > 1 else 0.0


def _get_slowest_beta(network: Network) -> float:
    return max(_get_betas(network))


def _cost_ring(network: Network, wire_ratio: float, order: RankOrder) -> LinearCost:
    m, n = network.hosts, network.ranks
    # Each rank sends (n - 1) / n of the array twice: once as partial sums, once as results.
    around = (n - 1) / n
    inside, between = _get_betas(network)
    if order == "round_robin" and m > 1:
        inside, between = 0.0, between * network.ranks_per_host
        latency = 2 * (n - 1) * network.between.latency_s
    else:
        # A chunk goes around twice less two consecutive hops. The last chunk to finish is the one that skips the two
        # fastest hops, which depends on the latencies and on the ranks per host.
        inner, outer = network.inside.latency_s, network.between.latency_s
        fewer = max(int(outer < inner), 3 - network.ranks_per_host, 0)
        across = 2 * m - fewer if m > 1 else 0
        latency = (2 * (n - 1) - across) * inner + across * outer
    return LinearCost(latency, 2 * around * wire_ratio * max(inside, between) + around * _get_gamma(network))


def _cost_tree(network: Network, wire_ratio: float, order: RankOrder) -> LinearCost:
    """Costs the tree, up and down; each step is as slow as its slowest pair."""
    inside, between = _get_betas(network)
    latency = per_byte = 0.0
    for crossing, staying in _count_tree_traffic(network.hosts, network.ranks_per_host, order)[1]:
        latency += 2 * max(network.between.latency_s * (crossing > 0), network.inside.latency_s * staying)
        per_byte += 2 * wire_ratio * max(crossing * between, staying * inside) + _get_gamma(network)
    return LinearCost(latency, per_byte)


@lru_cache(maxsize=64)
def _count_tree_traffic(hosts: int, per_host: int, order: RankOrder) -> tuple[int, tuple[tuple[int, bool], ...]]:
    """Counts the tree's messages for an array per rank.

    Returns:
        The messages out of the busiest host, up and down; and for each step, those over the busiest link and whether
        some pairs stay inside a host.
    """
    # Simulated step by step, for any number of hosts and ranks; cached, since planners ask for thousands of sizes.
    out, rounds, distance, ranks = np.zeros(hosts, np.int64), [], 1, hosts * per_host
    while distance < ranks:
        parents = np.arange(0, ranks - distance, 2 * distance)
        ends = np.stack([parents, parents + distance])
        at = ends // per_host if order == "block" else ends % hosts
        crossing = at[:, at[0] != at[1]]
        of_host = [np.bincount(side, minlength=hosts) for side in crossing]
        # A parent sends down, a child sends up.
        out += of_host[0] + of_host[1]
        rounds.append((int(max(counts.max() for counts in of_host)), crossing.shape[1] < len(parents)))
        distance *= 2
    return int(out.max()), tuple(rounds)


def _cost_halving_doubling(network: Network, wire_ratio: float, order: RankOrder) -> LinearCost:
    """Costs halving-doubling: near partners come first, while messages are large."""
    m, per_host, gamma = network.hosts, network.ranks_per_host, _get_gamma(network)
    inside, between = _get_betas(network)
    # (ranks on this level, latency, seconds per byte while all ranks of the host communicate), in order of the steps.
    levels = [(per_host, network.inside.latency_s, inside), (m, network.between.latency_s, between * per_host)]
    if order == "round_robin":
        levels.reverse()
    latency = per_byte = 0.0
    # The share of the array that a rank still holds.
    left = 1.0
    for count, alpha, beta in levels:
        power = 1 << (count.bit_length() - 1)
        rounds = 2 * (power.bit_length() - 1)
        moved = left * (power - 1) / power
        latency, per_byte = latency + rounds * alpha, per_byte + moved * (2 * wire_ratio * beta + gamma)
        # Ranks beyond a power of two give their share to a partner first and receive the sum at the end.
        if power != count:
            latency, per_byte = latency + 2 * alpha, per_byte + left * (2 * wire_ratio * beta + gamma)
        left /= power
    return LinearCost(latency, per_byte)


def _cost_double_tree(nbytes: float, network: Network, wire_ratio: float, chunks: float | None) -> float:
    """Costs 2 [(D + c) (a + n b / c) + d (a' + n b' / c)]: D hops between hosts, d hops inside them."""
    inside, between = _get_betas(network)
    deep, a, b = _count_doublings(network.hosts), network.between.latency_s, between * wire_ratio
    shallow, a_in, b_in = _count_doublings(network.ranks_per_host), network.inside.latency_s, inside * wire_ratio
    # On one host, the inner links take the place of the outer ones.
    if network.hosts == 1:
        deep, a, b, shallow = shallow, a_in, b_in, 0
    hops = nbytes * (deep * b + shallow * b_in)
    still = deep * a + shallow * a_in + nbytes * max(b, b_in)
    # Without a given count, hops / c + c a is at its minimum for c = sqrt(hops / a), or for c = 1 below that.
    chunked = hops / chunks + chunks * a if chunks else 2 * math.sqrt(hops * a) if hops > a else hops + a
    return 2 * (still + chunked) + nbytes * _get_gamma(network)


def _cost_phases(
    algorithm: Algorithm, network: Network, wire_ratio: float
) -> tuple[LinearCost, LinearCost, LinearCost]:
    m, per_host, gamma = network.hosts, network.ranks_per_host, _get_gamma(network)
    inside, between = _get_betas(network)
    near, hops = per_host - 1, m - 1
    if algorithm == "torus":
        grid = sum(_factor_grid(m if m > 1 else per_host)) - 2
        near, hops = (near, grid) if m > 1 else (grid, 0)
    # `leader` reduces the whole array on one rank; the others leave 1 / L of it on each rank.
    if algorithm == "leader":
        down, up, part = inside + gamma * (per_host > 1), inside, 1.0
    else:
        share = (per_host - 1) / per_host
        down, up, part = share * (inside + gamma), share * inside, 1 / per_host
    # With 1 / L of the array, each of L ranks also has 1 / L of the host's bandwidth: the link's time is that of a
    # leader with the whole array. Only the sum is faster.
    cross = (m - 1) / m * (2 * wire_ratio * between + gamma * part)
    ends = near * network.inside.latency_s
    return LinearCost(ends, down), LinearCost(2 * hops * network.between.latency_s, cross), LinearCost(ends, up)


def _cost_parameter_server(network: Network, wire_ratio: float) -> LinearCost:
    """Costs servers on hosts of their own, as many as worker hosts; on one host, one of its processes serves."""
    inside, between = _get_betas(network)
    link, beta = (network.between, between) if network.hosts > 1 else (network.inside, inside)
    sums = network.ranks / network.hosts * _get_gamma(network)
    return LinearCost(2 * link.latency_s, 2 * network.ranks_per_host * wire_ratio * beta + sums)


def _cost_shared_server(network: Network, wire_ratio: float) -> LinearCost:
    """Costs servers on every host, each for an equal part; a host sends its sums for other parts, and its own part."""
    m, per_host = network.hosts, network.ranks_per_host
    inside, between = _get_betas(network)
    latency = 2 * (network.inside.latency_s * (per_host > 1) + network.between.latency_s * (m > 1))
    near = (2 * per_host * inside + per_host * _get_gamma(network)) * (per_host > 1)
    return LinearCost(latency, near + (m - 1) / m * 2 * wire_ratio * between + _get_gamma(network) * (m > 1))
