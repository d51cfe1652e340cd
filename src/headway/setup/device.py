"""The device of a run: the recipe's name, checked against this machine."""

from __future__ import annotations

import torch

from headway.core.errors import RecipeError
from headway.setup.recipe import TrainRecipe


def resolve_device(recipe: TrainRecipe, *, is_dry_run: bool) -> torch.device:
    """Returns the device that the recipe names. Raises RecipeError if this machine lacks it.

    Args:
        is_dry_run: this is a dry run, in which a CPU stands in for an absent GPU.
    """
    name = recipe.device
    if is_dry_run and not torch.cuda.is_available():
        name = "cpu" if name.startswith("cuda") else name
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"there is no device {name!r}", where="device", fix="Set cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError("PyTorch sees no GPU here", where="device", fix="Set device to cpu or auto.")
    if device.type not in ("cpu", "cuda"):
        raise RecipeError(f"training on {device.type} is not supported", where="device", fix="Set cpu or cuda.")
    return device
