"""Clocks of single layers: they count each operation for the module that made it, and change nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any, final

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.observe.layer_times import COLUMNS, NETWORK, LayerTimes


@final
class Block(nn.Module):
    """A residual block that changes an output of its modules in place, and uses each of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.conv(images)), inplace=True)
        return self.norm(self.conv(hidden)) + images


def build(device: str = "cpu") -> tuple[nn.Sequential, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(Block(), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 2)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return network, optimizer, torch.randn(4, 3, 4, 4, device=device)


def step(network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, parts: int = 1) -> None:
    for part in images.chunk(parts):
        network(part).logsumexp(1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_each_operation_counts_for_the_module_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    network, optimizer, images = build()
    times = LayerTimes(network, optimizer, torch.device("cpu"))
    times.arm()
    loss = network(images).logsumexp(1).sum()
    names = list(times._places)
    assert names == ["", "0", "0.conv", "0.norm", "1", "2", "3"]
    made = Counter((names[place], type(node).__name__) for node, place in times._nodes.items())
    assert made == {
        ("0.conv", "ConvolutionBackward0"): 2,
        ("0.conv", "AccumulateGrad"): 1,
        ("0.norm", "NativeBatchNormBackward0"): 2,
        # Its weight and its bias.
        ("0.norm", "AccumulateGrad"): 2,
        ("0", "ReluBackward0"): 1,
        ("0", "AddBackward0"): 1,
        ("1", "ReluBackward0"): 1,
        ("2", made_by_flatten(made)): 1,
        ("3", "AddmmBackward0"): 1,
        ("3", "TBackward0"): 1,
        ("3", "AccumulateGrad"): 2,
    }
    loss.backward()
    # The loss is no module's.
    assert Counter(place for place, _, _ in times._backward) == Counter(times._nodes.values())


def made_by_flatten(made: Counter[tuple[str, str]]) -> str:
    """The name of the node of a flatten, which differs between versions of torch."""
    return next(node for name, node in made if name == "2")


def test_times_are_each_modules_own_and_add_up() -> None:
    network, optimizer, images = build()
    times = LayerTimes(network, optimizer, torch.device("cpu"))
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1.0
        return now

    times._mark = tick
    times.arm()
    step(network, optimizer, images, parts=2)
    times.disarm()
    measured = times.read()
    assert measured is not None
    names, found, step_s = measured
    assert names == (NETWORK, "0", "0.conv", "0.norm", "1", "2", "3")
    assert COLUMNS == ("forward_s", "backward_s", "weights")
    forward, backward, weights = found.T
    # One tick from begin to end of a leaf; two passes of the batch, and the block calls its modules twice.
    assert dict(zip(names, forward, strict=True)) | {NETWORK: 0, "0": 0} == {
        NETWORK: 0, "0": 0, "0.conv": 4, "0.norm": 4, "1": 2, "2": 2, "3": 2
    }  # fmt: skip
    assert dict(zip(names, backward, strict=True))["0.conv"] == 2 * 3
    assert list(weights) == [0, 0, 81, 0, 0, 0, 96]
    assert step_s == 1.0
    assert times.read() is None


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_is_timed_gives_the_same_bits_and_leaves_nothing(parts: int) -> None:
    weights = []
    for is_timed in (False, True):
        network, optimizer, images = build()
        times = LayerTimes(network, optimizer, torch.device("cpu"))
        for number in range(3):
            if is_timed and number != 1:
                times.arm()
            step(network, optimizer, images, parts)
            times.disarm()
            assert (times.read() is not None) == (is_timed and number != 1)
        assert not any(one._forward_hooks or one._forward_pre_hooks for one in network.modules())
        assert not optimizer._optimizer_step_pre_hooks
        weights.append([*network.state_dict().values()])
    assert all(map(torch.equal, *weights))


@pytest.mark.gpu
def test_events_time_the_layers_of_a_gpu() -> None:
    network, optimizer, images = build("cuda")
    times = LayerTimes(network, optimizer, torch.device("cuda"))
    for _ in range(2):
        times.arm()
        step(network, optimizer, images)
        times.disarm()
    measured: Any = times.read()
    assert np.isfinite(measured[1]).all()
    assert (measured[1][[2, 3, 6], :2] > 0).all()
    assert measured[2] > 0
