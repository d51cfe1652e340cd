"""Directions in weight space: random ones by filter, towards another network, and along a training path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from headway.core.errors import UsageError

# Tensors by the names of parameters and buffers; a missing name stands for zeros.
WeightVector = Mapping[str, Tensor]


def get_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and floating-point buffers, not copies; a shared tensor once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if tensor.is_floating_point()}


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies the parameters and floating-point buffers."""
    return {name: tensor.clone() for name, tensor in get_tensors(model).items()}


def get_trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are not frozen."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad and one.is_floating_point()}


@contextmanager
def move_weights(model: nn.Module, origin: WeightVector, steps: Sequence[tuple[float, WeightVector]]) -> Iterator[None]:
    """Moves the network to origin + the sum of factor x direction for the duration of the block."""
    here = get_tensors(model)
    before = {name: tensor.clone() for name, tensor in here.items()}
    try:
        for name, tensor in here.items():
            if name in origin:
                tensor.copy_(origin[name])
            for factor, direction in steps:
                if name in direction and factor:
                    tensor.add_(direction[name].to(tensor), alpha=factor)
        yield
    # Values are copied back rather than subtracted, so that they return exactly.
    finally:
        for name, tensor in here.items():
            tensor.copy_(before[name])


def compute_filter_norms(model: nn.Module) -> dict[str, Tensor]:
    """Computes the norm of the filter of each weight, in a shape that broadcasts over the weight.

    A filter produces one output: a slice of a convolution's weight, a row of a matrix. Frozen parameters and those of
    fewer than two dimensions (biases, parameters of norms) are left out: random directions do not move them.
    """
    groups = _find_transposed_convolutions(model)
    weights = {name: one.detach() for name, one in get_trained_parameters(model).items() if one.ndim >= 2}
    return {name: _compute_norms(weight, groups.get(name)) for name, weight in weights.items()}


def _find_transposed_convolutions(model: nn.Module) -> dict[str, int]:
    """Finds the groups of transposed convolutions, by the names of their weights."""
    transposed = {name: one for name, one in model.named_modules() if isinstance(one, _ConvTransposeNd)}
    return {f"{name}.weight" if name else "weight": one.groups for name, one in transposed.items()}


def _compute_norms(weight: Tensor, transposed_groups: int | None) -> Tensor:
    """Computes the norms of the filters of one weight.

    Args:
        transposed_groups: Groups of a transposed convolution, with weight [inputs, outputs / groups, ...]; else None.
    """
    if transposed_groups is None:
        flat_norms: Tensor = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
        return flat_norms
    # Filters of a transposed convolution are along the second dimension, within each group.
    parts = weight.unflatten(0, (transposed_groups, -1))
    norms: Tensor = torch.linalg.vector_norm(parts, dim=(1, *range(3, parts.ndim)), keepdim=True)
    return norms.expand(-1, parts.shape[1], *norms.shape[2:]).flatten(0, 1)


