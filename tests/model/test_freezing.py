from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.core.errors import RecipeError
from headway.model import cifar_net
from headway.model.freezing import FreezeSchedule
from headway.model.model_recipe import FreezeAfterRecipe, ModelRecipe


def part(match: str, epochs: float) -> FreezeAfterRecipe:
    return FreezeAfterRecipe(match=match, after_epochs=epochs)


def schedule_of(model: nn.Module, parts: list[FreezeAfterRecipe], epoch: int) -> FreezeSchedule:
    return FreezeSchedule(model, ModelRecipe(factory="a:b", freeze_after=tuple(parts)), epoch)


def trained(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if value.requires_grad}


def test_each_part_is_frozen_at_its_own_position() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    everything = trained(model)
    freezing = schedule_of(model, [part("^1", 2), part("^0", 0.5)], epoch=100)
    for position, left in ((0, 6), (49, 6), (50, 4), (199, 4), (200, 2), (10_000, 2)):
        freezing.freeze_until(position)
        assert len(trained(model)) == left, position
    assert everything - trained(model) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    freezing.thaw()
    assert trained(model) == everything
    freezing.freeze_until(200)
    late = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    schedule_of(late, [part("^1", 2), part("^0", 0.5)], epoch=100).freeze_until(200)  # as a resumed run begins
    assert trained(late) == trained(model)


def test_backward_stops_above_what_is_frozen() -> None:
    """The first convolution's input then has no gradient, which is what the recipe saves."""
    model = cifar_net(widths=(8, 8, 8))
    asked = []
    hook = lambda module, inputs, outputs: asked.append(inputs[0].requires_grad)  # noqa: E731
    model.blocks[0].conv1.register_forward_hook(hook)  # type: ignore[operator, union-attr]
    freezing = schedule_of(model, [part("whiten", 3)], epoch=10)
    for position in (0, 30):
        freezing.freeze_until(position)
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert asked == [True, False]
    assert model.whiten.bias is not None
    assert model.whiten.bias.grad is None


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_an_optimizer_leaves_it_as_it_is(name: str) -> None:
    """Also its weight decay and its momentum."""
    from headway import optim

    torch.manual_seed(0)
    model = cifar_net(widths=(8, 8, 8))
    recipe = optim.read_optimizer(name=name, lr=0.01, weight_decay=0.1)
    optimizer, freezing = optim.build_optimizer(recipe, model), schedule_of(model, [part("blocks.0", 1)], epoch=2)
    kept = {}
    for position in range(4):
        freezing.freeze_until(position)
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if position == 1:
            kept = {key: value.clone() for key, value in model.state_dict().items()}
    for key, value in model.named_parameters():
        assert torch.equal(value, kept[key]) == (key.startswith("blocks.0") or not kept_trained(key)), key


def kept_trained(name: str) -> bool:
    return name != "whiten.weight" and not ("norm" in name and "weight" in name)


def test_what_cannot_be_meant_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RecipeError, match=r"model.freeze_after.1: 'head' matches no trained parameter. There are"):
        schedule_of(model, [part("bias", 1), part("head", 1)], epoch=10)
    with pytest.raises(RecipeError, match=r"every parameter would be frozen before the run ends. Leave out"):
        schedule_of(model, [part("bias", 1), part("weight", 2)], epoch=10)


def test_each_part_is_unfrozen_at_its_own_position() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    everything = trained(model)
    recipe = ModelRecipe(
        factory="a:b",
        freeze=("^0", "^1"),
        unfreeze_at=({"match": "^1", "at_epoch": 0.5}, {"match": "weight", "at_epoch": 2}),
        freeze_after=({"match": "^1.bias", "after_epochs": 3},),
    )
    # The builder leaves them trained, so that the optimizer has them.
    model[0].bias.requires_grad_(False)
    freezing = FreezeSchedule(model, recipe, epoch=100)
    head = {"2.weight", "2.bias"}
    for position, names in (
        (0, head),
        (49, head),
        (50, head | {"1.weight", "1.bias"}),
        (200, everything - {"0.bias"}),
        (300, everything - {"0.bias", "1.bias"}),
    ):
        freezing.freeze_until(position)
        assert trained(model) == names, position
    freezing.thaw()
    assert trained(model) == everything - {"0.bias"}
    freezing.freeze_until(60)
    assert trained(model) == head | {"1.weight", "1.bias"}
    # A number stands for all parameters of `freeze`.
    whole = ModelRecipe.model_validate({"factory": "a:b", "freeze": ["^0"], "unfreeze_at": 3})
    assert FreezeSchedule(model, whole, epoch=10)._changes[0][0] == 30
    with pytest.raises(RecipeError, match=r"model.unfreeze_at.0: '\^2' matches no parameter that model.freeze freezes"):
        FreezeSchedule(
            model, ModelRecipe(factory="a:b", freeze=("^0",), unfreeze_at=({"match": "^2", "at_epoch": 1},)), epoch=1
        )
