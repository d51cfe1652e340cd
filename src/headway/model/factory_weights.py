"""Weights that factories of timm and torchvision bring themselves: their InputFormat, their arguments, their head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import RecipeError, UsageError, suggest_nearest
from headway.core.user_code import GIVEN, import_user_object
from headway.model.input_format import InputFormat, read_input_format, read_timm_config
from headway.model.model_recipe import ModelRecipe

# Importing torch takes seconds, and a recipe is validated without it.
if TYPE_CHECKING:
    import torch

Factory = Callable[..., Any]

# Sources whose configuration timm reads when it makes the network.
TIMM_SOURCES = ("hf-hub:", "hf_hub:", "local-dir:")

# Packages whose errors mean that a file could not be fetched; urllib's are OSErrors.
CLIENTS = ("httpx", "requests", "urllib3", "huggingface_hub")


def name_library(recipe: ModelRecipe) -> str:
    """Returns `timm` or `torchvision` if the recipe names a factory of it; else an empty text."""
    source = recipe.factory.rpartition(":")[0]
    library = source.partition(".")[0]
    return library if library in ("timm", "torchvision") and not source.endswith(".py") else ""


def find_input_format(recipe: ModelRecipe, *, base: Path) -> InputFormat | None:
    """Finds how images must look to the weights of a recipe; None if it has none, or they do not say.

    Weights of a file (`model.weights`) count before those of a factory, as they replace them.

    Args:
        base: folder to which `weights` is relative.

    Raises:
        RecipeError: no such factory, or torchvision has no weights of this name.
    """
    if recipe.weights is not None:
        return read_input_format(base / Path(recipe.weights).expanduser(), recipe.weights)
    library = name_library(recipe)
    if recipe.factory.startswith(GIVEN):
        # Only timm's networks tell it of themselves. A size is not taken: the network may have begun at random.
        config = getattr(import_user_object(recipe.factory, base=base, what="model.factory")(), "pretrained_cfg", None)
        found = read_timm_config(config, "the network's pretrained_cfg") if isinstance(config, dict) else None
        return None if found is None else replace(found, size=None, share=None)
    if not library:
        return None
    factory = import_user_object(recipe.factory, base=base, what="model.factory")
    if library == "torchvision":
        entry = find_torchvision_entry(factory, recipe.args)
        return None if entry is None else _read_torchvision_format(entry)
    return _read_timm_format(factory, recipe.args) if recipe.args.get("pretrained") else None


def find_torchvision_entry(factory: Factory, args: dict[str, Any]) -> Any:
    """Returns the entry of torchvision's enum of weights that `args` names; None if they name none.

    Raises:
        RecipeError: there is no such entry, or `pretrained` is used, which torchvision has given up.
    """
    if args.get("pretrained"):
        fix = "Set model.args.weights: DEFAULT instead."
        raise RecipeError(
            "torchvision's networks take the name of their weights", where="model.args.pretrained", fix=fix
        )
    wanted = args.get("weights")
    if wanted is None:
        return None
    from torchvision.models import get_model_weights

    # `torchvision.models:get_model` has the name of the network among its arguments.
    network = args.get("name", factory) if getattr(factory, "__name__", "") == "get_model" else factory
    try:
        entries = get_model_weights(network)
    # torchvision's own sentence for a name that it does not have; a class such as ResNet has no weights.
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"torchvision has no weights for this factory: {error}", where="model.args.weights") from None
    name = str(wanted).removeprefix(f"{entries.__name__}.")
    if name not in entries.__members__:
        fix = suggest_nearest(name, entries.__members__)
        raise RecipeError(f"{entries.__name__} has no {name!r}", where="model.args.weights", fix=fix)
    return entries[name]


def drop_factory_weights(recipe: ModelRecipe, factory: Factory) -> dict[str, Any]:
    """Returns the arguments that make the same network without its pretrained weights, which are not fetched."""
    library, args = name_library(recipe), dict(recipe.args)
    if library == "timm":
        # `checkpoint_path` is a file that need not be there any more.
        return {name: value for name, value in args.items() if name not in ("pretrained", "checkpoint_path")}
    if library == "torchvision" and (entry := find_torchvision_entry(factory, args)) is not None:
        del args["weights"]
        # Three families of torchvision take settings from their weights.
        family = type(entry).__module__.rpartition(".")[2]
        settings: dict[str, dict[str, Any]] = {
            "googlenet": {"transform_input": True, "aux_logits": False, "init_weights": False},
            "inception": {"transform_input": True, "init_weights": False},
            "vision_transformer": {"image_size": (entry.meta.get("min_size") or (224,))[0]},
        }
        return settings.get(family, {}) | args
    return args


def explain_download_error(recipe: ModelRecipe, error: Exception) -> UsageError | None:
    """Returns a sentence for weights that a factory could not fetch; None if `error` means another thing."""
    if not name_library(recipe) or not (recipe.args.get("pretrained") or recipe.args.get("weights")):
        return None
    if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in CLIENTS:
        return None
    # The messages of some clients are a page long.
    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    what = f"the pretrained weights of {recipe.factory!r} could not be fetched: {reason}"
    fix = (
        "Check the connection of this machine. Or fetch the file on another one, set model.weights to it, and leave "
        "the weights out of model.args."
    )
    return UsageError(what, where="model.args", fix=fix)


def replace_head(model: torch.nn.Module, num_outputs: int) -> str:
    """Replaces the last linear layer or convolution by one with `num_outputs` outputs, if it has other ones.

    Returns:
        the replaced module's name; empty if it fits already.

    Raises:
        RecipeError: the last module with parameters is neither.
    """
    from torch import nn

    name, head = [
        (name, module) for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    ][-1]
    made: nn.Module
    if isinstance(head, nn.Linear):
        if head.out_features == num_outputs:
            return ""
        made = nn.Linear(head.in_features, num_outputs, bias=head.bias is not None)
    elif isinstance(head, nn.Conv2d) and head.groups == 1:
        if head.out_channels == num_outputs:
            return ""
        size: Any = head.kernel_size
        made = nn.Conv2d(head.in_channels, num_outputs, size, bias=head.bias is not None)
    else:
        what = f"its last layer {name!r} is a {type(head).__name__}, and Headway can replace linear layers only"
        raise RecipeError(what, where="model.factory", fix="Write a factory that replaces the layer, in a file.")
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, made)
    return str(name)


def _read_torchvision_format(entry: Any) -> InputFormat | None:
    """Reads the InputFormat of the entry's transforms, torchvision's preset of evaluation."""
    preset = entry.transforms()
    mean, std = getattr(preset, "mean", None), getattr(preset, "std", None)
    # Presets of other tasks than classification do not normalise.
    if not mean or not std:
        return None
    (crop,), (resized,) = getattr(preset, "crop_size", (None,)), getattr(preset, "resize_size", (None,))
    return read_timm_config(
        {
            "mean": list(mean),
            "std": list(std),
            "input_size": (len(mean), crop, crop) if crop else None,
            "crop_pct": crop / max(crop, resized) if crop and resized else None,
        },
        f"torchvision's {type(entry).__name__}.{entry.name}",
    )


def _read_timm_format(factory: Factory, args: dict[str, Any]) -> InputFormat | None:
    """Reads timm's `pretrained_cfg` of the weights that `args` name, as `timm.create_model` finds it."""
    import timm

    of_any = getattr(factory, "__name__", "") == "create_model"
    name = str(args.get("model_name", "") if of_any else factory.__name__)
    given, overlay = args.get("pretrained_cfg"), args.get("pretrained_cfg_overlay")
    if name.startswith(TIMM_SOURCES):
        # Only timm knows where such a configuration lies. Without weights the network is made in a second or two.
        rest = {key: value for key, value in args.items() if key not in ("pretrained", "checkpoint_path")}
        found = factory(**rest).pretrained_cfg
    elif isinstance(given, dict):
        found = given
    else:
        # A tag of its own takes the place of the name's: `resnet18.a1_in1k` with `pretrained_cfg: tv_in1k`.
        tagged = f"{name.partition('.')[0]}.{given}" if given else name
        found = timm.models.get_pretrained_cfg(tagged)
    if found is None:
        return None
    config = dict(found) if isinstance(found, dict) else found.to_dict()
    tag = config.get("tag")
    shown = name if "." in name or not tag else f"{name}.{tag}"
    return read_timm_config({**config, **(overlay or {})}, f"timm's {shown}")
