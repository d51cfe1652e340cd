"""The networks that the recipes need, and the way from a recipe to a network. Loaded when first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.model.cifar import cifar_net as cifar_net
    from headway.model.resnet import resnet18 as resnet18
    from headway.model.resnet import resnet34 as resnet34
    from headway.model.resnet import resnet50 as resnet50
    from headway.model.resolve import ModelRecipe as ModelRecipe
    from headway.model.resolve import build as build
    from headway.model.resolve import initialiser as initialiser
    from headway.model.small import small_net as small_net

_HOMES = {
    "cifar_net": "cifar",
    "resnet18": "resnet",
    "resnet34": "resnet",
    "resnet50": "resnet",
    "ModelRecipe": "resolve",
    "build": "resolve",
    "initialiser": "resolve",
    "small_net": "small",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
