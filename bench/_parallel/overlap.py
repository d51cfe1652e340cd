"""Arms of two ranks that share images: a convolution whose exchange runs beside it, and one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch.nn import functional as F

from bench._network.arm import Arm
from headway.core.rows import Window, divide
from headway.core.world import Membership, World
from headway.parallel.fetch import fetch_rows
from headway.parallel.maps import cut
from headway.parallel.place import Place
from headway.parallel.strips import make_strip

# A row of 16 images with 64 channels is 459 kB in fp32: more than the 128 kB that a limited link lets pass at once.
SAMPLES, CHANNELS, WIDTH = 16, 64, 112
HALO_BYTES = SAMPLES * CHANNELS * WIDTH * 4
# Rows of a rank, among which the bench finds those whose convolution takes as long as the exchange.
HEIGHTS = (3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40)


@final
class Run:
    """An arm that calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def step(self) -> None:
        with torch.no_grad():
            self._function()

    def found(self) -> list[float]:
        return []


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """For each of `asked["heights"]`: the exchange, the convolution of rows that are there, both in turn, and ours."""
    membership = Membership(asked["rank"], asked["size"], identities=[f"host-{one}" for one in range(asked["size"])])
    device = torch.device("cpu")
    world = World.create(store, membership, device, master=asked["address"], secret=b"bench", interface="eth0")
    place = Place.create(world, (world.size, 1))
    weight, made = torch.randn(CHANNELS, CHANNELS, 3, 3), dict[str, Arm]()
    for rows in asked["heights"]:
        length = rows * world.size
        split = cut(torch.randn(SAMPLES, CHANNELS, length, WIDTH), place)
        owned = divide(length, world.size)
        needs = [Window(3, 1, 1).find_need(one, length) for one in owned]
        mine, line = needs[world.rank], place.lines[0]
        there = torch.randn(SAMPLES, CHANNELS, rows + 2, WIDTH)

        def exchange(split: Any = split, owned: Any = owned, needs: Any = needs, line: Any = line) -> torch.Tensor:
            return fetch_rows(split.own, 2, owned, [need.rows for need in needs], line)

        def compute(there: torch.Tensor = there) -> torch.Tensor:
            return F.conv2d(there, weight, padding=(0, 1))

        def in_turn(exchange: Any = exchange, mine: Any = mine) -> torch.Tensor:
            return F.conv2d(F.pad(exchange(), (0, 0, mine.before, mine.after)), weight, padding=(0, 1))

        def beside(split: Any = split) -> torch.Tensor:
            return F.conv2d(make_strip(split), weight, padding=1)

        arms_of = {"exchange": exchange, "compute": compute, "in turn": in_turn, "beside": beside}
        made |= {f"{name} {rows}": Run(function) for name, function in arms_of.items()}
    return made, {}
