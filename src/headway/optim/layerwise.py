"""The core of the optimizers: parameters are collected once a step and handed on together, to the native core where it
takes them, else to torch's multi-tensor operations.

State and arithmetic are float32 at least, whatever the parameters' type. Nothing waits for the device: loss scale and
found-inf stay tensors, and so may the learning rate. A step after the first can be captured in a CUDA graph, with a
learning rate that is a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.core.errors import UsageError
from headway.optim import native
from headway.optim.work import Group, Rule, Work

SCALAR = torch.Size(())
"""The shape of a state that is one number."""


class LayerWise(Optimizer, ABC):
    """Base of the optimizers: a subclass has options, their limits, and the rule that follows from them.

    Args:
        params: as of every torch optimizer.
        defaults: the options; a group may have its own.
    """

    _step_supports_amp_scaling = True  # a GradScaler hands over its tensors, and does not wait

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        # `capturable` tells torch, and our checkpoints, that step counts lie on the parameter's device.
        super().__init__(params, {**defaults, "capturable": True})

    @abstractmethod
    def _check(self, group: Group) -> None:
        """Raises UsageError for options that cannot be meant."""

    @abstractmethod
    def _rule(self, group: Group) -> Rule:
        """How this group steps."""

    def add_param_group(self, param_group: Group) -> None:
        """As of every torch optimizer. Raises UsageError: see the class, or a parameter is no real dense tensor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            for parameter in group["params"]:
                if not parameter.is_floating_point() or parameter.layout != torch.strided:
                    kind = "sparse" if parameter.layout != torch.strided else str(parameter.dtype)
                    what = f"{type(self).__name__} takes dense real parameters, and one is {kind}"
                    raise UsageError(what, fix="Give it to another optimizer.")
        except UsageError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all parameters that have a gradient.

        Args:
            closure: computes the loss anew; called first, and its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            rule = self._rule(group)
            on_host = all(one is None or one.device.type == "cpu" for one in (scale, found_inf, _tensor(group["lr"])))
            may_be_native = group["fused"] and rule.number is not None and on_host
            together: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    together.setdefault(self._way(parameter, rule, may_be_native), []).append(parameter)
            for (_, _, is_native), parameters in together.items():
                if is_native:
                    self._step_native(parameters, rule, group, scale, found_inf)
                else:
                    self._step_torch(parameters, rule, group, scale, found_inf)
        return loss

    def states_of(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, tuple[bool, torch.dtype]]:
        """What is kept of a parameter: by name, whether it is one number (else of the parameter's shape), and its
        type."""
        return _states(self._rule(dict(group)), parameter)

    def _way(self, parameter: Tensor, rule: Rule, may_be_native: bool) -> tuple[torch.device, torch.dtype, bool]:
        """Device, type, and whether the native core takes it; begins its state where there is none.

        Raises UsageError: a state that was loaded is of another shape or type.
        """
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            what = f"{type(self).__name__} takes no sparse gradients"
            raise UsageError(what, fix="Set sparse=False in that layer, or give it to another optimizer.")
        names = [name for name in (rule.first, rule.second) if name is not None]
        for name, (number, wide) in _states(rule, parameter).items():
            if name not in state:
                like = torch.zeros((), dtype=wide, device=parameter.device)
                state[name] = like if number else torch.zeros_like(parameter, dtype=wide)
                continue
            value = state[name]
            if value.dtype != wide or value.shape != (SCALAR if number else parameter.shape):
                what = f"{type(self).__name__} has {name!r} of shape {tuple(value.shape)} and {value.dtype}"
                what += f" for a parameter of shape {tuple(parameter.shape)} and {parameter.dtype}"
                raise UsageError(what, fix="Load the state of an optimizer of the same network.")
        is_native = (
            parameter.device.type == "cpu"
            and may_be_native
            and parameter.dtype in native.TYPES
            and grad.dtype == parameter.dtype
            and self._alike(parameter, grad, [state[name] for name in names])
            and native.available()
        )
        return parameter.device, parameter.dtype, is_native

    @staticmethod
    def _alike(parameter: Tensor, grad: Tensor, states: list[Tensor]) -> bool:
        """Whether all lie in memory without gaps, and in the same order."""
        strides = parameter.stride()
        if grad.stride() != strides:
            return False
        if not states:  # a state is dense whatever the parameter is
            return parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
        return all(state.stride() == strides for state in states)

    def _step_native(
        self, parameters: list[Tensor], rule: Rule, group: Group, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        states = [self.state[parameter] for parameter in parameters]

        def of(name: str | None) -> list[Tensor] | None:
            return None if name is None else [state[name] for state in states]

        assert rule.number is not None
        native.step(
            native.Number(rule.number),
            parameters,
            [parameter.grad for parameter in parameters],  # type: ignore[misc]
            first=of(rule.first),
            second=of(rule.second),
            count=of("step") if rule.counted else None,
            norm=of(rule.norm),
            adapt=None if rule.adapt is None else [rule.adapt(parameter) for parameter in parameters],
            options=rule.options,
            lr=group["lr"],
            grad_scale=scale,
            found_inf=found_inf,
        )

    def _step_torch(
        self, parameters: list[Tensor], rule: Rule, group: Group, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        device, kind = parameters[0].device, torch.promote_types(parameters[0].dtype, torch.float32)
        weights = [parameter.to(kind) for parameter in parameters]
        grads = [parameter.grad.to(kind) for parameter in parameters]  # type: ignore[union-attr]
        if scale is not None:
            inverse = scale.to(device, torch.float64, non_blocking=True).reciprocal().to(kind)
            grads = list(torch._foreach_mul(grads, inverse))
        live = None
        if found_inf is not None:
            live = (found_inf.to(device, non_blocking=True).reshape(()) == 0).to(kind)
            grads = [grad.masked_fill(live == 0, 0) for grad in grads]  # an infinity times 0 would be no number
        states = [self.state[parameter] for parameter in parameters]
        rule.apply(Work(weights=weights, grads=grads, states=states, group=group, live=live))
        if kind != parameters[0].dtype:
            torch._foreach_copy_(parameters, weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every torch optimizer; but a state keeps its type, and takes its parameter's memory format."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, mine, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                    self.state[parameter][name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                elif isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def _states(rule: Rule, parameter: Tensor) -> dict[str, tuple[bool, torch.dtype]]:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    found = {name: (False, wide) for name in (rule.first, rule.second) if name is not None}
    if rule.counted:
        found["step"] = (True, torch.float32)
    if rule.norm is not None:
        found[rule.norm] = (True, wide)
    return found


def _tensor(value: float | Tensor) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def expect_length(name: str, steps_per_epoch: float | None) -> None:
    """Raises UsageError where an optimizer that counts in epochs is not told how long one is."""
    if steps_per_epoch is None:
        fix = "Give it steps_per_epoch: samples of the data set / batch."
        raise UsageError(f"{name} counts in epochs, and does not know the length of one", fix=fix)


def refuse(name: str, group: Group, **limits: tuple[float, float]) -> None:
    """Raises UsageError for an option outside [low, high), or that is no number; tensors are not looked at.

    Args:
        name: of the optimizer.
    """
    for option, (low, high) in limits.items():
        value = group[option]
        if isinstance(value, Tensor):
            if option != "lr":
                raise UsageError(f"{name} has a tensor as {option}", fix="Only lr can be one.")
            continue
        if not isinstance(value, Real) or not low <= float(value) < high:
            span = f"in [{low:g}, {high:g})" if high != float("inf") else f"of at least {low:g}"
            raise UsageError(f"{name} has {option}={value!r}", fix=f"Give it a finite number {span}.")
