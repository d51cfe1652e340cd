"""The base of Headway's own optimizers: it collects the parameters of a step, and hands them on together.

The native core takes them if it can, else torch's multi-tensor operations do. State and arithmetic are float32 at
least, whatever the parameters' type. Nothing waits for the device: loss scale and found-inf stay tensors, and so may
the learning rate. A CUDA graph can capture any step after the first, if the learning rate is a tensor.
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
from headway.optim.groups import Group
from headway.optim.update_rule import StepInputs, UpdateRule

SCALAR = torch.Size(())
"""The shape of a state that is one number."""


class FusedOptimizer(Optimizer, ABC):
    """Base of the optimizers: a subclass has options, their limits, and the update rule that follows from them.

    Args:
        params: as of every torch optimizer.
        defaults: the options; a group may have its own.
    """

    # GradScaler then hands over its tensors and does not wait.
    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        # `capturable` tells torch, and our checkpoints, that step counts lie on the parameter's device.
        super().__init__(params, {**defaults, "capturable": True})

    @abstractmethod
    def _check(self, group: Group) -> None:
        """Raises UsageError for options out of range."""

    @abstractmethod
    def _rule(self, group: Group) -> UpdateRule:
        """Builds the update rule of a group from its options."""

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, as every torch optimizer does.

        Raises:
            UsageError: an option out of range, or a parameter that is not a real dense tensor.
        """
        # torch fills in the defaults first, so that all options can be checked.
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
        """Steps all parameters that have a gradient.

        Args:
            closure: computes the loss again; it is called first, and its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            # The rule is built anew at each step, as options such as lr change between steps.
            rule = self._rule(group)
            # A scalar on a device would make the native core wait for it.
            scalars = [one for one in (scale, found_inf, group["lr"]) if isinstance(one, Tensor)]
            on_host = all(one.device.type == "cpu" for one in scalars)
            may_be_native = group["fused"] and rule.native_rule is not None and on_host
            # Parameters that are handled alike share one call: the overhead is paid once for each type and device.
            together: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._begin_state(parameter, rule)
                    is_native = may_be_native and self._fits_native(parameter, rule)
                    together.setdefault((parameter.device, parameter.dtype, is_native), []).append(parameter)
            for (_, _, is_native), parameters in together.items():
                step = self._step_native if is_native else self._step_torch
                step(parameters, rule, group, scale, found_inf)
        return loss

    def list_states(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, tuple[bool, torch.dtype]]:
        """Lists the states that are kept for a parameter: (it is one number, else has the parameter's shape; type)."""
        return _list_states(self._rule(dict(group)), parameter)

    def _begin_state(self, parameter: Tensor, rule: UpdateRule) -> None:
        """Creates the states that a parameter lacks.

        Raises:
            UsageError: a sparse gradient, or a loaded state of another shape or type.
        """
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            what = f"{type(self).__name__} takes no sparse gradients"
            raise UsageError(what, fix="Set sparse=False in that layer, or give it to another optimizer.")
        for name, (is_number, kind) in _list_states(rule, parameter).items():
            if name not in state:
                # `zeros_like` keeps the memory format, which the native core needs to be that of the parameter.
                like = torch.zeros((), dtype=kind, device=parameter.device)
                state[name] = like if is_number else torch.zeros_like(parameter, dtype=kind)
                continue
            value = state[name]
            if value.dtype != kind or value.shape != (SCALAR if is_number else parameter.shape):
                what = f"{type(self).__name__} has {name!r} of shape {tuple(value.shape)} and {value.dtype}"
                what += f" for a parameter of shape {tuple(parameter.shape)} and {parameter.dtype}"
                raise UsageError(what, fix="Load the state of an optimizer of the same network.")

    def _fits_native(self, parameter: Tensor, rule: UpdateRule) -> bool:
        """Returns True if the native core takes a parameter: on the CPU, of a known type, tensors laid out alike."""
        grad = parameter.grad
        assert grad is not None
        names = [name for name in (rule.first_state, rule.second_state) if name is not None]
        return (
            parameter.device.type == "cpu"
            and parameter.dtype in native.TYPES
            and grad.dtype == parameter.dtype
            and _share_layout(parameter, grad, [self.state[parameter][name] for name in names])
            and native.is_available()
        )

    def _step_native(
        self, parameters: list[Tensor], rule: UpdateRule, group: Group, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        # The core gets parallel lists: entry i of each belongs to parameter i.
        states = [self.state[parameter] for parameter in parameters]

        def get_states(name: str | None) -> list[Tensor] | None:
            return None if name is None else [state[name] for state in states]

        adapts = rule.has_trust_ratio
        assert rule.native_rule is not None
        native.step_native(
            rule.native_rule,
            native.NativeTensors(
                weights=parameters,
                grads=[parameter.grad for parameter in parameters],  # type: ignore[misc]
                first=get_states(rule.first_state),
                second=get_states(rule.second_state),
                count=get_states("step") if rule.has_step_count else None,
                norm=get_states(rule.norm_state),
                adapt=None if adapts is None else [adapts(parameter) for parameter in parameters],
            ),
            options=rule.native_options,
            lr=group["lr"],
            grad_scale=scale,
            found_inf=found_inf,
        )

    def _step_torch(
        self, parameters: list[Tensor], rule: UpdateRule, group: Group, scale: Tensor | None, found_inf: Tensor | None
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
            # Infinity times 0 is NaN, so the gradients of a skipped step are replaced, not multiplied.
            grads = [grad.masked_fill(live == 0, 0) for grad in grads]
        states = [self.state[parameter] for parameter in parameters]
        rule.apply(StepInputs(weights=weights, grads=grads, states=states, group=group, live=live))
        # 16-bit parameters were stepped in float32 copies.
        if kind != parameters[0].dtype:
            torch._foreach_copy_(parameters, weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, as every torch optimizer does; but each value keeps its type, and takes the parameter's memory
        format."""
        # torch converts states to the type of their parameter; a 16-bit parameter would lose its float32 moments.
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                    self.state[parameter][name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                elif isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def _share_layout(parameter: Tensor, grad: Tensor, states: list[Tensor]) -> bool:
    """Returns True if all lie in memory without gaps, and in the same order."""
    strides = parameter.stride()
    if grad.stride() != strides:
        return False
    # A state is dense whatever the parameter is: equal strides say that the parameter is dense, too.
    if not states:
        return parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    return all(state.stride() == strides for state in states)


def _list_states(rule: UpdateRule, parameter: Tensor) -> dict[str, tuple[bool, torch.dtype]]:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    states = {name: (False, wide) for name in (rule.first_state, rule.second_state) if name is not None}
    if rule.has_step_count:
        states["step"] = (True, torch.float32)
    if rule.norm_state is not None:
        states[rule.norm_state] = (True, wide)
    return states


def require_steps_per_epoch(name: str, steps_per_epoch: float | None) -> None:
    """Raises UsageError if an optimizer that counts in epochs does not know the length of one."""
    if steps_per_epoch is None:
        fix = "Give it steps_per_epoch: samples of the data set / batch."
        raise UsageError(f"{name} counts in epochs, and does not know the length of one", fix=fix)


def check_ranges(name: str, group: Group, **limits: tuple[float, float]) -> None:
    """Raises UsageError for an option that is not a number in [low, high).

    Args:
        name: name of the optimizer.
        limits: (low, high) by option. The value of a tensor is not checked: reading it would wait for the device.
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


def check_betas(name: str, group: Group) -> None:
    """Raises UsageError unless the betas are two numbers in [0, 1)."""
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise UsageError(f"{name} has betas={betas!r}", fix="Give it two numbers in [0, 1), for example (0.9, 0.999).")
    beta1, beta2 = betas
    check_ranges(name, {"betas[0]": beta1, "betas[1]": beta2}, **{"betas[0]": (0, 1), "betas[1]": (0, 1)})
