"""Gradients without a network: a backward pass that takes no time, and parameters with the sizes of a ResNet-18."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench._network.arm import Arm
from bench._network.ours import WIRES, Ours
from headway.comm.communicator import ALGORITHMS
from headway.comm.reducer import Reducer


class Given(torch.autograd.Function):
    """A loss whose gradient is given."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def shapes(width: int) -> list[tuple[int, ...]]:
    """Those of a ResNet-18 whose first stage has so many channels: 62 tensors, 12.2 MB in float32 with 32."""
    found: list[tuple[int, ...]] = []

    def convolution(before: int, after: int, kernel: int) -> None:
        found.extend([(after, before, kernel, kernel), (after,), (after,)])  # and its batch norm

    convolution(3, width, 7)
    before = width
    for stage in range(4):
        after = width << stage
        for block in range(2):
            convolution(before, after, 3)
            convolution(after, after, 3)
            if stage and block == 0:
                convolution(before, after, 1)
            before = after
    return [*found, (1000, before), (1000,)]


class Probe(nn.Module):
    """Its backward gives each parameter a gradient of normal noise, the same in every step, another on every rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape) for shape in shapes(width))
        self._gradients = noise(width, rank)

    def forward(self) -> torch.Tensor:
        loss = torch.zeros(())
        for parameter, gradient in zip(self.parts, self._gradients, strict=True):
            loss = loss + Given.apply(parameter, gradient)
        return loss


def noise(width: int, rank: int) -> list[torch.Tensor]:
    """The gradients of a rank; small in the first layers and large in the last, as they often are."""
    generator = torch.Generator().manual_seed(rank)
    sizes = shapes(width)
    scales = torch.logspace(-4, 0, len(sizes))
    return [torch.randn(shape, generator=generator) * scale for shape, scale in zip(sizes, scales, strict=True)]


def expected(width: int, size: int) -> list[torch.Tensor]:
    """The sum over the ranks, in float64."""
    ranks = [noise(width, rank) for rank in range(size)]
    return [torch.stack(parts).double().sum(0) for parts in zip(*ranks, strict=True)]


@final
class Probing:
    """A backward, and what reduces it; `found` is the largest error of a gradient's sum, over its largest number.

    Args:
        forward: the probe, as the arm wraps it.
        reducer: what sums the gradients; None: they are the mean after backward already, as with DDP.
    """

    def __init__(self, forward: nn.Module, reducer: Reducer | None, wanted: list[torch.Tensor]) -> None:
        self._forward, self._reducer, self._wanted = forward, reducer, wanted

    def step(self) -> None:
        self._forward.zero_grad(set_to_none=True)
        if self._reducer is not None:
            self._reducer.prepare_for_backward()
        self._forward().backward()
        if self._reducer is not None:
            self._reducer.finish()

    def found(self) -> list[float]:
        scale = 1 if self._reducer is not None else dist.get_world_size()
        pairs = zip(self._forward.parameters(), self._wanted, strict=True)
        return [max(float((p.grad.double() * scale - sums).abs().max() / sums.abs().max()) for p, sums in pairs)]


def arms(asked: Mapping[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, object]]:
    """`ddp`, and the Reducer with each algorithm in each form. All have done a first step, which orders buckets."""
    width, rank, size = asked["width"], asked["rank"], asked["size"]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ours, wanted = Ours(asked, store), expected(width, size)
    found: dict[str, Arm] = {"ddp": Probing(DistributedDataParallel(Probe(width, rank)), None, wanted)}
    for wire in WIRES:
        for algorithm in (*ALGORITHMS, "auto"):
            model, name = Probe(width, rank), f"{algorithm} {wire}"
            found[name] = Probing(model, ours.reducer(name, model, algorithm, wire), wanted)
    for arm in found.values():
        arm.step()
    sums = {name: ours.sums(name) for name in ours.reducers}
    return found, {"arms": list(found), "bytes": 4 * sum(map(torch.numel, wanted)), "sums": sums, "said": ours.lines()}
