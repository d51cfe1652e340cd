"""Arms of two hosts that have a tower of AlexNet each: an exchange of the batch, and a forward and backward pass."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from bench._network.arm import Arm
from headway import model
from headway.core.world import Membership, World
from headway.data.batch import Batch
from headway.parallel.towers import Towers, divide_towers
from headway.training.place_batch import gather_place

SIDE, CLASSES = 227, 1000
# Bytes that a rank sends of a sample. Before conv3: 128 channels of 13 x 13, and the gradient of the other tower's;
# before fc6: 128 channels of 6 x 6.
VALUES_BYTES = 2 * 128 * 13 * 13 * 4 + 128 * 6 * 6 * 4
# A rank has decoded half of the images. It sends these, their labels, and where they come from: position, epoch,
# sample asked for and sample served.
IMAGES_BYTES = (SIDE * SIDE * 3 + 8 + 4 * 8) / 2


@final
class Step:
    """A step of one tower and the rest of the network, without the optimizer."""

    def __init__(self, network: torch.nn.Module, towers: Towers, samples: int) -> None:
        self._network, self._towers, self._samples = network, towers, samples
        own, mine = samples // 2, torch.Generator().manual_seed(towers.own)
        images = torch.randint(256, (own, SIDE, SIDE, 3), dtype=torch.uint8, generator=mine)
        positions = np.arange(own) + towers.own * own
        self._batch = Batch(
            images=images,
            labels=torch.randint(CLASSES, (own,), generator=mine),
            positions=positions,
            epochs=np.zeros(own, np.int64),
            samples=positions,
            served=positions,
            seed=0,
        )
        self._loss = 0.0

    def step(self) -> None:
        batch, _ = gather_place(self._towers, self._batch, self._samples)
        images = batch.images.permute(0, 3, 1, 2).float() / 255
        torch.manual_seed(0)
        loss = F.cross_entropy(self._towers.run(self._network, images), batch.labels)
        loss.backward()
        self._network.zero_grad()
        self._loss = float(loss)

    def found(self) -> list[float]:
        return [self._loss]


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """`towers`: a step of `asked["samples"]` images."""
    membership = Membership(asked["rank"], asked["size"], identities=[f"host-{one}" for one in range(asked["size"])])
    device = torch.device("cpu")
    world = World.create(store, membership, device, master=asked["address"], secret=b"bench", interface="eth0")
    torch.manual_seed(0)
    network = model.alexnet(CLASSES, two_towers=True, fc_width=asked["fc_width"]).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    count = sum(parameter.numel() for parameter in network.parameters())
    towers = divide_towers(network, r"^towers\.(\d+)", world.rank, world.size, across_hosts=True)
    towers.connect(world)
    return {"towers": Step(network, towers, asked["samples"])}, {"parameters": count}
