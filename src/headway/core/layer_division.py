"""The exchange of fully connected layers whose outputs are divided over the ranks, and which layers it pays for.

Krizhevsky 2014 (arXiv 1404.5997): each rank has some of the outputs of a layer. The ranks gather the inputs of all
samples, and give each other the outputs of their own samples; the gradients of both go the other way. The gradients of
the weights stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from headway.core.collectives import LinearCost, Network, choose_algorithm, choose_bucket_for_cost, predict_cost

Scheme = Literal["all", "turns"]

MIN_GAIN = 0.05
"""Smallest share of the exchange that a division of layers has to save: less is within the error of a prediction."""


@final
@dataclass(frozen=True)
class DenseLayer:
    """A fully connected layer.

    Attributes:
        inputs, outputs: values of a sample.
        gradient_bytes: bytes of the gradients of its weights.
    """

    name: str
    inputs: int
    outputs: int
    gradient_bytes: int


@final
@dataclass(frozen=True)
class Division:
    """The layers whose division shortens the exchange most, or lengthens it least.

    Attributes:
        layers: their names; empty if there are none to divide.
        exchange_s: seconds of the exchange of a data parallel step.
        data_s: those of them that the backward pass does not hide: the ranks wait for them.
        divided_s: seconds that they wait if `layers` are divided.
    """

    layers: tuple[str, ...]
    exchange_s: float
    data_s: float
    divided_s: float

    @property
    def pays(self) -> bool:
        """True if the ranks wait less, by more than a twentieth of the exchange."""
        return self.data_s - self.divided_s > MIN_GAIN * self.exchange_s


def count_divided_bytes(layer: DenseLayer, batch: float, ranks: int, *, value_bytes: int = 4, scheme: Scheme) -> float:
    """Counts the bytes that a rank sends in a step for a divided layer, without headers.

    Args:
        batch: samples of all ranks.
    """
    # Inputs and their gradients; with turns they are gathered a second time. Outputs of a rank, and their gradients.
    times = 2 if scheme == "all" else 3
    return (ranks - 1) / ranks * value_bytes * batch * (times * layer.inputs + 2 * layer.outputs / ranks)


def predict_divided_s(
    layer: DenseLayer, batch: float, network: Network, *, value_bytes: int = 4, scheme: Scheme = "all"
) -> float:
    """Predicts the seconds of a step in which a divided layer exchanges; nothing hides them."""
    ranks, turns = network.ranks, 1 if scheme == "all" else network.ranks
    nbytes = count_divided_bytes(layer, batch, ranks, value_bytes=value_bytes, scheme=scheme)
    # Each rank sends a piece to each other one. All pieces to other hosts share the link of the host.
    to_each = nbytes / (ranks - 1) if ranks > 1 else 0.0
    near, far = network.ranks_per_host - 1, ranks - network.ranks_per_host
    inside_s = near * to_each / network.inside.bandwidth_bytes_s
    between_s = network.ranks_per_host * far * to_each / network.between.bandwidth_bytes_s if far else 0.0
    exchanges = turns * (4 if scheme == "all" else 5)
    latency_s = network.between.latency_s if far else network.inside.latency_s
    return exchanges * latency_s + max(inside_s, between_s)


def predict_exposed_s(gradient_bytes: float, network: Network, backward_s: float, *, wire_ratio: float = 1.0) -> float:
    """Predicts the seconds in which the ranks wait for sums of gradients.

    The backward pass hides all but the last bucket, as far as it lasts.
    """
    if network.ranks == 1 or not gradient_bytes:
        return 0.0
    _, algorithm = choose_algorithm(gradient_bytes, network, wire_ratio=wire_ratio)
    cost: LinearCost = predict_cost(algorithm, network, wire_ratio=wire_ratio)
    last = min(choose_bucket_for_cost(gradient_bytes, cost), gradient_bytes)
    return max(cost.seconds(gradient_bytes) - backward_s, cost.seconds(last))


def choose_division(
    layers: Sequence[DenseLayer],
    gradient_bytes: int,
    batch: int,
    network: Network,
    backward_s: float,
    *,
    value_bytes: int = 4,
    wire_ratio: float = 1.0,
    scheme: Scheme = "all",
) -> Division:
    """Chooses the layers to divide: those that leave least of the exchange to wait for.

    Args:
        layers: those that can be divided.
        gradient_bytes: bytes of all gradients of the network.
        batch: samples of all ranks.
        backward_s: seconds of the backward pass of a rank.
        value_bytes: bytes of an input or output on the network.
        wire_ratio: bytes of the gradients on the network over their own.
    """

    def predict(left_bytes: int) -> float:
        return predict_exposed_s(left_bytes, network, backward_s, wire_ratio=wire_ratio)

    own_s = {one: predict_divided_s(one, batch, network, value_bytes=value_bytes, scheme=scheme) for one in layers}
    # Those with most gradients for their exchange come first. A few together may pay where each alone does not, as the
    # backward pass hides what is left.
    order = sorted(layers, key=lambda one: own_s[one] / max(1, one.gradient_bytes))
    best, best_s = frozenset[DenseLayer](), math.inf
    for count in range(1, len(order) + 1):
        taken = order[:count]
        left = gradient_bytes - sum(one.gradient_bytes for one in taken)
        seconds = sum(own_s[one] for one in taken) + predict(left)
        if seconds < best_s:
            best, best_s = frozenset(taken), seconds
    names = tuple(one.name for one in layers if one in best)
    exchange_s = predict_exposed_s(gradient_bytes, network, 0.0, wire_ratio=wire_ratio)
    return Division(names, exchange_s, predict(gradient_bytes), best_s)
