"""The update rule of an optimizer, and the tensors that one step of it works on.

Nothing here waits for the device. `torch.where` gets tensors alone for that reason: it would copy a number to the
device, and wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, final

import torch
from torch import Tensor

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

    A step is skipped if loss scaling found an infinite gradient. Whether it is lies on the device, so a skipped step
    runs the same operations with coefficients that change nothing: see `gate_decay` and `gate_update`.

    Attributes:
        weights, grads: in the type that is computed in, float32 at least. Gradients are unscaled, and 0 in a skipped
            step.
        states: the state of each parameter, by name.
        group: the options.
        live: 1, or 0 in a skipped step, on the device; None: no step can be skipped.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]
    group: Group
    live: Tensor | None

    def get_states(self, name: str) -> list[Tensor]:
        """The state of that name of every parameter."""
        return [state[name] for state in self.states]

    def gate_lr(self) -> float | Tensor:
        """The learning rate, or 0 in a skipped step."""
        # A learning rate that is a tensor is captured in CUDA graphs; it is moved without waiting.
        lr: float | Tensor = self.group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.to(self.weights[0].device, self.weights[0].dtype)
        return lr if self.live is None else lr * self.live

    def gate_decay(self, share: float) -> float | Tensor:
        """The share that a state keeps, or 1 in a skipped step."""
        if self.live is None:
            return share
        # Both branches are tensors: see the head of this file.
        return torch.where(self.live > 0, torch.full_like(self.live, share), torch.ones_like(self.live))

    def gate_decays(self, shares: Tensor) -> Tensor:
        """The share that each parameter's state keeps, [n], or 1 in a skipped step."""
        return shares if self.live is None else torch.where(self.live > 0, shares, torch.ones_like(shares))

    def gate_update(self, share: Any) -> Any:
        """The factor on a value that is added to a state, or 0 in a skipped step."""
        return share if self.live is None else share * self.live

    def count_step(self) -> Tensor:
        """Counts the step, and returns each parameter's number of steps, float64 [n], at least 1."""
        steps = self.get_states("step")
        if self.live is None:
            torch._foreach_add_(steps, 1)
        else:
            # A list of tensors: the host would read the value of a single one.
            torch._foreach_add_(steps, [self.live.float()] * len(steps))
        return torch.stack(steps).double().clamp(min=1)

    def to_coefficients(self, values: Tensor) -> list[Tensor]:
        """One number for each parameter, [n] of any type, as coefficients of the type that is computed in."""
        return list(values.to(self.weights[0].dtype).unbind())

    def scale_layers(self, chosen: Sequence[int], ratio: Tensor, known: Tensor, rate: float | Tensor) -> list[Tensor]:
        """The rate of every parameter: rate * ratio for the chosen ones with a known ratio, and rate for the others.

        Args:
            ratio, known: a number and a bool for each of the chosen.
        """
        # A masked fill in place of a branch: the host does not know which ratios are known.
        values = self.to_coefficients(ratio.masked_fill(~known, 1.0) * rate)
        other = self.to_coefficients(torch.ones_like(ratio[:1]) * rate)
        # One tensor object for all others: they are only read.
        out = other * len(self.weights)
        for index, value in zip(chosen, values, strict=True):
            out[index] = value
        return out


@final
@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """The way in which the gradients of a group become a step.

    Attributes:
        apply: the step in torch's operations; changes weights and states in place.
        first_state, second_state: names of the states that have the parameter's shape; None: there is none.
        has_step_count: there is a state `step`, one number.
        norm_state: name of a state that is one number; None: there is none.
        native_rule: the same rule in the native core; None: the core does not know it.
        native_options: the numbers that the native core gets.
        has_trust_ratio: tells the parameters that have a trust ratio; None: all or none, as `trust_ratio` says.
        trust_ratio: the factor on the learning rate of each layer, [n]. Arguments are float64 [n] both: the norms of
            its weights, and of the value that is scaled (the gradient, LAMB's update, or the root of NovoGrad's
            moment). A ratio that comes from a norm of 0 is ignored. None: all layers have the same rate.
    """

    apply: Callable[[StepInputs], None]
    first_state: str | None = None
    second_state: str | None = None
    has_step_count: bool = False
    norm_state: str | None = None
    native_rule: NativeRule | None = None
    native_options: Sequence[float] = ()
    has_trust_ratio: Callable[[Tensor], bool] | None = None
    trust_ratio: Callable[[Tensor, Tensor], Tensor] | None = None
