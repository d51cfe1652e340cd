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

WeightVector = Mapping[str, Tensor]
"""Tensors by the names of parameters and buffers; a missing name stands for zeros."""


def get_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and floating-point buffers by name, not copies; a shared tensor once."""
    named_tensors = [*model.named_parameters(), *model.named_buffers()]
    # Counts of batches and other integers cannot move.
    return {name: tensor.detach() for name, tensor in named_tensors if tensor.is_floating_point()}


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the parameters and floating-point buffers by name."""
    return {name: tensor.clone() for name, tensor in get_tensors(model).items()}


def get_trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are not frozen."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }


@contextmanager
def move_weights(model: nn.Module, origin: WeightVector, steps: Sequence[tuple[float, WeightVector]]) -> Iterator[None]:
    """Moves the network to origin + the sum of factor x direction for the duration of the block.

    Args:
        model: its parameters and buffers are changed in place, and restored exactly after the block.
        origin: tensors that it lacks keep their values.
        steps: (factor, direction) of each step.
    """
    tensors = get_tensors(model)
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        for name, tensor in tensors.items():
            if name in origin:
                tensor.copy_(origin[name])
            for factor, direction in steps:
                if name in direction and factor:
                    tensor.add_(direction[name].to(tensor), alpha=factor)
        yield
    # Subtracting the steps would leave rounding errors.
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])


def compute_filter_norms(model: nn.Module) -> dict[str, Tensor]:
    """Returns the norms of the filters of each weight by its name, in a shape that broadcasts over the weight.

    A filter produces one output: a slice of a convolution's weight, a row of a matrix. Frozen parameters and those of
    fewer than two dimensions (biases, parameters of norms) are left out: random directions do not move them.
    """
    groups = _find_transposed_convolutions(model)
    weights = {
        name: parameter.detach() for name, parameter in get_trained_parameters(model).items() if parameter.ndim >= 2
    }
    return {name: _compute_norms(weight, groups.get(name)) for name, weight in weights.items()}


