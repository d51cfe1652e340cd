"""Weights that factories of torchvision and timm bring: asked for by name, their head replaced, not fetched again."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model import _hubs

from headway.core.errors import RecipeError, UsageError, UserCodeError
from headway.model.builder import build_model
from headway.model.factory_weights import find_input_format, replace_head
from headway.model.model_recipe import ModelRecipe

IMAGENET = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
TIMM, VISION = "timm:create_model", "torchvision.models:tiny"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of both packages, which can be imported during the test."""
    file = _hubs.write_packages(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield torch.load(file, weights_only=True)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
        del sys.modules[name]


def recipe(factory: str, **args: Any) -> ModelRecipe:
    return ModelRecipe(factory=factory, args=args)


def build(model: ModelRecipe, **more: Any) -> torch.nn.Module:
    return build_model(model, num_outputs=3, base=Path(), **more)


def fetched(library: str) -> list[str]:
    return importlib.import_module(f"{library}.models").FETCHED


@pytest.mark.parametrize("name", ["IMAGENET1K_V1", "Tiny_Weights.IMAGENET1K_V1"])
@pytest.mark.parametrize("factory", [VISION, "torchvision.models:get_model"])
def test_torchvision_by_name(
    factory: str, name: str, state: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """torchvision refuses another number of classes beside weights, so the last layer is replaced."""
    more = {"name": "tiny"} if factory.endswith("get_model") else {}
    caplog.set_level(logging.INFO, logger="headway")
    asked = recipe(factory, weights=name, **more)
    found = find_input_format(asked, base=Path())
    assert found is not None
    assert (found.mean, found.std) == IMAGENET
    assert (found.size, found.share, found.origin) == ((24, 24), 0.75, "torchvision's Tiny_Weights.IMAGENET1K_V1")
    model = build(asked)
    assert fetched("torchvision") == ["IMAGENET1K_V1"]
    assert torch.equal(model.get_parameter("conv1.weight"), state["conv1.weight"])
    assert model.get_parameter("fc.weight").shape == (3, 4)
    assert caplog.messages == ["The last layer 'fc' of the pretrained network begins anew with 3 outputs."]
    # As a run is evaluated or resumed: its own weights follow, and nothing is fetched.
    again = build(asked, loads_weights=False)
    assert fetched("torchvision") == ["IMAGENET1K_V1"]
    assert [(name, value.shape) for name, value in again.named_parameters()] == [
        (name, value.shape) for name, value in model.named_parameters()
    ]


def test_torchvision_keeps_a_head_that_fits(state: dict[str, torch.Tensor]) -> None:
    asked = recipe(VISION, weights="DEFAULT")
    model = build_model(asked, num_outputs=1000, base=Path())
    assert fetched("torchvision") == ["IMAGENET1K_V2"]
    assert torch.equal(model.get_parameter("fc.weight"), state["fc.weight"])


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        (
            VISION,
            {"weights": "IMAGENET1K_V3"},
            "weights: Tiny_Weights has no 'IMAGENET1K_V3'. Did you mean 'IMAGENET1K_V",
        ),
        (VISION, {"weights": True}, "Tiny_Weights has no 'True'"),
        (VISION, {"pretrained": True}, "args.pretrained: torchvision's networks take the name of their weights. Set"),
        ("torchvision.models:get_model", {"name": "tony", "weights": "DEFAULT"}, "Unknown model tony"),
        ("torchvision.network:Net", {"weights": "DEFAULT"}, "torchvision has no weights for this factory"),
    ],
)
@pytest.mark.usefixtures("state")
def test_weights_that_torchvision_does_not_have(factory: str, args: dict[str, Any], message: str) -> None:
    for call in (
        lambda: find_input_format(recipe(factory, **args), base=Path()),
        lambda: build(recipe(factory, **args)),
    ):
        with pytest.raises(RecipeError) as caught:
            call()
        assert message in str(caught.value)


