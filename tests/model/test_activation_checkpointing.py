"""Recompute: less memory, and nothing else changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from torch import nn

from headway.comm.batch_norm import convert_sync_batchnorm
from headway.core.errors import UsageError
from headway.model import cifar_net, cifar_resnet, resnet18, resnet50, small_net
from headway.model.activation_checkpointing import checkpoint_activations
from headway.model.batch_norm import convert_to_ghost
from headway.setup.micro_batch import measure_saved_bytes


class Drop(nn.Module):
    """Leaves out by random numbers of torch, numpy and Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.3, self.training)
        return x * (0.5 + random.random()) * float(0.5 + np.random.random())


class Stage(nn.Module):
    def __init__(self, width: int, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width, momentum=momentum)
        self.drop = Drop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.drop(self.norm(self.conv(x))), inplace=True)


def stages() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Stage(8), Stage(8, None), nn.Sequential(Stage(8), Stage(8)), nn.Flatten(),
        nn.Linear(8 * 64, 5),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], list[str] | None]] = {
    "stages": (stages, [r"^[123]$"]),
    "stages, inner ones": (stages, [r"norm$", "drop$"]),
    "ghost batches": (lambda: convert_to_ghost(stages(), 3), [r"^[123]$"]),
    "small_net": (lambda: small_net(5), None),
    "cifar_net": (lambda: cifar_net(5, widths=(8, 8, 8)), None),
    "cifar_resnet": (lambda: cifar_resnet(5, depth=8), None),
}


def trained(model: nn.Module, side: int, steps: int = 3) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """State after some steps, and the random numbers that come next."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        x = torch.randn(8, 3, side, side, generator=torch.Generator().manual_seed(number))
        for part in x.split(5):
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), [torch.rand(3), torch.tensor([random.random(), np.random.random()])]


@pytest.mark.parametrize("case", NETS)
def test_weights_buffers_and_generators_end_as_without_it(case: str) -> None:
    make, patterns = NETS[case]
    side = 24 if case == "cifar_net" else 8
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = make()
        names = list(model.state_dict())
        if again:
            assert checkpoint_activations(model, patterns)
            assert list(model.state_dict()) == names
        found.append(trained(model, side))
    for name, value in found[0][0].items():
        assert torch.equal(found[1][0][name], value), name
    assert all(torch.equal(one, two) for one, two in zip(found[0][1], found[1][1], strict=True))


def synchronised(rank: Rank) -> list[dict[str, torch.Tensor]]:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = convert_sync_batchnorm(stages(), rank.world.create_group(name=f"norm {again}"))
        if again:
            checkpoint_activations(model, [r"^[123]$"])
        torch.manual_seed(rank.rank)
        random.seed(1)
        np.random.seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            x = torch.randn(3 + rank.rank, 3, 8, 8, generator=torch.Generator().manual_seed(number + 10 * rank.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def test_batch_norm_over_ranks_ends_as_without_it() -> None:
    for plain, again in run_ranks(2, synchronised):
        for name, value in plain.items():
            assert torch.equal(again[name], value), name


@pytest.mark.parametrize("make", [lambda: cifar_resnet(5, depth=20), lambda: resnet18(5), lambda: resnet50(5)])
def test_less_is_kept_for_the_backward_pass(make: Callable[[], nn.Module]) -> None:
    model = make()

    def attempt(samples: int) -> None:
        model(torch.zeros(samples, 3, 32, 32)).sum().backward()

    before = measure_saved_bytes(attempt, 4)
    checkpoint_activations(model)
    assert measure_saved_bytes(attempt, 4) < before / 2


def test_a_copy_computes_with_its_own_weights() -> None:
    model = small_net(5)
    checkpoint_activations(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for value in other.parameters():
            value.zero_()
    x = torch.randn(4, 3, 8, 8)
    assert model(x).abs().max() > 0
    assert other(x).abs().max() == 0
    with torch.no_grad():
        assert model(x).abs().max() > 0


def test_the_outermost_of_modules_inside_each_other_is_taken() -> None:
    names = checkpoint_activations(resnet18(5), ["layer", r"conv1$"])
    assert sorted(names) == ["conv1", "layer1", "layer2", "layer3", "layer4"]


BAD: dict[str, tuple[nn.Module, list[str] | None, str]] = {
    "nothing matches": (
        small_net(5), ["^lager3"], "'^lager3' matches no module. Modules of this network are for example: layer3",
    ),
    "one of two": (small_net(5), ["^layer1$", "x"], "'x' matches no module"),
    "a list": (
        nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), ["^0$"],
        r"0 is a ModuleList, which is not called as a whole. Name the modules in it, for example '^0\.[^.]+$'",
    ),
    "no blocks": (nn.Sequential(nn.Linear(2, 2)), None, "the network has none of Headway's own blocks. Name"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_computed_again_is_refused(case: str) -> None:
    model, patterns, sentence = BAD[case]
    with pytest.raises(UsageError) as error:
        checkpoint_activations(model, patterns)
    assert sentence in str(error.value)
    assert not any("forward" in vars(module) for module in model.modules())


def test_no_module_is_taken_twice() -> None:
    model = small_net(5)
    checkpoint_activations(model, ["^layer1$"])
    with pytest.raises(UsageError, match="not called as a whole"):
        checkpoint_activations(model, ["^layer1$"])
