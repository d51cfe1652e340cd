"""Arms of the Communicator alone: the sum of a buffer over all ranks, by each algorithm and in each form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch.distributed import Store

from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.communicator import Communicator
from headway.core.world import Membership, World

SECRET = b"of the hosts of a test"


@final
class Sum:
    """Rank r gives multiples of r + 1; `found` is the largest error, over the largest number of the sum."""

    def __init__(self, communicator: Communicator, algorithm: Algorithm, wire: Wire, numbers: int) -> None:
        self._communicator, self._algorithm, self._wire = communicator, algorithm, wire
        self._given = torch.arange(numbers, dtype=torch.float32) / numbers
        self._sum = torch.empty(numbers)

    def step(self) -> None:
        rank = self._communicator.world.rank
        torch.mul(self._given, rank + 1, out=self._sum)
        self._communicator.all_reduce(self._sum, algorithm=self._algorithm, wire=self._wire).wait()

    def found(self) -> list[float]:
        size = self._communicator.world.size
        factor = size * (size + 1) / 2
        return [float((self._sum - self._given * factor).abs().max()) / factor]


def arms(asked: Mapping[str, Any], store: Store) -> tuple[dict[str, Sum], dict[str, object]]:
    """`ALGORITHM WIRE` -> its arm; and what the rank found out about where it is."""
    world = World.create(
        store, Membership(asked["rank"], asked["size"]), torch.device("cpu"), master=asked["address"], secret=SECRET
    )
    communicator = Communicator(world)
    wires: tuple[Wire, ...] = ("fp32", "fp16", "bf16")
    found = {
        f"{algorithm} {wire}": Sum(communicator, algorithm, wire, asked["numbers"])
        for algorithm in communicator.algorithms
        for wire in wires
    }
    return found, {"hosts": world.hosts, "interface": world.interface, "local_rank": world.local_rank}
