"""Training steps of a real network on images of 32 x 32, with plain DDP, with the Reducer, and alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bench._network.arm import Arm
from bench._network.ours import WIRES, Ours
from headway import model
from headway.comm.reducer import Reducer

CLASSES = 10
BATCHES = 4
"""Different ones; they come again and again."""


@final
class Training:
    """SGD with momentum; `found` are the losses, means over the rank's samples.

    Args:
        forward: the network, as the arm wraps it.
        reducer: what sums the gradients, whose loss is a rank's share of that of the global batch; None: they are
            what they are after backward.
    """

    def __init__(self, forward: nn.Module, reducer: Reducer | None, asked: Mapping[str, Any]) -> None:
        self._forward, self._reducer = forward, reducer
        self._share = 1 if reducer is None else 1 / asked["size"]
        self._optimizer = torch.optim.SGD(forward.parameters(), lr=0.02, momentum=0.9)
        self._batches = [_batch(asked["batch"], number * asked["size"] + asked["rank"]) for number in range(BATCHES)]
        self._step = 0
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        images, labels = self._batches[self._step % BATCHES]
        self._step += 1
        if self._reducer is not None:
            self._reducer.prepare_for_backward()
        loss = F.cross_entropy(self._forward(images), labels)
        (loss * self._share).backward()
        if self._reducer is not None:
            self._reducer.finish(loss.detach() * self._share)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())

    def found(self) -> list[float]:
        losses = [float(loss) for loss in self._losses]
        self._losses.clear()
        return losses


def _batch(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around a picture of each class."""
    classes = torch.randn(CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + seed)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return classes[labels] * 0.3 + torch.randn(samples, 3, 32, 32, generator=generator), labels


def arms(asked: Mapping[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, object]]:
    """`ddp`, the Reducer with `auto` in each form, and `alone`: nothing is reduced. All have done a first step."""
    dist.init_process_group("gloo", store=store, rank=asked["rank"], world_size=asked["size"])
    ours = Ours(asked, store)

    def network() -> nn.Module:
        torch.manual_seed(0)
        found: nn.Module = getattr(model, asked["network"])(CLASSES)
        return found

    found: dict[str, Arm] = {"ddp": Training(DistributedDataParallel(network()), None, asked)}
    for wire in WIRES:
        own, name = network(), f"auto {wire}"
        found[name] = Training(own, ours.reducer(name, own, "auto", wire), asked)
    found["alone"] = Training(network(), None, asked)
    for arm in found.values():
        arm.step()
        arm.found()
    return found, {"arms": list(found), "said": ours.lines()}
