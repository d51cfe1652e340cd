from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

import headway.model
from headway.core.errors import RecipeError, UsageError, UserCodeError
from headway.model import BatchNormRecipe, GhostBatchNorm, ModelRecipe, build_model, find_initialiser, small_net

NETS = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes, width=4):
        super().__init__(nn.Linear(3, width), nn.Linear(width, num_classes))

class Named(nn.Linear):
    def __init__(self, outputs, inputs): super().__init__(inputs, outputs)

class Starting(Net):
    def initialise(self, images): self[0].bias.copy_(images.mean().expand(4))

def keywords(**kwargs): return Net(**kwargs)
def gray(num_classes, in_channels): return nn.Linear(in_channels, num_classes)
def nothing(): return None
def fails(num_classes): raise ZeroDivisionError("of the user")
def init(model, images): nn.init.constant_(model[0].weight, images.sum().item())
def init_fails(model, images): raise KeyError("of the user")
NUMBER = 3
"""


RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101")

BLOCKS = """
from torch import nn

class Block(nn.Module):
    def __init__(self, norms):
        super().__init__()
        self.downsample = None
        for number in range(norms):
            setattr(self, f"bn{number + 1}", nn.BatchNorm2d(2))

def basic(num_classes):
    return nn.Sequential(Block(2), nn.Linear(2, num_classes))

def bottleneck(num_classes):
    return nn.Sequential(Block(3), nn.Linear(2, num_classes))
