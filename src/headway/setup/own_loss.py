"""The user's own loss by import path: a function or a class, checked for one differentiable number a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headway.core.errors import RecipeError
from headway.core.user_code import check_arguments, import_user_object, name_user_errors, read_parameters

LOSS = "task.loss"
PerSample = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs and labels that returns one number for each sample, [b]."""


def build_own_loss(path: str, arguments: Mapping[str, Any], base: Path) -> PerSample:
    """Builds the loss of each sample from an import path.

    A function is called as loss(outputs, labels, **arguments). A class is built with the arguments, and called with
    outputs and labels. A parameter `reduction` that the recipe leaves out is set to 'none', as torch's losses need it.
    Losses of the shape of the outputs, [b, outputs], are averaged over the outputs of each sample.

    Args:
        base: folder that a file's path is relative to.

    Raises:
        RecipeError: there is no such loss, its arguments do not fit, or it has parameters. The returned function raises
            it if the shape is wrong, or the losses have no gradient.
        UserCodeError: raised by the returned function if the user's own code fails.
    """
    found = import_user_object(path, base=base, what=LOSS)
    if not callable(found):
        raise RecipeError(f"{path!r} is a {type(found).__name__}, not a function or class", where=LOSS)
    keywords = dict(arguments)
    if "reduction" in read_parameters(found):
        keywords.setdefault("reduction", "none")
    if isinstance(found, type):
        check_arguments(found, path, arguments=keywords, where=f"{LOSS}_args")
        with name_user_errors(path, LOSS):
            function = found(**keywords)
        # Nothing would train them: the optimizer steps the parameters of the network.
        if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
            what = f"{path!r} has parameters of its own, which nothing would train"
            raise RecipeError(what, where=LOSS, fix="Put them into the network, and name a function of its outputs.")
    else:
        check_arguments(found, path, None, None, arguments=keywords, where=f"{LOSS}_args")
        function = partial(found, **keywords)

    def compute_losses(outputs: Tensor, labels: Tensor) -> Tensor:
        if isinstance(function, nn.Module):
            # Its buffers, such as the weights of classes; without effect from the second call on.
            function.to(outputs.device)
        with name_user_errors(path, LOSS):
            losses = function(outputs, labels)
        losses = expect_per_sample(losses, outputs, path, LOSS)
        if outputs.requires_grad and not losses.requires_grad:
            what = f"{path!r} gives losses without a gradient, so nothing would be trained"
            raise RecipeError(what, where=LOSS, fix="Compute them from outputs by torch alone, without detach or item.")
        return losses

    return compute_losses


def expect_per_sample(values: Any, outputs: Tensor, path: str, where: str) -> Tensor:
    """Returns one number for each sample, [b]; values of the shape of the outputs are averaged over them.

    Raises:
        RecipeError: the values have another shape, or are no tensor.
    """
    samples = len(outputs)
    if isinstance(values, Tensor):
        if values.shape == (samples,):
            return values
        if values.shape == outputs.shape:
            return values.mean(dim=1)
    given = f"the shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
    what = f"{path!r} gives {given} for {samples} samples, and should give the shape ({samples},): one number a sample"
    raise RecipeError(what, where=where, fix="Average over the outputs of a sample at most, and not over samples.")
