"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv 2409.11321, algorithm 3).

The host counts the steps, as it has to know in which of them the bases change. So a step in which fp16 overflows is
skipped by the GradScaler on the host, and a CUDA graph cannot hold a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, Literal, final

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.optim import foreach_ops as ops
from headway.optim.fused_optimizer import FusedOptimizer, check_betas, check_ranges, check_whole_numbers
from headway.optim.groups import Group
from headway.optim.update_rule import StepInputs, UpdateRule

Side = Literal["row", "column"]


@final
class SOAP(FusedOptimizer):
    """Adam in rotated coordinates, in which the gradients of a matrix depend on each other least.

    A gradient of two dimensions or more is flattened to G [out, in * height * width]. L and R are running means of
    G G^T and G^T G with beta2, Q_L and Q_R their eigenvectors. With m the running mean of G, and v that of the square
    of Q_L^T G Q_R, w = (1 - lr * weight_decay) * w - lr * Q_L (Q_L^T m Q_R / (sqrt(v) + eps)) Q_R^T. Both means are
    corrected as Adam's are. The first step measures L and R alone. Every `precondition_every` steps, each basis makes a
    step of orthogonal iteration (`improve_basis`). A side of one number, or of more than `max_dim`, is not rotated.
    Parameters without a rotated side, such as biases, get AdamW's steps from the first step on.

    Args:
        lr: a number, or a scalar tensor. Adam's rates suit it.
        betas: shares of m, and of v, L and R, that are kept, in [0, 1).
        eps: added to sqrt(v).
        weight_decay: decoupled, as above.
        precondition_every: steps between two updates of the bases; k. The first is an eigenvalue decomposition.
        max_dim: largest number of rows or columns that gets a basis. A basis and its mean of n numbers need 2 n^2.
        normalise: bring the weights of filters (three dimensions or more) to the norm sqrt(out) before each step, as
            `Muon` does. For networks with batch norm after each filter.

    Raises:
        UsageError: an option is out of range; or a step is made while a CUDA graph is captured.
    """

    # The scaler then skips a step itself, and the host's count of steps is right.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        precondition_every: int = 10,
        max_dim: int = 2048,
        normalise: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shape = {"precondition_every": precondition_every, "max_dim": max_dim, "normalise": normalise}
        # Not capturable: step counts stay in host memory.
        super().__init__(params, options | shape | {"fused": False, "capturable": False})

    def _check_options(self, group: Group) -> None:
        check_ranges("SOAP", group, lr=(0, inf), eps=(0, inf), weight_decay=(0, inf))
        check_betas("SOAP", group)
        check_whole_numbers("SOAP", group, precondition_every=1, max_dim=0)

    def _build_update_rule(self, group: Group) -> UpdateRule:
        def list_matrices(parameter: Tensor) -> dict[str, int]:
            sizes = list_sides(parameter, group["max_dim"])
            return {name: size for side, size in sizes.items() for name in (_mean_name(side), _basis_name(side))}

        return UpdateRule(
            apply=_step,
            first_state="exp_avg",
            second_state="exp_avg_sq",
            has_step_count=True,
            counts_on_host=True,
            matrix_states=list_matrices,
            count_multiply_adds=lambda parameter: count_multiply_adds(
                parameter, group["max_dim"], group["precondition_every"]
            ),
        )


