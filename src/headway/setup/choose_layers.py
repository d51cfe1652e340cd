"""Resolves `parallel.layers: auto`: the fully connected layers whose division shortens the exchange of a step."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from headway.comm.algorithm_choice import get_wire_ratio
from headway.core.collectives import Network
from headway.core.errors import UsageError
from headway.core.layer_division import DenseLayer, Division, choose_division
from headway.core.modules import preserve_training_state
from headway.core.recipe import LoadedRecipe
from headway.launch.ranks import Ranks
from headway.parallel.divided_linear import list_divisible_layers
from headway.parallel.parallel_recipe import HybridRecipe
from headway.setup.recipe import TrainRecipe
from headway.setup.trial import build_trial_pass, time_pass

LOG = logging.getLogger("headway.setup")

BACKWARD_SHARE = 2 / 3
"""Backward pass over forward and backward: two matrix products of a layer to one."""

Context = Callable[[], AbstractContextManager[Any]]


def resolve_layers(
    loaded: LoadedRecipe[TrainRecipe],
    model: torch.nn.Module,
    images: torch.Tensor,
    context: Context,
    ranks: Ranks | None,
) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe with the layers that pay in place of `parallel.layers: auto`; without `auto`, as it is.

    Every rank calls it, and the choice is the same. The ranks meet here, and measure their links and the backward pass.
    One process leaves the choice to a run with more.

    Args:
        images: normalised; they are repeated up to a rank's share of the batch.
        context: returns the context of the forward pass.

    Raises:
        UsageError: no division pays.
    """
    recipe, options = loaded.recipe, loaded.recipe.parallel
    if ranks is None or ranks.launched_size == 1 or not isinstance(options, HybridRecipe) or options.layers != "auto":
        return loaded
    layers = measure_layers(model, images, context, ranks.launched_size)
    samples = max(2, recipe.global_batch // ranks.launched_size)
    # Autocast narrows what is exchanged. Ranks that have chosen different precisions expect the wider one.
    value_bytes = 4 if recipe.precision == "fp32" else 2
    batch = images[torch.arange(samples, device=images.device) % len(images)]
    with preserve_training_state(model):
        step_s = time_pass(model, batch, context)
    network, (step_s, widest_bytes) = ranks.measure_network(images.device, (step_s, value_bytes))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    division = choose_division(
        layers,
        sum(parameter.numel() * parameter.element_size() for parameter in trained),
        recipe.global_batch,
        network,
        BACKWARD_SHARE * step_s,
        value_bytes=round(widest_bytes),
        wire_ratio=get_wire_ratio(recipe.comm.wire),
        scheme=options.scheme,
    )
    return record_division(loaded, division, describe_measurement(network, step_s))


def describe_measurement(network: Network, step_s: float) -> str:
    """Describes the numbers on which a choice of layers rests: the slowest link, and the seconds of a pass."""
    link, between = (network.between, "hosts") if network.hosts > 1 else (network.inside, "processes")
    return (
        f"{link.latency_s * 1e6:,.0f} us and {link.bandwidth_bytes_s / 1e6:,.0f} MB/s between {between}, forward and"
        f" backward pass {_format_seconds(step_s)}"
    )


def _format_seconds(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def record_division(loaded: LoadedRecipe[TrainRecipe], division: Division, measured: str) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe with the names of the divided layers, and logs them with what was measured.

    Raises UsageError if they do not pay.
    """
    where, names = "parallel.layers", ", ".join(division.layers)
    if not division.layers:
        what = "this network has no fully connected layer that can be divided over the processes"
        raise UsageError(what, where=where, fix="Use parallel: data.")
    data, divided = map(_format_seconds, (division.data_s, division.divided_s))
    if not division.pays:
        what = (
            f"it does not pay to divide fully connected layers here: by the measured links ({measured}), a data"
            f" parallel step waits {data} for its exchange, and one with divided layers ({names}) {divided}"
        )
        fix = "Use parallel: data, or set parallel.layers to regular expressions for the names of the layers."
        raise UsageError(what, where=where, fix=fix)
    reason = f"by the measured links ({measured}), a step waits {divided} for its exchange, and {data} without"
    LOG.info(f"Divided layers: {names}; {reason}.")
    return loaded.resolve(where, [f"^{re.escape(name)}$" for name in division.layers], reason)


def measure_layers(model: torch.nn.Module, images: torch.Tensor, context: Context, ranks: int) -> list[DenseLayer]:
    """Lists the layers that can be divided, with the values of a sample that pass them."""
    names, samples = list_divisible_layers(model, ranks), 2
    passed = {name: [0, 0] for name in names}
    with _watch(model, names, samples, passed):
        build_trial_pass(model, images, context)(samples)
    found = []
    for name, (inputs, outputs) in passed.items():
        trained = [parameter for parameter in model.get_submodule(name).parameters() if parameter.requires_grad]
        gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        if gradient_bytes and inputs:
            found.append(DenseLayer(name, inputs // samples, outputs // samples, gradient_bytes))
    return found


@contextmanager
def _watch(model: torch.nn.Module, names: Sequence[str], samples: int, passed: dict[str, list[int]]) -> Iterator[None]:
    """Counts the inputs and outputs of layers; drops a layer whose rows are no samples."""

    def count(name: str, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not inputs or len(inputs[0]) != samples:
            passed.pop(name, None)
        elif name in passed:
            passed[name][0] += inputs[0].numel()
            passed[name][1] += output.numel()

    hooks = [model.get_submodule(name).register_forward_hook(partial(count, name)) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