def _find_transposed_convolutions(model: nn.Module) -> dict[str, int]:
    """Returns the number of groups of each transposed convolution, by the name of its weight."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, _ConvTransposeNd)}
    return {f"{name}.weight" if name else "weight": module.groups for name, module in modules.items()}


def _compute_norms(weight: Tensor, transposed_groups: int | None) -> Tensor:
    """Returns the norms of the filters of one weight, in a shape that broadcasts over it.

    Args:
        weight: Weight with [outputs, inputs / groups, ...], unless its convolution is transposed.
        transposed_groups: Groups of a transposed convolution, with weight [inputs, outputs / groups, ...]; else None.
    """
    if transposed_groups is None:
        row_norms: Tensor = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
        return row_norms
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
    norms = compute_filter_norms(model)
    groups = _find_transposed_convolutions(model)
    generator = torch.Generator().manual_seed(seed)
    direction = {}
    for name, parameter in model.named_parameters():
        # Drawn for every parameter, so that frozen ones do not change the others; on the CPU, to be the same anywhere.
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        if name in norms:
            noise_norms = _compute_norms(noise, groups.get(name))
            direction[name] = noise * (norms[name] / noise_norms.clamp_min(torch.finfo(noise.dtype).tiny))
    if not direction:
        fix = "Train at least one weight of two or more dimensions: biases, norms and frozen parameters stay in place."
        raise UsageError("the network has no weight to move in a random direction", fix=fix)
    return direction


def compute_difference(start: WeightVector, end: WeightVector) -> dict[str, Tensor]:
    """Returns the direction from one state to another: start + direction = end, for the names that both have."""
    return {name: end[name] - start[name] for name in start if name in end}


@final
@dataclass(frozen=True)
class PlaneAxes:
    """Two orthogonal directions of length 1, and the coordinates of given states.

    Attributes:
        first: First direction.
        second: Second direction.
        coordinates: Coordinates of each state along both directions.
        shares: Share of the squared distances of all states from the origin that each direction shows.
    """

    first: WeightVector
    second: WeightVector
    coordinates: list[tuple[float, float]]
    shares: tuple[float, float]


def fit_plane(origin: WeightVector, states: Sequence[WeightVector], names: Sequence[str]) -> PlaneAxes:
    """Returns the plane through `origin` that is nearest to `states`, by the singular vectors of their differences.

    As Li et al. 2018, section 7, with differences that are not centred, so that the origin lies in the plane.

    Args:
        names: Tensors that count for distances; all tensors are moved.

    Raises:
        UsageError: The states lie on one line with the origin, or all in one place.
    """
    differences = [compute_difference(origin, state) for state in states]
    # The Gram matrix has one row per state, and the squares of the singular values as its eigenvalues.
    gram = torch.tensor(
        [[_dot(first, second, names) for second in differences] for first in differences], dtype=torch.float64
    )
    eigenvalues, eigenvectors = torch.linalg.eigh(gram)
    # eigh sorts in ascending order; here the largest comes first.
    eigenvalues, eigenvectors = eigenvalues.flip(0), eigenvectors.flip(1)
    # Written as `not >`, so that NaN is refused too.
    if len(states) < 2 or not eigenvalues[1] > 1e-9 * eigenvalues[0]:
        what = f"the {len(states) + 1} states lie on one line, so there is no plane through them"
        raise UsageError(what, fix="Take states that differ more, such as those of more epochs.")
    axes = []
    for index in range(2):
        # The sign of a singular vector is arbitrary: its largest entry is made positive.
        column = eigenvectors[:, index]
        sign = 1.0 if column[int(column.abs().argmax())] >= 0 else -1.0
        eigenvectors[:, index] = column * sign
        axes.append(_combine(differences, (eigenvectors[:, index] / eigenvalues[index].sqrt()).tolist()))
    singular_values = eigenvalues[:2].sqrt()
    coordinates = [
        (float(row[0] * singular_values[0]), float(row[1] * singular_values[1])) for row in eigenvectors[:, :2]
    ]
    total = float(eigenvalues.clamp_min(0).sum())
    return PlaneAxes(axes[0], axes[1], coordinates, (float(eigenvalues[0]) / total, float(eigenvalues[1]) / total))


def span_plane(first: WeightVector, second: WeightVector, third: WeightVector, names: Sequence[str]) -> PlaneAxes:
    """Returns the plane through three states: the first is the origin, and the first axis leads to the second.

    As Garipov et al. 2018 (arXiv 1802.10026), appendix. `coordinates` are those of all three states.

    Raises:
        UsageError: The states lie on one line.
    """
    first_difference = compute_difference(first, second)
    second_difference = compute_difference(first, third)
    # Gram-Schmidt.
    length = _dot(first_difference, first_difference, names) ** 0.5
    along = _dot(first_difference, second_difference, names) / length if length else 0.0
    across_squared = _dot(second_difference, second_difference, names) - along**2
    # Again `not >`, for NaN.
    if not length or not across_squared > 1e-9 * _dot(second_difference, second_difference, names):
        fix = "Take three networks that were trained independently."
        raise UsageError("the three states lie on one line, so there is no plane through them", fix=fix)
    across = across_squared**0.5
    first_axis = _combine([first_difference], [1 / length])
    second_axis = _combine([second_difference, first_difference], [1 / across, -along / length / across])
    return PlaneAxes(first_axis, second_axis, [(0.0, 0.0), (length, 0.0), (along, across)], (1.0, 1.0))


def compute_distance(first: WeightVector, second: WeightVector, names: Sequence[str]) -> float:
    """Returns the Euclidean distance of two states over the named tensors."""
    difference = compute_difference(first, second)
    return math.sqrt(_dot(difference, difference, names))


def _dot(first: WeightVector, second: WeightVector, names: Sequence[str]) -> float:
    """Returns the float64 dot product over the named tensors."""
    shared_names = [name for name in names if name in first]
    # float64, because sums over millions of weights lose digits in float32.
    products = [torch.dot(first[name].flatten().double(), second[name].flatten().double()) for name in shared_names]
    return float(torch.stack(products).sum()) if products else 0.0


def _combine(vectors: Sequence[WeightVector], factors: Sequence[float]) -> dict[str, Tensor]:
    """Returns the sum of factor x vector."""
    return {
        name: torch.stack([vector[name] * factor for vector, factor in zip(vectors, factors, strict=True)]).sum(0)
        for name in vectors[0]
    }
