"""Layer-wise rates: the order of the layers of any network, the factor of each group, and that 1 changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headway.core.errors import RecipeError, UsageError
from headway.model import cifar_net, resnet18, small_net
from headway.optim import build_optimizer, read_optimizer, set_lr, split_layers
from headway.optim.layer_decay import order_layers, scale_layers


class Block(nn.Module):
    """A transformer's: its perceptron is a Sequential, and no sequence of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 1)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 3, 4))
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.patches = nn.Conv2d(3, 4, 2)
        self.encoder = Encoder()
        self.head = nn.Linear(4, 2)


def layers_of(model: nn.Module) -> list[list[str]]:
    found: dict[int, list[str]] = {}
    for name, place in order_layers(model).items():
        found.setdefault(place, []).append(name)
    assert sorted(found) == list(range(len(found)))
    return [found[place] for place in range(len(found))]


def test_a_residual_network_has_the_layers_of_timm() -> None:
    """Stem, eight blocks, head: timm's `group_matcher` of its resnet18, which has the same names."""
    layers = layers_of(resnet18(10))
    assert [names[0].rpartition(".")[0] for names in layers] == [
        "conv1",
        *(f"layer{stage}.{block}.conv1" for stage in range(1, 5) for block in range(2)),
        "fc",
    ]
    assert layers[0] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert {name.partition(".downsample")[0] for name in layers[3] if "downsample" in name} == {"layer2.0"}


def test_a_transformer_has_the_layers_of_beit() -> None:
    """Embeddings with the patches, each block whole, the last norm with the last block, the head."""
    layers = layers_of(Transformer())
    assert layers[0] == ["token", "patches.weight", "patches.bias", "encoder.position"]
    assert {name.rpartition("layers.")[2][0] for name in layers[1]} == {"0"}
    assert layers[2][-2:] == ["encoder.norm.weight", "encoder.norm.bias"]
    assert layers[3:] == [["head.weight", "head.bias"]]


@pytest.mark.parametrize(("model", "layers"), [(small_net(3), 5), (cifar_net(3), 5), (nn.Linear(2, 2), 1)])
def test_every_parameter_has_a_layer(model: nn.Module, layers: int) -> None:
    order = order_layers(model)
    assert order.keys() == dict(model.named_parameters()).keys()
    assert max(order.values()) == layers - 1


def test_odd_networks() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.BatchNorm1d(2), nn.Linear(2, 1))
    assert order_layers(model) == {"0.weight": 0, "0.bias": 0, "3.weight": 0, "3.bias": 0, "4.weight": 1, "4.bias": 1}
    assert order_layers(nn.BatchNorm1d(2)) == {"weight": 0, "bias": 0}
    assert order_layers(nn.ReLU()) == {}


@given(st.floats(0.1, 1))
def test_each_layer_has_a_factor_below_the_next_ones(decay: float) -> None:
    model = small_net(3)
    optimizer = build_optimizer(read_optimizer(name="sgd", lr=0.5, layer_decay=decay), model)
    expected = {f"layer{place}": decay ** (5 - place) for place in range(1, 5)} | {"head": 1.0}
    rates = rates_of(optimizer, model)
    assert rates == {name: pytest.approx(0.5 * expected[name.partition(".")[0]]) for name in rates}
    set_lr(optimizer, 2.0)
    assert rates_of(optimizer, model) == {name: pytest.approx(4 * rate) for name, rate in rates.items()}


def rates_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, float]:
    names = {id(value): name for name, value in model.named_parameters()}
    found = {names[id(one)]: group["lr"] for group in optimizer.param_groups for one in group["params"]}
    assert found.keys() == {name for name, value in model.named_parameters() if value.requires_grad}
    return found


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "muon"])
def test_a_factor_of_one_changes_nothing(name: str) -> None:
    def train(**more: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = small_net(3)
        optimizer = build_optimizer(read_optimizer(name=name, lr=0.1, weight_decay=0.01, **more), model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3, 8, 8)).square().sum().backward()
            optimizer.step()
        return [value.detach() for value in model.parameters()]

    plain, one, half = train(), train(layer_decay=1.0), train(layer_decay=0.5)
    assert all(torch.equal(a, b) for a, b in zip(plain, one, strict=True))
    assert not torch.equal(plain[0], half[0])


def test_groups_and_frozen_layers_keep_their_meaning() -> None:
    """A group's own factor comes on top, decay is as without layers, and freezing a layer changes no other's rate."""
    model = small_net(3)
    model.layer1.requires_grad_(False)
    groups = [{"match": "norm", "lr_scale": 3, "weight_decay": 0.2}, {"match": ".*"}]
    recipe = read_optimizer(name="sgd", lr=1.0, weight_decay=0.1, no_decay=True, layer_decay=0.5, groups=groups)
    optimizer = build_optimizer(recipe, model)
    rates = rates_of(optimizer, model)
    assert rates["layer2.conv.weight"] == pytest.approx(0.5**3)
    assert rates["layer2.norm.weight"] == pytest.approx(3 * 0.5**3)
    assert rates["head.weight"] == 1
    names = {id(value): name for name, value in model.named_parameters()}
    decays = {names[id(one)]: group["weight_decay"] for group in optimizer.param_groups for one in group["params"]}
    assert (decays["layer2.norm.bias"], decays["head.weight"], decays["head.bias"]) == (0.2, 0.1, 0)


def test_groups_for_an_optimizer_of_torch() -> None:
    model = small_net(3)
    optimizer = torch.optim.AdamW(split_layers(model, lr=0.01, layer_decay=0.5, weight_decay=0.05))
    assert rates_of(optimizer, model)["layer1.conv.weight"] == pytest.approx(0.01 / 16)
    assert {(one.ndim > 1, group["weight_decay"]) for group in optimizer.param_groups for one in group["params"]} == {
        (True, 0.05),
        (False, 0.0),
    }


@pytest.mark.parametrize("decay", [0, -0.5, 1.1, float("nan")])
def test_factors_that_cannot_be_meant(decay: float) -> None:
    with pytest.raises(UsageError, match="Give it a number above 0 and at most 1"):
        scale_layers(small_net(3), decay)
    with pytest.raises(RecipeError, match="layer_decay"):
        read_optimizer(name="sgd", lr=1.0, layer_decay=decay)
    with pytest.raises(UsageError, match="no parameter to train"):
        split_layers(nn.ReLU(), lr=1, layer_decay=0.5)
