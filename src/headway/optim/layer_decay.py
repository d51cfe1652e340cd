"""Layer-wise learning rates: each layer of a network learns at a factor below the next one's rate.

The first layers of a pretrained network hold what all images have in common, and should change least (Howard and Ruder
2018, "Universal Language Model Fine-tuning", arXiv 1801.06146: discriminative fine-tuning). BEiT (Bao et al. 2021,
arXiv 2106.08254) and timm's `layer_decay` have such a factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from headway.core.errors import UsageError
from headway.optim.groups import split_decay

Group = dict[str, Any]

# Containers whose order is the order of the network.
SEQUENCES = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def order_layers(model: nn.Module) -> dict[str, int]:
    """Numbers the layers of any network from 0, in the order in which it registers its modules.

    - A module with weights is one layer, a residual or transformer block too.
    - `Sequential`, `ModuleList` and `ModuleDict` are taken apart, and modules that hold one with several blocks.
    - Modules without a weight of two dimensions (normalisation), and parameters that a module taken apart has itself
      (position embeddings), belong to the layer before them; the first of all to the next one.

    On timm's ResNets and vision transformers these are the layers of `timm.optim`, stem to head.

    Returns:
        the number of the layer by the full name of each parameter, frozen ones too.
    """
    # Names that come before the first matrix, such as those of a normalisation at the input, wait in `early`.
    layers: list[list[str]] = []
    early: list[str] = []
    matrices = {name for name, value in model.named_parameters() if value.ndim >= 2}
    # `named_parameters` lists a shared parameter once, and so does this.
    known, placed = {name for name, _ in model.named_parameters()}, set[str]()
    for names, is_own in _list_parts(model, ""):
        fresh = [name for name in names if name not in placed and name in known]
        placed.update(fresh)
        if not fresh:
            continue
        if not is_own and matrices.intersection(fresh):
            layers.append([*early, *fresh])
            early = []
        elif layers:
            layers[-1] += fresh
        else:
            early += fresh
    # A network of biases alone, or one whose weights are all its own.
    if early:
        layers.append(early)
    return {name: place for place, names in enumerate(layers) for name in names}


def scale_layers(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Returns the factor on the learning rate by the name of each parameter: layer_decay ** (layers above it).

    The last layer has the factor 1.

    Raises:
        UsageError: a decay that is not in (0, 1].
    """
    if not 0 < layer_decay <= 1:
        raise UsageError(f"layer_decay is {layer_decay!r}", fix="Give it a number above 0 and at most 1, such as 0.75.")
    layers = order_layers(model)
    last = max(layers.values(), default=0)
    return {name: layer_decay ** (last - place) for name, place in layers.items()}


def describe_layer_rates(model: nn.Module, layer_decay: float) -> str:
    """Says the range of the layers' rates; empty if all layers have the same."""
    layers = len(set(order_layers(model).values())) if layer_decay != 1 else 1
    if layers < 2:
        return ""
    return (
        f"Layer-wise learning rates: {layers} layers, from {layer_decay ** (layers - 1):.3g} to 1 times optimizer.lr."
    )


def split_layers(model: nn.Module, *, lr: float, layer_decay: float, weight_decay: float = 0.0) -> list[Group]:
    """Makes groups for any torch optimizer: a learning rate for each layer, and weight decay for matrices alone.

    Frozen parameters are left out, and count as layers.

    Args:
        lr: learning rate of the last layer.
        layer_decay: factor from each layer to the one before it; 1 gives all the same rate.
        weight_decay: of parameters of two dimensions or more; others have none.

    Raises:
        UsageError: a decay that is out of range, or nothing to train.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise UsageError("the network has no parameter to train", fix="Freeze less.")
    groups: list[Group] = []
    for factor, names in split_by_factor(list(parameters), scale_layers(model, layer_decay)):
        for group in split_decay([(name, parameters[name]) for name in names], weight_decay):
            groups.append({**group, "lr": lr * factor, "lr_scale": factor})
    return groups


def split_by_factor(names: list[str], factors: dict[str, float]) -> list[tuple[float, list[str]]]:
    """Splits names by their factor, smallest first; a name without one has 1."""
    found: dict[float, list[str]] = {}
    for name in names:
        found.setdefault(factors.get(name, 1.0), []).append(name)
    return sorted(found.items())


def _list_parts(module: nn.Module, prefix: str) -> Iterator[tuple[list[str], bool]]:
    """Yields (parameter names, True if they are the module's own) of the parts of a module that is taken apart."""
    own = [prefix + name for name, _ in module.named_parameters(recurse=False)]
    if own:
        yield own, True
    # `_modules` and not `named_children`, which leaves out a module that is used again.
    for name, child in module._modules.items():
        if child is None:
            continue
        below = f"{prefix}{name}."
        if isinstance(child, SEQUENCES) or _holds_blocks(child):
            yield from _list_parts(child, below)
        else:
            yield [below + inner for inner, _ in child.named_parameters(remove_duplicate=False)], False


def _holds_blocks(module: nn.Module) -> bool:
    """Tells whether a module holds a sequence of at least two blocks, such as the encoder of a transformer."""
    return any(sum(map(_is_block, inner.children())) >= 2 for inner in module.modules() if isinstance(inner, SEQUENCES))


def _is_block(module: nn.Module) -> bool:
    # A convolution with its batch norm and activation in a Sequential has one matrix, and is no block.
    owners = [inner for inner in module.modules() if any(value.ndim >= 2 for value in inner.parameters(recurse=False))]
    return len(owners) >= 2
