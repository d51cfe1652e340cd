"""Arms of two hosts that share the experts of a layer: a forward and a backward pass of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from bench._network.arm import Arm
from headway.core.world import Membership, World
from headway.model import MixtureOfExperts, NoisyTopKGate
from headway.parallel.experts import SharedExperts

# Tokens of a host: the positions of 64 images in `cifar_moe`.
TOKENS, WIDTH, HIDDEN, EXPERTS = 1024, 64, 128, 8


@final
class Step:
    """A step of a layer whose experts two hosts share, without the optimizer."""

    def __init__(self, layer: MixtureOfExperts, rank: int) -> None:
        draw = torch.Generator().manual_seed(rank)
        self._layer, self._tokens = layer, torch.randn(TOKENS, WIDTH, generator=draw).requires_grad_()
        self._counts: Sequence[int] = ()
        run = layer.exchange.run

        def keep(experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
            self._counts = counts.tolist()
            return run(experts, rows, counts)

        layer.exchange.run = keep  # type: ignore[method-assign]

    def step(self) -> None:
        self._layer(self._tokens).sum().backward()

    def found(self) -> list[float]:
        return [float(count) for count in self._counts]


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """`experts`: a step; it finds the rows that the rank has for each expert."""
    membership = Membership(asked["rank"], asked["size"], identities=[f"host-{one}" for one in range(asked["size"])])
    device = torch.device("cpu")
    world = World.create(store, membership, device, master=asked["address"], secret=b"bench", interface="eth0")
    torch.manual_seed(0)
    layer = MixtureOfExperts(WIDTH, HIDDEN, experts=EXPERTS, gate=NoisyTopKGate(WIDTH, EXPERTS))
    SharedExperts(layer, world.rank, world.size, world.size, across_hosts=True).connect(world)
    return {"experts": Step(layer, world.rank)}, {}
