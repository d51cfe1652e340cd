"""Sharpness of a minimum: Keskar's measure, and the largest eigenvalue of the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

ProgressCallback = Callable[[], object]
"""Called after every gradient and every Hessian-vector product."""


@final
class SharpnessObjective:
    """A function of parameters, with its gradient and Hessian-vector products.

    Args:
        parameters: Leaves of the graph. Measurements change them in place and restore them.
        parts: Returns the summands of the function, each with a graph of its own.
        tick: Called after each computation, for a progress bar.
    """

    def __init__(
        self, parameters: Sequence[Tensor], parts: Callable[[], Iterable[Tensor]], tick: ProgressCallback = lambda: None
    ) -> None:
        self.parameters = list(parameters)
        self._parts = parts
        self._tick = tick

    def compute_value_and_gradient(self) -> tuple[float, list[Tensor]]:
        """Returns (value, gradient) at the present parameters; the gradient has a tensor for each parameter."""
        value = 0.0
        gradient = [torch.zeros_like(parameter) for parameter in self.parameters]
        for part in self._parts():
            value += float(part.detach())
            part_gradient = torch.autograd.grad(part, self.parameters, allow_unused=True)
            _accumulate(gradient, part_gradient)
        self._tick()
        return value, gradient

    def multiply_hessian(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """Returns the Hessian times a vector, as the gradient of (gradient x vector) (Pearlmutter 1994)."""
        product = [torch.zeros_like(parameter) for parameter in self.parameters]
        for part in self._parts():
            part_gradient = torch.autograd.grad(part, self.parameters, create_graph=True, allow_unused=True)
            # A gradient that does not depend on the parameters has no second derivative.
            dot_products = [
                (g * v).sum() for g, v in zip(part_gradient, vector, strict=True) if g is not None and g.requires_grad
            ]
            if dot_products:
                _accumulate(
                    product, torch.autograd.grad(torch.stack(dot_products).sum(), self.parameters, allow_unused=True)
                )
        self._tick()
        return product


@final
@dataclass(frozen=True)
class EpsilonSharpness:
    """Result of `measure_epsilon_sharpness`, a lower bound of the true sharpness in the box.

    Attributes:
        percent: 100 (highest - loss) / (1 + loss).
        loss: Loss at the solution.
        highest: Highest loss found in the box around it.
        epsilon: Relative half-width of the box.
        steps: Gradients of each ascent.
        starts: Number of ascents.
    """

    percent: float
    loss: float
    highest: float
    epsilon: float
    steps: int
    starts: int


@torch.no_grad()
def measure_epsilon_sharpness(
    objective: SharpnessObjective, *, epsilon: float = 1e-3, steps: int = 10, starts: int = 2, seed: int = 0
) -> EpsilonSharpness:
    """Measures how far a function rises in a small box around its parameters x: |z_i| <= epsilon (|x_i| + 1).

    This is metric 2.1 of Keskar et al. 2017 (arXiv 1609.04836) with the identity as A. Where they run ten iterations of
    L-BFGS-B, each ascent here computes `steps` gradients. A step follows the signs of the gradient, at first across the
    whole box, and half as far after each step that led down. The first ascent starts at the corner that the gradient at
    the solution points to, the others at random points, because at a solution the gradient may be zero.

    Args:
        epsilon: Relative half-width of the box.
        steps: Gradients of each ascent.
        starts: Number of ascents.
        seed: Seed of the random starts.
    """
    x = [parameter.clone() for parameter in objective.parameters]
    generator = torch.Generator().manual_seed(seed)
    box = [epsilon * (parameter.abs() + 1) for parameter in x]

    def ascend(z: list[Tensor]) -> float:
        highest_in_box, gradient_here = _evaluate_at(objective, x, z)
        step_share = 1.0
        for _ in range(steps - 1):
            # With a share of 1 the step leads from one side of the box to the other.
            trial = [
                torch.clamp(a + 2 * step_share * b * g.sign(), min=-b, max=b)
                for a, b, g in zip(z, box, gradient_here, strict=True)
            ]
            value, trial_gradient = _evaluate_at(objective, x, trial)
            if value > highest_in_box:
                highest_in_box, z, gradient_here = value, trial, trial_gradient
            else:
                step_share /= 2
        return highest_in_box

    try:
        with torch.enable_grad():
            loss, gradient = objective.compute_value_and_gradient()
        highest = loss
        for start in range(starts):
            # A random point of the box, from the CPU generator, so that any device starts at the same one.
            z = [b * (2 * torch.rand(b.shape, generator=generator).to(b) - 1) for b in box]
            # A weight without a gradient takes its random side.
            if start == 0:
                z = [b * torch.where(g == 0, a, g).sign() for a, b, g in zip(z, box, gradient, strict=True)]
            highest = max(highest, ascend(z))
    finally:
        # Restored even if the function fails.
        _copy_into(objective.parameters, x)
    return EpsilonSharpness(100 * (highest - loss) / (1 + loss), loss, highest, epsilon, steps, starts)


def _evaluate_at(objective: SharpnessObjective, x: list[Tensor], z: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Returns (value, gradient) at x + z, and leaves the parameters there."""
    _copy_into(objective.parameters, [a + b for a, b in zip(x, z, strict=True)])
    with torch.enable_grad():
        return objective.compute_value_and_gradient()


