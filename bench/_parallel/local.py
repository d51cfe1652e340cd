"""Arms of two hosts on a slow link: a step of data parallel training, a round of steps alone, and steps alone."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from bench._network.arm import Arm
from headway.comm.communicator import Communicator
from headway.comm.reducer import Reducer
from headway.core.world import Membership, World
from headway.parallel.local import OuterOptimizer

EVERY_STEPS = 16
SAMPLES = 16
# 4.2 MB of weights: they take 1.7 s over a link of 20 Mbit/s.
WIDTH = 1024


@final
class DataParallel:
    """One step: a forward and backward pass, the sum of the gradients, plain SGD. Without a reducer a step alone."""

    def __init__(self, network: nn.Module, reducer: Reducer | None, rank: int) -> None:
        self._network, self._reducer = network, reducer
        self._optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(rank)
        self._inputs = torch.randn(SAMPLES, WIDTH, generator=generator)

    def step(self) -> None:
        loss = self._network(self._inputs).square().mean()
        if self._reducer is not None:
            self._reducer.prepare_for_backward()
        loss.backward()
        if self._reducer is not None:
            self._reducer.finish(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()

    def found(self) -> list[float]:
        return [float(sum(parameter.detach().double().sum() for parameter in self._network.parameters()))]


@final
class Round:
    """`EVERY_STEPS` steps alone, and the mean of the weights."""

    def __init__(self, network: nn.Module, reducer: Reducer, rank: int, ranks: int) -> None:
        self._alone, self._reducer, self._share = DataParallel(network, None, rank), reducer, 1 / ranks
        self._outer = OuterOptimizer(network.named_parameters())

    def step(self) -> None:
        self._outer.begin_round()
        for _ in range(EVERY_STEPS):
            self._alone.step()
        self._outer.put_gradients(self._share)
        self._reducer.finish()
        self._outer.step()

    def found(self) -> list[float]:
        return self._alone.found()


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """`data` is one step, `local` and `alone` are `EVERY_STEPS`; the facts are bytes of the weights."""
    membership = Membership(asked["rank"], asked["size"], identities=[f"host-{one}" for one in range(asked["size"])])
    device = torch.device("cpu")
    world = World.create(store, membership, device, master=asked["address"], secret=b"bench", interface="eth0")
    communicator = Communicator(world)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(WIDTH, WIDTH)

    data, local = build(), build()
    found: dict[str, Arm] = {
        "data": DataParallel(data, Reducer(data.named_parameters(), communicator), world.rank),
        "local": Round(local, Reducer(local.named_parameters(), communicator), world.rank, world.size),
        "alone": DataParallel(build(), None, world.rank),
    }
    return found, {"bytes": sum(parameter.numel() * 4 for parameter in data.parameters())}