def draw_direction(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Draws a random direction with the filter norms of the network (Li et al. 2018, arXiv 1712.09913, section 4).

    This makes landscapes of networks with different weight scales comparable. Biases and parameters of norms do not
    move. Networks of the same shape get the same draw for a seed.

    Raises:
        UsageError: No weight of two or more dimensions is trained.
    """
    norms, groups = compute_filter_norms(model), _find_transposed_convolutions(model)
    generator, out = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        # Drawn for every parameter, so that frozen ones do not change the others; on the CPU, to be the same anywhere.
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
        if name in norms:
            lengths = _compute_norms(drawn, groups.get(name))
            out[name] = drawn * (norms[name] / lengths.clamp_min(torch.finfo(drawn.dtype).tiny))
    if not out:
        fix = "Train at least one weight of two or more dimensions: biases, norms and frozen parameters stay in place."
        raise UsageError("the network has no weight to move in a random direction", fix=fix)
    return out


def compute_difference(one: WeightVector, other: WeightVector) -> dict[str, Tensor]:
    """Computes the direction from one state to another with the same names: one + direction = other."""
    return {name: other[name] - one[name] for name in one if name in other}


@final
@dataclass(frozen=True)
class PlaneAxes:
    """Two orthogonal directions of length 1, and the positions of given states."""

    first: WeightVector
    second: WeightVector
    # (along the first, along the second) for each state.
    places: list[tuple[float, float]]
    # Share of the squared distances of all states from the origin that each direction shows.
    shares: tuple[float, float]


def fit_plane(origin: WeightVector, states: Sequence[WeightVector], names: Sequence[str]) -> PlaneAxes:
    """Fits the plane through `origin` that is nearest to states, by the singular vectors of their differences from it.

    As Li et al. 2018, section 7, with differences that are not centred, so that the origin lies in the plane.

    Args:
        names: Tensors that count for distances; all tensors are moved.

    Raises:
        UsageError: The states lie on one line with the origin, or all in one place.
    """
    away = [compute_difference(origin, state) for state in states]
    # The Gram matrix has one row per state: far smaller than the weights, and the same singular values.
    inner = torch.tensor([[_dot(a, b, names) for b in away] for a in away], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(inner)
    values, vectors = values.flip(0), vectors.flip(1)
    if len(states) < 2 or not values[1] > 1e-9 * values[0]:
        what = f"the {len(states) + 1} states lie on one line, so there is no plane through them"
        raise UsageError(what, fix="Take states that differ more, such as those of more epochs.")
    axes = []
    for place in range(2):
        # The sign of a singular vector is arbitrary: its largest entry is made positive.
        column = vectors[:, place]
        sign = 1.0 if column[int(column.abs().argmax())] >= 0 else -1.0
        vectors[:, place] = column * sign
        axes.append(_combine(away, (vectors[:, place] / values[place].sqrt()).tolist()))
    lengths = values[:2].sqrt()
    places = [(float(row[0] * lengths[0]), float(row[1] * lengths[1])) for row in vectors[:, :2]]
    total = float(values.clamp_min(0).sum())
    return PlaneAxes(axes[0], axes[1], places, (float(values[0]) / total, float(values[1]) / total))


def span_plane(first: WeightVector, second: WeightVector, third: WeightVector, names: Sequence[str]) -> PlaneAxes:
    """Spans the plane through three states: the first is the origin, and the first axis leads to the second.

    As Garipov et al. 2018 (arXiv 1802.10026), appendix. `places` are those of all three states.

    Raises:
        UsageError: The states lie on one line.
    """
    u, v = compute_difference(first, second), compute_difference(first, third)
    # Gram-Schmidt.
    length = _dot(u, u, names) ** 0.5
    along = _dot(u, v, names) / length if length else 0.0
    across_squared = _dot(v, v, names) - along**2
    if not length or not across_squared > 1e-9 * _dot(v, v, names):
        fix = "Take three networks that were trained independently."
        raise UsageError("the three states lie on one line, so there is no plane through them", fix=fix)
    across = across_squared**0.5
    one = _combine([u], [1 / length])
    two = _combine([v, u], [1 / across, -along / length / across])
    return PlaneAxes(one, two, [(0.0, 0.0), (length, 0.0), (along, across)], (1.0, 1.0))


def compute_distance(one: WeightVector, other: WeightVector, names: Sequence[str]) -> float:
    """Computes the Euclidean distance over the named tensors."""
    away = compute_difference(one, other)
    return math.sqrt(_dot(away, away, names))


def _dot(one: WeightVector, other: WeightVector, names: Sequence[str]) -> float:
    kept = [name for name in names if name in one]
    products = [torch.dot(one[name].flatten().double(), other[name].flatten().double()) for name in kept]
    return float(torch.stack(products).sum()) if products else 0.0


def _combine(vectors: Sequence[WeightVector], factors: Sequence[float]) -> dict[str, Tensor]:
    return {
        name: torch.stack([vector[name] * factor for vector, factor in zip(vectors, factors, strict=True)]).sum(0)
        for name in vectors[0]
    }
