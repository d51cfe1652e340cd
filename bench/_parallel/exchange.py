"""Arms of two ranks: an exchange of large pieces by `Group.all_to_all`, and by Gloo's own collective."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist

from bench._network.arm import Arm
from headway.core.group import Group
from headway.core.torch_c10d import load_c10d
from headway.core.world import Membership, World

PIECE_BYTES = 8_000_000


@final
class Exchange:
    """Sends a piece to each rank; `found` says whether the right ones have come."""

    def __init__(self, group: Group, nbytes: int, *, is_ours: bool) -> None:
        self._group, self._is_ours = group, is_ours
        numel = nbytes // 4
        pieces = [torch.full((numel,), float(10 * group.rank + to)) for to in range(group.size)]
        self._into, self._out = torch.cat(pieces), torch.empty(numel * group.size)
        self._wanted = torch.cat([torch.full((numel,), 10.0 * source + group.rank) for source in range(group.size)])

    def step(self) -> None:
        if self._is_ours:
            self._group.all_to_all(self._out, self._into).wait()
        else:
            options = load_c10d().AllToAllOptions()
            self._group._backend.alltoall_base(self._out, self._into, [], [], options).wait()

    def found(self) -> list[float]:
        is_right = torch.equal(self._out, self._wanted)
        self._out.zero_()
        return [float(is_right)]


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """`ours` and `gloo`."""
    membership = Membership(asked["rank"], asked["size"])
    world = World.create(
        store, membership, torch.device("cpu"), master=asked["address"], secret=b"bench", interface="eth0"
    )
    group = world.create_group(range(world.size), name="exchange")
    return {name: Exchange(group, asked["nbytes"], is_ours=name == "ours") for name in ("ours", "gloo")}, {}