"""


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "nets.py").write_text(NETS)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def shapes(model: torch.nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim > 1]


@pytest.mark.parametrize(
    ("factory", "args", "expected"),
    [
        ("Net", {}, [(4, 3), (7, 4)]),
        ("Net", {"width": 5}, [(5, 3), (7, 5)]),
        ("Net", {"num_classes": 2}, [(4, 3), (2, 4)]),
        ("Named", {"outputs": 2, "inputs": 6}, [(2, 6)]),
        ("keywords", {"width": 2}, [(2, 3), (7, 2)]),
        ("gray", {}, [(7, 1)]),
        ("gray", {"in_channels": 2}, [(7, 2)]),
    ],
)
def test_a_factory_gets_what_it_takes(factory: str, args: dict[str, int], expected: object, base: Path) -> None:
    recipe = ModelRecipe(factory=f"nets.py:{factory}", args=args)
    assert shapes(build_model(recipe, num_outputs=7, in_channels=1, base=base)) == expected


@pytest.mark.parametrize("name", ["cifar_net", "small_net", "cifar_resnet", "alexnet", *RESNETS])
def test_our_networks_by_name(name: str, tmp_path: Path) -> None:
    recipe = ModelRecipe(factory=f"headway.model:{name}")
    with torch.device("meta"):
        model = build_model(recipe, num_outputs=3, in_channels=1, base=tmp_path)
    assert shapes(model)[0][1] == 1
    assert shapes(model)[-1][0] == 3
    assert name in dir(headway.model)


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("headway.model:cifarnet", {}, "model.factory: 'headway.model' has no 'cifarnet'. Did you mean 'cifar_net'?"),
        ("nets.py:NUMBER", {}, "model.factory: 'nets.py:NUMBER' is a int, no function"),
        ("nets.py:nothing", {}, "model.factory: 'nets.py:nothing' gave a NoneType, no torch.nn.Module"),
        ("nets.py:Net", {"widht": 3}, "model.args.widht: 'nets.py:Net' has no argument 'widht'. Did you mean 'width'?"),
        ("nets.py:Named", {"outputs": 3}, "model.args: 'nets.py:Named' cannot be called: missing a required argument"),
    ],
)
def test_a_factory_that_does_not_fit(factory: str, args: dict[str, int], message: str, base: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        build_model(ModelRecipe(factory=factory, args=args), num_outputs=7, base=base)
    assert str(caught.value).startswith(message)


def test_a_factory_that_fails_keeps_its_traceback(base: Path) -> None:
    with pytest.raises(UserCodeError, match=r"'nets\.py:fails' failed: ZeroDivisionError: of the user") as caught:
        build_model(ModelRecipe(factory="nets.py:fails"), num_outputs=7, base=base)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_without_signature_is_tried(base: Path) -> None:
    # dict(num_classes=7) works and tells no signature; next() takes no keywords at all.
    with pytest.raises(RecipeError, match="gave a dict"):
        build_model(ModelRecipe(factory="builtins:dict"), num_outputs=7, base=base)
    with pytest.raises(UserCodeError, match="TypeError"):
        build_model(ModelRecipe(factory="builtins:next"), num_outputs=7, base=base)


def test_weights_with_another_head_are_said(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    source = small_net(10)
    save_file(source.state_dict(), base / "ten.safetensors")
    recipe = ModelRecipe(factory="headway.model:small_net", weights="ten.safetensors")
    build_model(recipe, num_outputs=10, base=base)
    assert caplog.messages == []
    model = build_model(recipe, num_outputs=4, base=base)
    assert caplog.messages == ["ten.safetensors: head.weight, head.bias begin anew: absent or of another size there."]
    assert torch.equal(model.get_parameter("layer1.conv.weight"), source.get_parameter("layer1.conv.weight"))
    with pytest.raises(UsageError, match="nine"):
        build_model(recipe.model_copy(update={"weights": "nine.safetensors"}), num_outputs=4, base=base)


def test_switches_change_any_network_and_no_name(base: Path) -> None:
    plain = ModelRecipe(factory="headway.model:cifar_resnet", args={"depth": 8})
    torch.manual_seed(0)
    before = build_model(plain, num_outputs=4, base=base)
    save_file(before.state_dict(), base / "plain.safetensors")
    norm = BatchNormRecipe(ghost=5, momentum=0.8)
    switched = plain.model_copy(update={"blur_pool": True, "batch_norm": norm})
    torch.manual_seed(0)
    after = build_model(switched.model_copy(update={"zero_init": True}), num_outputs=4, base=base)
    assert list(after.state_dict()) == list(before.state_dict())
    differing = [
        name for name, value in before.state_dict().items() if not torch.equal(after.state_dict()[name], value)
    ]
    assert differing == [f"layer{stage}.0.bn2.weight" for stage in (1, 2, 3)]
    norms = [one for one in after.modules() if isinstance(one, GhostBatchNorm)]
    assert len(norms) == 7
    assert {one.group for one in norms} == {5}
    assert [one.momentum for one in norms] == pytest.approx([0.2] * 7)
    loaded = build_model(switched.model_copy(update={"weights": "plain.safetensors"}), num_outputs=4, base=base)
    images = torch.randn(4, 3, 16, 16)
    assert not torch.equal(loaded.eval()(images), before.eval()(images)), "it blurs"


def test_zero_init_knows_the_blocks_of_others(base: Path) -> None:
    """As torchvision and timm build_model them."""
    (base / "blocks.py").write_text(BLOCKS)
    for name, last in (("basic", "0.bn2"), ("bottleneck", "0.bn3")):
        recipe = ModelRecipe(factory=f"blocks.py:{name}", zero_init=True)
        state = build_model(recipe, num_outputs=4, base=base).state_dict()
        assert [key for key, value in state.items() if key.endswith("weight") and not value.any()] == [f"{last}.weight"]


def test_freeze_by_pattern(base: Path) -> None:
    recipe = ModelRecipe(factory="headway.model:small_net", freeze=(r"^layer1\.", r"layer4\.norm\.bias$"))
    model = build_model(recipe, num_outputs=4, base=base)
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    assert frozen == ["layer1.conv.weight", "layer1.norm.weight", "layer1.norm.bias", "layer4.norm.bias"]


def test_freeze_that_cannot_be_meant(base: Path) -> None:
    recipe = ModelRecipe(factory="headway.model:small_net", freeze=("headd",))
    with pytest.raises(RecipeError, match=r"model\.freeze: 'headd' matches no parameter\. .*for example: head\."):
        build_model(recipe, num_outputs=4, base=base)
    with pytest.raises(RecipeError, match="every parameter is frozen"):
        build_model(recipe.model_copy(update={"freeze": ("head", "layer")}), num_outputs=4, base=base)
    with pytest.raises(ValidationError, match="'\\(' is not a regular expression"):
        ModelRecipe(factory="a:b", freeze=("(",))
    with pytest.raises(ValidationError, match="Extra inputs"):
        ModelRecipe.model_validate({"factory": "a:b", "frezee": []})


def test_the_first_batch(base: Path) -> None:
    images = torch.full((2, 3), 0.5)

    def built(factory: str, **options: str) -> torch.nn.Module:
        recipe = ModelRecipe(factory=factory, **options)  # type: ignore[arg-type]
        model = build_model(recipe, num_outputs=7, base=base)
        call = find_initialiser(recipe, model, base=base)
        if call is not None:
            call(images)
        return model

    assert built("nets.py:Starting").get_parameter("0.bias").tolist() == [0.5] * 4
    with_function = built("nets.py:Starting", init="nets.py:init")
    assert with_function.get_parameter("0.weight").unique().tolist() == [3.0]
    assert with_function.get_parameter("0.bias").unique().numel() > 1  # the function stands instead of the method
    assert with_function.get_parameter("0.weight").requires_grad

    plain = ModelRecipe(factory="nets.py:Net")
    assert find_initialiser(plain, build_model(plain, num_outputs=7, base=base), base=base) is None

    source = built("nets.py:Starting")
    torch.nn.init.constant_(source.get_parameter("0.bias"), 9)
    save_file(source.state_dict(), base / "w.safetensors")
    loaded = built("nets.py:Starting", weights="w.safetensors")
    assert loaded.get_parameter("0.bias").tolist() == [9.0] * 4  # weights hold what initialise made once
    assert built("nets.py:Starting", weights="w.safetensors", init="nets.py:init").get_parameter("0.weight")[0, 0] == 3


def test_a_first_batch_that_fails(base: Path) -> None:
    recipe = ModelRecipe(factory="nets.py:Net", init="nets.py:init_fails")
    model = build_model(recipe, num_outputs=7, base=base)
    call = find_initialiser(recipe, model, base=base)
    assert call is not None
    with pytest.raises(UserCodeError, match=r"model\.init: 'nets\.py:init_fails' failed: KeyError"):
        call(torch.zeros(2, 3))
    with pytest.raises(RecipeError, match="is a int, no function"):
        find_initialiser(recipe.model_copy(update={"init": "nets.py:NUMBER"}), model, base=base)