@pytest.mark.parametrize("factory", [TIMM, "timm.models:tiny"])
def test_timm_by_name(factory: str, state: dict[str, torch.Tensor]) -> None:
    more = {"model_name": "tiny"} if factory == TIMM else {}
    asked = recipe(factory, pretrained=True, **more)
    found = find_input_format(asked, base=Path())
    assert found is not None
    assert (found.mean, found.std, found.size, found.share) == ((127.5,) * 3, (63.75,) * 3, (24, 24), 0.75)
    assert found.origin == "timm's tiny.a1_in1k"
    model = build(asked)
    assert torch.equal(model.get_parameter("conv1.weight"), state["conv1.weight"])
    assert model.get_parameter("fc.weight").shape == (3, 4)
    gray = build(asked, in_channels=1)
    assert torch.equal(gray.get_parameter("conv1.weight"), state["conv1.weight"].sum(dim=1, keepdim=True))
    assert len(fetched("timm")) == 2
    # As a run is evaluated or resumed.
    assert not torch.equal(build(asked, loads_weights=False).get_parameter("conv1.weight"), state["conv1.weight"])
    assert len(fetched("timm")) == 2
    assert find_input_format(recipe(factory, **more), base=Path()) is None, "a network that begins anew"


@pytest.mark.usefixtures("state")
def test_what_timm_is_told_about_its_weights_counts() -> None:
    def mean_of(**args: Any) -> tuple[str, float]:
        found = find_input_format(recipe(TIMM, pretrained=True, **args), base=Path())
        assert found is not None
        return found.origin, found.mean[0]

    assert mean_of(model_name="tiny.b2_in22k") == ("timm's tiny.b2_in22k", 127.5)
    assert mean_of(model_name="tiny.a1_in1k", pretrained_cfg="b2_in22k") == ("timm's tiny.a1_in1k", 127.5)
    assert mean_of(model_name="tiny", pretrained_cfg_overlay={"mean": (0.1, 0.1, 0.1)})[1] == 25.5
    assert mean_of(model_name="tiny", pretrained_cfg={"mean": [0.2] * 3, "std": [0.1] * 3}) == ("timm's tiny", 51.0)
    assert mean_of(model_name="local-dir:/somewhere")[1] == 63.75
    assert fetched("timm") == []
    assert find_input_format(recipe(TIMM, pretrained=True, model_name="other"), base=Path()) is None


@pytest.mark.parametrize(
    ("factory", "args"), [(TIMM, {"model_name": "tiny", "pretrained": True}), (VISION, {"weights": "DEFAULT"})]
)
@pytest.mark.usefixtures("state")
def test_weights_that_cannot_be_fetched(factory: str, args: dict[str, Any]) -> None:
    errors = importlib.import_module(f"{factory.partition(':')[0].partition('.')[0]}.models").ERROR
    errors.append(ConnectionError("no route to the host.\nA page of advice"))
    with pytest.raises(UsageError) as caught:
        build(recipe(factory, **args))
    assert f"the pretrained weights of {factory!r} could not be fetched: no route to the host. Check" in str(
        caught.value
    )
    assert "set model.weights to it" in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)
    # Another fault of the library is shown as it is.
    errors[:] = [ZeroDivisionError()]
    with pytest.raises(UserCodeError):
        build(recipe(factory, **args))


def test_a_last_layer_that_cannot_be_replaced() -> None:
    conv = torch.nn.Sequential(torch.nn.Conv2d(3, 9, 1), torch.nn.ReLU())
    assert replace_head(conv, 9) == ""
    assert replace_head(conv, 2) == "0"
    assert conv[0].weight.shape == (2, 3, 1, 1)
    with pytest.raises(RecipeError, match="its last layer '1' is a BatchNorm2d"):
        replace_head(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm2d(2)), 3)


def test_a_file_of_ones_own_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The file's folder is put on the path, where later tests would find this timm.
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "timm.py").write_text("import torch\ndef build(pretrained):\n    return torch.nn.Linear(1, 1)\n")
    asked = recipe("timm.py:build", pretrained=True)
    assert find_input_format(asked, base=tmp_path) is None
    assert build_model(asked, num_outputs=1, base=tmp_path, loads_weights=False) is not None
