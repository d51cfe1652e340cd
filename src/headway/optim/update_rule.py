"""The update rule of an optimizer, and the tensors that one step of it works on.

There is no host-device sync here. For that reason `torch.where` gets tensors only: it would copy a number to the device
and wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, final

import torch
from torch import Tensor

from headway.optim import foreach_ops as ops
from headway.optim.groups import Group


@final
class NativeRule(IntEnum):
    """Numbers of the update rules in the native core: HW_LARS and so on."""

    LARS = 0
    LAMB = 1
    NOVOGRAD = 2
    SIGNUM = 3
    FTML = 4
    # HW_TRANSITION
    RMSPROP_SGD = 5
    LBSGD = 6


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The parameters of a group that lie on one device and have one type.

    A step is skipped if loss scaling found an infinite gradient. The host does not know that, so a skipped step runs
    the same operations with coefficients that change nothing: see `gate_decay` and `gate_update`.

    Attributes:
        weights: the parameters in the type of the arithmetic, float32 at least; changed in place.
        grads: their gradients in that type: unscaled, and 0 in a skipped step.
        states: the state of each parameter, by name; changed in place.
        group: the options.
        live: 1, or 0 in a skipped step, on the device; None: no step can be skipped.
        sum_over_ranks: adds a tensor of all ranks that have a part of these parameters; None: they are whole.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]
    group: Group
    live: Tensor | None
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None

    def get_states(self, name: str) -> list[Tensor]:
        """Returns the state `name` of every parameter."""
        return [state[name] for state in self.states]

    def compute_norms(self, indices: Sequence[int], *values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the Euclidean norms of several values of the parameters, such as their gradients, each float64 [n].

        Args:
            indices: indices of the n parameters.
            values: of each value, the tensors of all parameters.
        """
        norms = torch.stack([ops.compute_norms([tensors[index] for index in indices]) for tensors in values])
        if self.sum_over_ranks is not None:
            norms = self.sum_over_ranks(norms.square()).sqrt()
        return norms.unbind()

    def gate_lr(self) -> float | Tensor:
        """Returns the learning rate, or 0 in a skipped step."""
        # A learning rate that is a tensor is captured in CUDA graphs.
        lr: float | Tensor = self.group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.to(self.weights[0].device, self.weights[0].dtype)
        return lr if self.live is None else lr * self.live

    def gate_decay(self, decay: float) -> float | Tensor:
        """Returns the decay factor of a state, or 1 in a skipped step."""
        if self.live is None:
            return decay
        # Both branches are tensors: see the docstring of this file.
        return torch.where(self.live > 0, torch.full_like(self.live, decay), torch.ones_like(self.live))

    def gate_decays(self, decays: Tensor) -> Tensor:
        """Returns the decay factor of each parameter's state, [n], or 1 in a skipped step."""
        return decays if self.live is None else torch.where(self.live > 0, decays, torch.ones_like(decays))

    def gate_update(self, factor: Any) -> Any:
        """Returns the factor on a value that is added to a state, or 0 in a skipped step."""
        return factor if self.live is None else factor * self.live

    def normalise_filters_(self, filters: list[Tensor]) -> None:
        """Scales filters, which are some of the weights, to the norm sqrt(out), in place; those of zeros stay."""
        norms = ops.compute_norms(filters)
        inverse = 1 / norms.masked_fill(norms == 0, 1.0)
        factors = ops.multiply(list(inverse.unbind()), [len(weight) ** 0.5 for weight in filters])
        ops.scale_(filters, self.to_coefficients(self.gate_decays(torch.stack(factors))))

    def count_step(self) -> Tensor:
        """Increments the step counts, and returns them, float64 [n], at least 1. A skipped step does not count."""
        steps = self.get_states("step")
        if self.live is None:
            torch._foreach_add_(steps, 1)
        else:
            # A list of tensors, because the host would read the value of a single one.
            torch._foreach_add_(steps, [self.live.float()] * len(steps))
        return torch.stack(steps).double().clamp(min=1)

    def to_coefficients(self, values: Tensor) -> list[Tensor]:
        """Returns a scalar tensor for each parameter, in the type of the arithmetic, from [n] values of any type."""
        return list(values.to(self.weights[0].dtype).unbind())

    def scale_layers(self, indices: Sequence[int], ratio: Tensor, is_valid: Tensor, lr: float | Tensor) -> list[Tensor]:
        """Returns the learning rate of every parameter: lr * ratio where the ratio is valid, and lr for all others.

        Args:
            indices: indices of the parameters that have a ratio.
            ratio: [len(indices)], their trust ratios.
            is_valid: bool [len(indices)].
            lr: learning rate of the group.
        """
        # A masked fill in place of a branch: the host does not know which ratios are valid.
        values = self.to_coefficients(ratio.masked_fill(~is_valid, 1.0) * lr)
        default_rate = self.to_coefficients(torch.ones_like(ratio[:1]) * lr)
        # The others share one tensor, as they are only read.
        rates = default_rate * len(self.weights)
        for index, value in zip(indices, values, strict=True):
            rates[index] = value
        return rates


@final
@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """The way in which the gradients of a group become a step.

    Attributes:
        apply: the step in torch's operations; changes weights and states in place.
        first_state: name of a state with the parameter's shape; None: there is none.
        second_state: name of another one; None: there is none.
        has_step_count: there is a scalar state `step`.
        counts_on_host: `step` lies in host memory.
        matrix_states: lists the sizes of a parameter's states that are square matrices, by name; None: there are none.
        norm_state: name of another scalar state; None: there is none.
        count_multiply_adds: counts the multiply-adds of the matrix products that a step makes for a parameter; None:
            there are no products. Ranks divide parameters by it, so it does not depend on the kind of processor.
        native_rule: the same rule in the native core; None: the core does not know it.
        native_options: the numbers that the native core gets.
        has_trust_ratio: tells if a parameter has a trust ratio; None: all or none have, as `trust_ratio` says.
        trust_ratio: computes the factor on the learning rate of each layer, [n], from two float64 [n]: the norms of its
            weights, and of the value that is scaled (the gradient, LAMB's update, or the root of NovoGrad's moment). A
            ratio that comes from a norm of 0 is ignored. None: all layers have the same rate.
    """

    apply: Callable[[StepInputs], None]
    first_state: str | None = None
    second_state: str | None = None
    has_step_count: bool = False
    counts_on_host: bool = False
    matrix_states: Callable[[Tensor], dict[str, int]] | None = None
    norm_state: str | None = None
    count_multiply_adds: Callable[[Tensor], float] | None = None
    native_rule: NativeRule | None = None
    native_options: Sequence[float] = ()
    has_trust_ratio: Callable[[Tensor], bool] | None = None
    trust_ratio: Callable[[Tensor, Tensor], Tensor] | None = None
