"""Arms of two hosts with two network interfaces each: the sum of a buffer over the first, and over both."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist

from bench._network.arm import Arm
from headway.comm.communicator import Communicator
from headway.comm.links import measure_links
from headway.core.world import Membership, World

# Bytes of the buffers. A gradient bucket is about as large as the first.
SIZES = (16_000_000, 64_000_000)
INTERFACES: dict[str, tuple[str, ...]] = {"one": ("eth0",), "two": ("eth0", "eth1")}


@final
class Sum:
    """Sums a buffer that holds random numbers of its rank; `found` is a checksum of the sum's bits."""

    def __init__(self, communicator: Communicator, nbytes: int) -> None:
        self._communicator = communicator
        generator = torch.Generator().manual_seed(communicator.world.rank)
        self._given = torch.randn(nbytes // 4, generator=generator)
        self._sum = self._given.clone()

    def step(self) -> None:
        self._communicator.all_reduce(self._sum).wait()

    def found(self) -> list[float]:
        bits = float(self._sum.view(torch.int32).sum(dtype=torch.int64) % (1 << 50))
        self._sum.copy_(self._given)
        return [bits]


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """`one BYTES` and `two BYTES`, and what a run would print at its start."""
    found: dict[str, Arm] = {}
    said: list[str] = []
    for name, interfaces in INTERFACES.items():
        mine = dist.PrefixStore(name, store)
        membership = Membership(asked["rank"], asked["size"])
        device = torch.device("cpu")
        world = World.create(mine, membership, device, master=asked["address"], secret=b"bench", interface=interfaces)
        links = measure_links(world)
        said += links.describe(world)[:1]
        communicator = Communicator(world, rails=links.rails, rates_bytes_s=links.rates_bytes_s)
        found |= {f"{name} {nbytes}": Sum(communicator, nbytes) for nbytes in asked["sizes"]}
    return found, {"said": said}
