"""Sharpness of a minimum: Keskar's measure, and the largest eigenvalue of the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

# Called after every gradient and every Hessian-vector product.
Tick = Callable[[], object]


@final
class SharpnessObjective:
    """A function of parameters, with its gradient and Hessian-vector products.

    Args:
        parameters: Leaves of the graph, changed in place and put back.
        parts: Yields the summands of the function, each with its own graph.
        tick: Called after each computation, for a progress bar.
    """

    def __init__(
        self, parameters: Sequence[Tensor], parts: Callable[[], Iterable[Tensor]], tick: Tick = lambda: None
    ) -> None:
        self.parameters, self._parts, self._tick = list(parameters), parts, tick

    def compute_gradient(self) -> tuple[float, list[Tensor]]:
        """Computes (value, gradient) at the present parameters."""
        value, gradient = 0.0, [torch.zeros_like(one) for one in self.parameters]
        for part in self._parts():
            value += float(part.detach())
            slopes = torch.autograd.grad(part, self.parameters, allow_unused=True)
            _add(gradient, slopes)
        self._tick()
        return value, gradient

    def multiply_hessian(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """Multiplies the Hessian by a vector: the gradient of (gradient x vector) (Pearlmutter 1994)."""
        product = [torch.zeros_like(one) for one in self.parameters]
        for part in self._parts():
            slopes = torch.autograd.grad(part, self.parameters, create_graph=True, allow_unused=True)
            # A gradient that does not depend on the parameters has no second derivative.
            inner = [(g * v).sum() for g, v in zip(slopes, vector, strict=True) if g is not None and g.requires_grad]
            if inner:
                _add(product, torch.autograd.grad(torch.stack(inner).sum(), self.parameters, allow_unused=True))
        self._tick()
        return product


@final
@dataclass(frozen=True)
class EpsilonSharpness:
    """Keskar's sharpness as found by the ascents, a lower bound of the true one."""

    # 100 (highest - loss) / (1 + loss).
    percent: float
    # Loss at the solution.
    loss: float
    # Highest loss found in the box around it.
    highest: float
    epsilon: float
    steps: int
    starts: int


@torch.no_grad()
def measure_epsilon_sharpness(
    objective: SharpnessObjective, *, epsilon: float = 1e-3, steps: int = 10, starts: int = 2, seed: int = 0
) -> EpsilonSharpness:
    """Measures the rise of a function in a small box around its parameters, |z_i| <= epsilon (|x_i| + 1).

    As Keskar et al. 2017 (arXiv 1609.04836), metric 2.1 with A the identity, but instead of ten iterations of L-BFGS-B
    each start takes `steps` gradients. It follows the signs of the gradient, first across the whole box, then half as
    far after every step that leads down. The first start is the corner that the gradient at the solution points to; the
    others are random, because at a solution the gradient may be zero.
    """
    x, generator = [one.clone() for one in objective.parameters], torch.Generator().manual_seed(seed)
    box = [epsilon * (one.abs() + 1) for one in x]

    def ascend(z: list[Tensor]) -> float:
        best, slope = _evaluate_at(objective, x, z)
        share = 1.0
        for _ in range(steps - 1):
            # A whole step leads from one side of the box to the other.
            trial = [
                torch.clamp(a + 2 * share * b * g.sign(), min=-b, max=b) for a, b, g in zip(z, box, slope, strict=True)
            ]
            value, gradient = _evaluate_at(objective, x, trial)
            if value > best:
                best, z, slope = value, trial, gradient
            else:
                share /= 2
        return best

    try:
        with torch.enable_grad():
            loss, uphill = objective.compute_gradient()
        highest = loss
        for start in range(starts):
            z = [b * (2 * torch.rand(b.shape, generator=generator).to(b) - 1) for b in box]
            # A weight without a gradient takes its random side.
            if start == 0:
                z = [b * torch.where(g == 0, a, g).sign() for a, b, g in zip(z, box, uphill, strict=True)]
            highest = max(highest, ascend(z))
    finally:
        _copy_into(objective.parameters, x)
    return EpsilonSharpness(100 * (highest - loss) / (1 + loss), loss, highest, epsilon, steps, starts)


def _evaluate_at(objective: SharpnessObjective, x: list[Tensor], z: list[Tensor]) -> tuple[float, list[Tensor]]:
    _copy_into(objective.parameters, [a + b for a, b in zip(x, z, strict=True)])
    with torch.enable_grad():
        return objective.compute_gradient()


@final
@dataclass(frozen=True)
class HessianEigenvalue:
    """Curvature v H v along a unit vector v, a lower bound of the largest eigenvalue."""

    value: float
    # Number of Hessian-vector products.
    products: int
    # |H v - value v| / |value|. Some eigenvalue is within |value| x residual of the value, not always the largest
    # one.
    residual: float


def find_largest_eigenvalue(
    objective: SharpnessObjective,
    *,
    scale: Sequence[Tensor] | None = None,
    products: int = 30,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> HessianEigenvalue:
    """Finds the largest eigenvalue of the Hessian by power iteration from a random vector.

    Power iteration converges to the eigenvalue of the largest magnitude. If that is negative, a second iteration, of
    the Hessian minus that eigenvalue, converges to the largest. Either can stop at a smaller eigenvalue that its first
    vector was close to; the true one is then higher.

    Args:
        scale: D, shaped like the parameters: the result is the eigenvalue of D H D. With filter norms as D it is the
            curvature by relative change, which does not change if a filter before a batch norm is rescaled.
        products: Most Hessian-vector products of each iteration.
        tolerance: Residual at which the iteration stops.
    """
    largest = _iterate_power(objective, scale, 0.0, products, tolerance, seed)
    if largest.value >= 0:
        return largest
    beyond = _iterate_power(objective, scale, largest.value, products, tolerance, seed)
    value = beyond.value + largest.value
    residual = beyond.residual * abs(beyond.value) / max(abs(value), 1e-30)
    return HessianEigenvalue(value, largest.products + beyond.products, residual)


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
    v = [torch.randn(one.shape, generator=generator).to(one) for one in objective.parameters]
    if scale is not None:
        v = [a * (s != 0) for a, s in zip(v, scale, strict=True)]
    v = _normalise(v)
    value, residual = 0.0, float("inf")
    for count in range(1, products + 1):
        if scale is None:
            w = objective.multiply_hessian(v)
        else:
            w = objective.multiply_hessian([a * s for a, s in zip(v, scale, strict=True)])
            w = [a * s for a, s in zip(w, scale, strict=True)]
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


def _add(to: list[Tensor], more: Sequence[Tensor | None]) -> None:
    for one, other in zip(to, more, strict=True):
        if other is not None:
            one.add_(other.detach())


@torch.no_grad()
def _copy_into(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    # float64, because sums over millions of weights lose digits in float32.
    return float(sum((a.double() * b.double()).sum() for a, b in zip(one, other, strict=True)))


def _normalise(vector: list[Tensor]) -> list[Tensor]:
    length = max(_dot(vector, vector) ** 0.5, 1e-30)
    return [one / length for one in vector]