def list_sides(parameter: Tensor, max_dim: int) -> dict[Side, int]:
    """Returns the size of each side of a parameter that has a basis."""
    if parameter.ndim < 2 or not parameter.numel():
        return {}
    rows = len(parameter)
    sizes: dict[Side, int] = {"row": rows, "column": parameter.numel() // rows}
    return {side: size for side, size in sizes.items() if 1 < size <= max_dim}


def count_multiply_adds(parameter: Tensor, max_dim: int, precondition_every: int) -> float:
    """Counts the multiply-adds of a step, with the share of an update of the bases that falls to it."""
    sizes = list_sides(parameter, max_dim).values()
    # Each side turns the gradient, the mean and the step, and needs the product of the gradient with itself. An update
    # of a basis is one product, and a QR decomposition of 2/3 n^3 with as much again for its Q.
    return sum(4 * parameter.numel() * size + (1 + 4 / 3) * size**3 / precondition_every for size in sizes)


def _mean_name(side: Side) -> str:
    return f"{side}_covariance"


def _basis_name(side: Side) -> str:
    return f"{side}_basis"


def _step(inputs: StepInputs) -> None:
    """Steps the parameters of one group, type and device."""
    group = inputs.group
    weights, grads = inputs.weights, inputs.grads
    if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
        what = "SOAP changes its bases in some steps only, so a CUDA graph cannot hold its step"
        raise UsageError(what, fix="Capture forward and backward, and call step() after each replay.")
    beta1, _ = group["betas"]
    counts = [int(count) + 1 for count in inputs.get_states("step")]
    sides = [tuple(list_sides(weight, group["max_dim"])) for weight in weights]
    # The first step of a rotated parameter is no step of Adam.
    adam_counts = [count - bool(rotated) for count, rotated in zip(counts, sides, strict=True)]
    stepped = [index for index, count in enumerate(adam_counts) if count]

    def select(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[index] for index in stepped]

    if stepped:
        ops.update_moment_(select(inputs.get_states("exp_avg")), beta1, 1 - beta1, select(grads))
        if group["normalise"] and (filters := [weight for weight in select(weights) if weight.ndim > 2]):
            inputs.normalise_filters_(filters)
        if group["weight_decay"]:
            ops.scale_(select(weights), 1 - inputs.gate_lr() * group["weight_decay"])
    # On a GPU parameters of one shape go as one batch. On a CPU each goes alone, so that its bits do not depend on what
    # else a rank steps.
    batches: dict[Any, list[int]] = {}
    for index, weight in enumerate(weights):
        key = (weight.shape, counts[index]) if weight.is_cuda else index
        batches.setdefault(key, []).append(index)
    directions = [torch.empty(0)] * len(weights)
    for indices in batches.values():
        states = [inputs.states[index] for index in indices]
        found = _step_batch(
            [grads[index] for index in indices], states, sides[indices[0]], adam_counts[indices[0]], group
        )
        for index, direction in zip(indices, found, strict=True):
            directions[index] = direction
    if stepped:
        ops.descend_(select(weights), select(directions), inputs.gate_lr())
    torch._foreach_add_(inputs.get_states("step"), 1)


def _step_batch(
    grads: list[Tensor], states: list[dict[str, Tensor]], sides: Sequence[Side], count: int, group: Group
) -> list[Tensor]:
    """Updates second moments, covariances and bases of parameters of one shape, and returns the directions of the step.

    Args:
        sides: the sides that have a basis.
        count: Adam's steps with this one; 0: only covariances and bases begin.
    """
    (beta1, beta2), shape = group["betas"], grads[0].shape

    def stack(name: str) -> Tensor:
        tensors = [state[name] for state in states]
        return torch.stack(
            [tensor.flatten(1) if tensor.shape == shape and tensor.ndim > 1 else tensor for tensor in tensors]
        )

    def store(name: str, batch: Tensor) -> None:
        for state, value in zip(states, batch.unbind(), strict=True):
            state[name].copy_(value.view(state[name].shape))

    gradient = torch.stack([grad.flatten(1) if grad.ndim > 1 else grad for grad in grads])
    bases = {side: stack(_basis_name(side)) for side in sides} if count else {}
    directions: list[Tensor] = grads
    if count:
        moment = stack("exp_avg_sq").mul_(beta2).add_(_rotate(gradient, bases).square_(), alpha=1 - beta2)
        divisor = (moment / (1 - beta2**count)).sqrt_().add_(group["eps"])
        step = _rotate(stack("exp_avg"), bases).div_(divisor).div_(1 - beta1**count)
        directions = [one.reshape(shape) for one in _rotate(step, bases, back=True).unbind()]
        # A change of the bases stores it in their order.
        store("exp_avg_sq", moment)
    for side in sides:
        outer = gradient @ gradient.mT if side == "row" else gradient.mT @ gradient
        covariance = stack(_mean_name(side)).mul_(beta2).add_(outer, alpha=1 - beta2)
        store(_mean_name(side), covariance)
        if not count:
            store(_basis_name(side), compute_basis(covariance))
        elif count % group["precondition_every"] == 0:
            basis, order = improve_basis(covariance, bases[side])
            store(_basis_name(side), basis)
            axis = -2 if side == "row" else -1
            indices = order.unsqueeze(-1 if side == "row" else -2).expand_as(moment)
            moment = moment.gather(axis, indices)
            store("exp_avg_sq", moment)
    return directions


def compute_basis(covariance: Tensor) -> Tensor:
    """Returns the eigenvectors of symmetric matrices [..., n, n], the one of the largest eigenvalue first."""
    # A gradient that is not finite shows in the loss. Here it would end the run with an error of LAPACK's.
    finite = covariance.nan_to_num(0, 0, 0)
    try:
        vectors: Tensor = torch.linalg.eigh(finite).eigenvectors
    # A matrix of low rank has many equal eigenvalues, for which LAPACK may not converge in float32.
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # torch exports it without saying so
        vectors = torch.linalg.eigh(finite.double()).eigenvectors.to(finite.dtype)
    return vectors.flip(-1)


def improve_basis(covariance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Makes one step of orthogonal iteration towards the eigenvectors (algorithm 4).

    Args:
        covariance: P, symmetric, [..., n, n].
        basis: Q, orthogonal, [..., n, n].

    Returns:
        the Q of a QR decomposition of P Q, and the order of the old columns in it [..., n]: the largest eigenvalue
        first, without which columns whose eigenvalues have changed places would mix.
    """
    product = covariance @ basis
    order = (basis * product).sum(-2).argsort(dim=-1, descending=True, stable=True)
    ordered = product.gather(-1, order.unsqueeze(-2).expand_as(product))
    return torch.linalg.qr(ordered).Q, order


def _rotate(matrix: Tensor, bases: dict[Side, Tensor], *, back: bool = False) -> Tensor:
    """Returns new matrices Q_L^T M Q_R, or with `back` Q_L M Q_R^T; a side without a basis stays."""
    if not bases:
        return matrix.clone()
    if "row" in bases:
        matrix = (bases["row"] if back else bases["row"].mT) @ matrix
    if "column" in bases:
        matrix = matrix @ (bases["column"].mT if back else bases["column"])
    return matrix
