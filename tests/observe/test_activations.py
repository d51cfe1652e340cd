"""Percentiles of what modules give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests._waits import counted
from torch import Tensor, nn

from headway.core.errors import RecipeError
from headway.observe.activations import MAX_MODULES, MAX_SAMPLED_VALUES, PERCENTILES, ActivationPercentiles


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.relu, self.pair, self.unused = nn.ReLU(inplace=True), Pair(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        return self.relu(self.pair(x)[0] - 1)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def looked(watch: ActivationPercentiles, model: nn.Module, images: Tensor) -> dict[str, Any]:
    watch.arm()
    model(images)
    found = watch.read()
    assert found is not None
    return dict(zip(watch.names, found, strict=True))


def test_percentiles_are_those_of_the_whole_tensor() -> None:
    torch.manual_seed(0)
    model, images = Net(), torch.randn(32, 3, 24, 24) ** 3
    watch = ActivationPercentiles(model, ["conv|bn", "relu"])
    assert watch.names == ("conv", "bn (before)", "bn", "relu")
    found = looked(watch, model, images)
    conv = model.conv(images)
    given = {"conv": conv, "bn (before)": conv, "bn": model.bn(conv), "relu": model.bn(conv).relu()}
    for name, tensor in given.items():
        values = np.sort(tensor.detach().numpy().ravel())
        assert len(values) > MAX_SAMPLED_VALUES
        share = np.searchsorted(values, found[name], side="right") / len(values)
        for place, percent in enumerate(PERCENTILES):
            assert share[place] >= percent / 100 - 0.02, name
            if found[name][place] > 0 or name != "relu":  # where a share of the numbers is 0, all of it is below
                assert share[place] <= percent / 100 + 0.02, name


def test_a_small_tensor_is_taken_whole_and_the_layout_does_not_count() -> None:
    torch.manual_seed(0)
    model, images = Net(), torch.randn(2, 3, 8, 8)
    watch = ActivationPercentiles(model, ["conv"])
    plain = looked(watch, model, images)["conv"]
    values = model.conv(images).detach().numpy().ravel()
    assert plain == pytest.approx(np.percentile(values, PERCENTILES, method="nearest"))
    last = looked(watch, model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last))
    assert last["conv"] == pytest.approx(plain, abs=1e-6)
    large = torch.randn(64, 3, 16, 16)
    one, other = (
        looked(watch, model, form)["conv"] for form in (large, large.contiguous(memory_format=torch.channels_last))
    )
    assert one == pytest.approx(other, abs=1e-6)


def test_it_looks_at_the_next_call_alone_and_waits_for_nothing() -> None:
    model, images = Net(), torch.randn(4, 3, 8, 8)
    watch = ActivationPercentiles(model, [".*"])
    with counted() as waits:
        watch.arm()
        model(images)
        left = [name for name, one in model.named_modules() if one._forward_hooks]
        model(1e9 * images)
    assert not waits
    assert left == ["unused"]
    found = watch.read()
    assert found is not None
    assert np.nanmax(found) < 1e3
    of = dict(zip(watch.names, found, strict=True))
    assert np.isnan(of["unused"]).all()
    assert np.isnan(of["pair"]).all(), "two tensors are no tensor"
    assert of["relu"].max() > 1, "the first of its two calls"
    assert watch.read() is None
    assert not [name for name, one in model.named_modules() if one._forward_hooks]
    model(images)
    assert watch.read() is None


def test_patterns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"^observe.activations: 'bn1' matches no .* example: bn"):
        ActivationPercentiles(Net(), ["conv", "bn1"])
    many = nn.Sequential(*[nn.Identity() for _ in range(MAX_MODULES + 1)])
    with pytest.raises(RecipeError, match=f"match {MAX_MODULES + 1} modules; the most is {MAX_MODULES}"):
        ActivationPercentiles(many, [".*"])
    with pytest.raises(RecipeError, match="The network has no modules"):
        ActivationPercentiles(nn.Identity(), [".*"])
