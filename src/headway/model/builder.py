"""Builds the network of a recipe: calls its factory, changes layers, loads weights, freezes parameters."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import HeadwayError, RecipeError, UsageError, UserCodeError, list_similar, suggest_nearest
from headway.core.user_code import FORM, check_arguments, import_user_object
from headway.model import factory_weights
from headway.model.model_recipe import ModelRecipe

# Importing torch takes seconds, and `import headway` must not.
if TYPE_CHECKING:
    import torch

LOG = logging.getLogger("headway.model")


def build_model(
    recipe: ModelRecipe, *, num_outputs: int, in_channels: int = 3, base: Path, loads_weights: bool = True
) -> torch.nn.Module:
    """Builds the network of a recipe on the CPU, with random numbers from torch's global generator.

    Args:
        recipe: the `model` part of a recipe.
        num_outputs: passed as `num_classes` to a factory with such an argument. A factory of torchvision that is asked
            for weights gets a new last layer instead, as it refuses another number of classes.
        in_channels: passed to a factory with such an argument.
        base: folder to which a user's file and `weights` are relative.
        loads_weights: False if trained weights will replace all others: neither `weights` nor those that a factory of
            timm or torchvision would fetch are loaded.

    Raises:
        RecipeError: the factory or its arguments are wrong, or a pattern of `freeze` matches nothing.
        UsageError: `weights` do not fit.
        UserCodeError: the factory itself failed; the cause carries its traceback.
    """
    from torch.nn import Module

    if ":" not in recipe.factory:
        raise _build_name_error(recipe.factory)
    factory = import_user_object(recipe.factory, base=base, what="model.factory")
    if not callable(factory):
        raise RecipeError(f"{recipe.factory!r} is a {type(factory).__name__}, no function", where="model.factory")
    source = recipe
    if not loads_weights:
        args = factory_weights.drop_factory_weights(recipe, factory)
        source = recipe.model_copy(update={"args": args, "weights": None})
    elif recipe.weights is not None:
        # The file replaces the weights that the factory would fetch, perhaps without a network to fetch them by.
        source = recipe.model_copy(update={"args": factory_weights.drop_factory_weights(recipe, factory)})
    # torchvision refuses `num_classes` beside weights: they need as many classes as they have.
    library = factory_weights.name_library(source)
    keeps_head = library == "torchvision" and factory_weights.find_torchvision_entry(factory, source.args) is not None
    optional_arguments = {} if keeps_head else {"num_classes": num_outputs}
    # timm's own name; it sums the pretrained filters of the first layer over the channels.
    optional_arguments |= {"in_chans" if library == "timm" else "in_channels": in_channels}
    model = _call_factory(factory, source, optional_arguments)
    if not isinstance(model, Module):
        what = f"{recipe.factory!r} gave a {type(model).__name__}, no torch.nn.Module"
        raise RecipeError(what, where="model.factory", fix="Name a function that returns the network, or its class.")
    if keeps_head and (head := factory_weights.replace_head(model, num_outputs)):
        LOG.info(f"The last layer {head!r} of the pretrained network begins anew with {num_outputs} outputs.")
    model = _apply_changes(model, recipe)
    if source.weights is not None:
        from headway.model import pretrained

        left_out = pretrained.load_weights(model, base / Path(source.weights).expanduser())
        # Only the head may be left out, and the user should know that it starts at random.
        if left_out:
            LOG.warning(f"{source.weights}: {', '.join(left_out)} begin anew: absent or of another size there.")
    _freeze_parameters(model, recipe.freeze)
    if recipe.unfreeze_at:
        from headway.model.freezing import find_unfrozen

        # They belong to the optimizer from the start; `FreezeSchedule` freezes them until they are trained.
        for _, parameter in find_unfrozen(model, recipe):
            parameter.requires_grad_(True)
    return model


def _build_name_error(name: str) -> RecipeError:
    """Builds the error for the bare name of a network, such as `resnet50`."""
    from headway import model

    hint = suggest_nearest(name, (one for one in dir(model) if one.islower()), only_close=True, prefix="headway.model:")
    timm = f"With timm installed, its networks are factory: timm:create_model, args: {{model_name: {name}}}"
    return RecipeError(f"{name!r} is not an import path", where="model.factory", fix=f"{hint} {FORM} {timm}".lstrip())


def find_initialiser(
    recipe: ModelRecipe, model: torch.nn.Module, *, base: Path
) -> Callable[[torch.Tensor], None] | None:
    """Returns the function that initialises a network with a first batch (float NCHW, normalised); None without one.

    Raises:
        RecipeError: `init` is not a function.
        UserCodeError: raised by the returned function if the user's own function fails.
    """
    import torch

    if recipe.init is not None:
        function = import_user_object(recipe.init, base=base, what="model.init")
        if not callable(function):
            raise RecipeError(f"{recipe.init!r} is a {type(function).__name__}, no function", where="model.init")
        name, arguments, more = recipe.init, [model], recipe.init_args
    # Loaded weights are not to be overwritten by an initialisation.
    elif recipe.weights is None and callable(getattr(model, "initialise", None)):
        function = model.initialise
        name, arguments, more = f"{type(model).__name__}.initialise", [], {}
    else:
        return None

    def initialise(images: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                function(*arguments, images, **more)
        except HeadwayError:
            raise
        except Exception as error:
            raise _build_user_error(name, error, "model.init") from error

    return initialise


def _call_factory(factory: Callable[..., Any], recipe: ModelRecipe, optional_arguments: dict[str, int]) -> Any:
    """Calls a factory with the recipe's `args`, and with those of the optional arguments that it accepts."""
    try:
        signature = inspect.signature(factory)
    # Some functions written in C have no signature.
    except (TypeError, ValueError):
        arguments = {name: value for name, value in optional_arguments.items() if name == "num_classes"} | recipe.args
        try:
            return factory(**arguments)
        except TypeError:
            arguments = recipe.args
    else:
        parameter_names = {
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        # **kwargs do not tell their names: most networks accept num_classes there, few accept in_channels.
        accepted_names = parameter_names | {"num_classes", "in_chans"} if takes_any_keyword else parameter_names
        # The user's own `args` win over `num_classes` and `in_channels`.
        arguments = {name: value for name, value in optional_arguments.items() if name in accepted_names} | recipe.args
        check_arguments(factory, recipe.factory, arguments=arguments, where="model.args")
    try:
        return factory(**arguments)
    except HeadwayError:
        raise
    except Exception as error:
        if (download_error := factory_weights.explain_download_error(recipe, error)) is not None:
            raise download_error from error
        raise _build_user_error(recipe.factory, error, "model.factory") from error


def _apply_changes(model: torch.nn.Module, recipe: ModelRecipe) -> torch.nn.Module:
    """Applies the recipe's changes to a network in place, and returns it. Names of parameters stay the same."""
    # Before weights are loaded: the recipe refuses both at once.
    if recipe.zero_init:
        from headway.model.residual_init import zero_init

        if not zero_init(model):
            what = "the network has no residual block whose last batch norm is known"
            fix = "Remove it; or give each block of yours a property `last_norm` that is its last batch norm."
            raise RecipeError(what, where="model.zero_init", fix=fix)
    if recipe.blur_pool:
        from headway.model.blur_pool import MIN_CHANNELS, add_blur_pool

        model, num_changed = add_blur_pool(model)
        if not num_changed:
            what = f"the network has no max pool and no convolution with a stride and {MIN_CHANNELS} input channels"
            fix = "Remove it. Pools that are called as functions are not seen: make them modules, as nn.MaxPool2d."
            raise RecipeError(what, where="model.blur_pool", fix=fix)
    if recipe.batch_norm is not None:
        from headway.model import batch_norm

        try:
            batch_norm.list_batch_norms(model)
            if recipe.batch_norm.ghost is not None:
                model = batch_norm.convert_to_ghost(model, recipe.batch_norm.ghost)
            if recipe.batch_norm.momentum is not None:
                batch_norm.set_momentum(model, recipe.batch_norm.momentum)
        except UsageError as error:
            where = f"model.batch_norm{error.where and f' ({error.where})'}"
            raise RecipeError(error.what, where=where, fix=error.fix) from None
    return model


def _build_user_error(name: str, error: Exception, where: str) -> UserCodeError:
    return UserCodeError(f"{name!r} failed: {type(error).__name__}: {error}", where=where)


def _freeze_parameters(model: torch.nn.Module, patterns: tuple[str, ...]) -> None:
    """Freezes the parameters that a pattern matches. Raises RecipeError if one matches none, or nothing is left."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if re.search(pattern, name)]
        if not matched:
            fix = f"Parameters of this network are for example: {list_similar(pattern, parameters)}."
            raise RecipeError(f"{pattern!r} matches no parameter", where="model.freeze", fix=fix)
        for name in matched:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        fix = "Leave out the pattern that matches the last layer."
        raise RecipeError("every parameter is frozen, nothing is left to train", where="model.freeze", fix=fix)