@final
@dataclass(frozen=True)
class HessianEigenvalue:
    """Curvature v H v along a unit vector v, a lower bound of the largest eigenvalue.

    Attributes:
        value: The curvature.
        products: Number of Hessian-vector products.
        residual: |H v - value v| / |value|. Some eigenvalue is within |value| x residual of the value, not always the
            largest one.
    """

    value: float
    products: int
    residual: float


def find_largest_eigenvalue(
    objective: SharpnessObjective,
    *,
    scale: Sequence[Tensor] | None = None,
    products: int = 30,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> HessianEigenvalue:
    """Estimates the largest eigenvalue of the Hessian by power iteration from a random vector.

    Power iteration converges to the eigenvalue of the largest magnitude. If that is negative, a second iteration, of
    the Hessian minus that eigenvalue, converges to the largest. Either can stop at a smaller eigenvalue that its first
    vector was close to; the true one is then higher.

    Args:
        scale: D, shaped like the parameters: the result is the eigenvalue of D H D. With filter norms as D it is the
            curvature by relative change, which does not change if a filter before a batch norm is rescaled.
        products: Most Hessian-vector products of each iteration.
        tolerance: Residual at which the iteration stops.
    """
    dominant = _iterate_power(objective, scale, 0.0, products, tolerance, seed)
    if dominant.value >= 0:
        return dominant
    shifted = _iterate_power(objective, scale, dominant.value, products, tolerance, seed)
    value = shifted.value + dominant.value
    residual = shifted.residual * abs(shifted.value) / max(abs(value), 1e-30)
    return HessianEigenvalue(value, dominant.products + shifted.products, residual)


def _iterate_power(
    objective: SharpnessObjective,
    scale: Sequence[Tensor] | None,
    shift: float,
    products: int,
    tolerance: float,
    seed: int,
) -> HessianEigenvalue:
    """Runs a power iteration of the Hessian minus shift x identity, on the parameters with a nonzero `scale`."""
    generator = torch.Generator().manual_seed(seed)
    v = [torch.randn(parameter.shape, generator=generator).to(parameter) for parameter in objective.parameters]
    if scale is not None:
        # Parameters with a scale of 0 are left out.
        v = [a * (s != 0) for a, s in zip(v, scale, strict=True)]
    v = _normalise(v)
    value, residual = 0.0, float("inf")
    for count in range(1, products + 1):
        if scale is None:
            w = objective.multiply_hessian(v)
        else:
            w = objective.multiply_hessian([a * s for a, s in zip(v, scale, strict=True)])
            # D H D v, from D v.
            w = [a * s for a, s in zip(w, scale, strict=True)]
        # Subtracting the eigenvalue of largest magnitude makes the other end of the spectrum dominate.
        w = [a - shift * b for a, b in zip(w, v, strict=True)]
        value = _dot(v, w)
        length = _dot(w, w) ** 0.5
        if not 0 < length < float("inf"):
            # The Hessian is zero along v, or not finite: no further step is possible.
            return HessianEigenvalue(value, count, 0.0 if length == 0 else float("inf"))
        residual = max(0.0, length**2 - value**2) ** 0.5 / max(abs(value), 1e-30)
        if residual < tolerance:
            return HessianEigenvalue(value, count, residual)
        v = [a / length for a in w]
    return HessianEigenvalue(value, products, residual)


def _accumulate(totals: list[Tensor], values: Sequence[Tensor | None]) -> None:
    """Adds values to totals in place; None counts as zeros."""
    for total, value in zip(totals, values, strict=True):
        if value is not None:
            total.add_(value.detach())


@torch.no_grad()
def _copy_into(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    # float64, because sums over millions of weights lose digits in float32.
    return float(sum((a.double() * b.double()).sum() for a, b in zip(first, second, strict=True)))


def _normalise(vector: list[Tensor]) -> list[Tensor]:
    norm = max(_dot(vector, vector) ** 0.5, 1e-30)
    return [tensor / norm for tensor in vector]
