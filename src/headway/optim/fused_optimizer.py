"""The base of Headway's own optimizers: it collects the parameters of a step, and hands them on together.

The native core takes them if it can, else torch's multi-tensor operations do. State and arithmetic are float32 at
least, whatever the parameters' type; with `use_bf16` only the arithmetic is. There is no host-device sync: loss scale
and found-inf stay tensors, and so may the learning rate. A CUDA graph can capture any step after the first, if the
learning rate is a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.optim import native
from headway.optim.eager_optimizer import EagerOptimizer
from headway.optim.groups import Group
from headway.optim.split_parameters import SplitParameters
from headway.optim.stochastic_rounding import StochasticRounding
from headway.optim.update_rule import StepInputs, UpdateRule

SCALAR_SHAPE = torch.Size(())
"""The shape of a state that is one number."""


class FusedOptimizer(EagerOptimizer, ABC):
    """Base of the optimizers: a subclass has options, their limits, and the update rule that follows from them.

    Args:
        params: parameters or groups, as for every torch optimizer.
        defaults: default of each option; a group may override it.

    Attributes:
        split: the parameters of which other ranks have a part too; None: all are whole.
        rounding: rounds the state and bfloat16 parameters after a step; None: the state is float32 at least.
    """

    split: SplitParameters | None = None
    rounding: StochasticRounding | None = None

    # GradScaler then sets `grad_scale` and `found_inf` as tensors, instead of a sync that reads them.
    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        # `capturable` tells torch, and our checkpoints, that step counts lie on the parameter's device.
        super().__init__(params, {"capturable": True, **defaults})

    @abstractmethod
    def _check_options(self, group: Group) -> None:
        """Raises UsageError if an option is out of range."""

    @abstractmethod
    def _build_update_rule(self, group: Group) -> UpdateRule:
        """Builds the update rule of a group from its options."""

    def __getstate__(self) -> dict[str, Any]:
        # torch copies and pickles groups and state alone; a copy that rounds otherwise would refuse its own state.
        return {**super().__getstate__(), "rounding": self.rounding}

    def use_bf16(self, seed: int = 0) -> None:
        """Keeps the state in bfloat16, and rounds it, and bfloat16 parameters, stochastically. Call it before a step.

        Matrices (SOAP) and states of one number stay float32. Each parameter then has a state `step`, from which
        random bits follow, so that a resumed run rounds as one that went on.

        Args:
            seed: of the random bits. Ranks with the same weights, and resumed runs, need the same one.

        Raises:
            UsageError: there is a state already, or a parameter is neither float32 nor bfloat16.
        """
        if any(self.state.values()):
            what = f"{type(self).__name__} has a state in float32 already"
            raise UsageError(what, fix="Call use_bf16 before the first step, then load the state.")
        rounding = StochasticRounding(seed)
        for group in self.param_groups:
            for parameter in group["params"]:
                rounding.check(parameter)
        self.rounding = rounding

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, as every torch optimizer does.

        Raises:
            UsageError: an option out of range, or a parameter that is not a real dense tensor.
        """
        # torch fills in the defaults first, so that all options can be checked.
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
            for parameter in group["params"]:
                if not parameter.is_floating_point() or parameter.layout != torch.strided:
                    description = "sparse" if parameter.layout != torch.strided else str(parameter.dtype)
                    what = f"{type(self).__name__} takes dense real parameters, and one is {description}"
                    raise UsageError(what, fix="Give it to another optimizer.")
        except UsageError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient. Returns the result of `closure`, or None without one.

        Args:
            closure: computes loss and gradients again; it is called before the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        # Numbers by place in the groups, as random bits belong to a parameter.
        numbers: dict[Tensor, int] = {}
        for group in self.param_groups:
            if self.rounding is not None:
                numbers |= {parameter: len(numbers) + index for index, parameter in enumerate(group["params"])}
            # The rule is built anew at each step, as options such as lr change between steps.
            rule = self._build_update_rule(group)
            # The native core reads these scalars, and for one on a GPU that would be a host-device sync.
            scalars = [scalar for scalar in (grad_scale, found_inf, group["lr"]) if isinstance(scalar, Tensor)]
            scalars_on_cpu = all(scalar.device.type == "cpu" for scalar in scalars)
            parts = frozenset[Tensor]() if self.split is None else self.split.parameters
            allows_native = group["fused"] and rule.native_rule is not None and scalars_on_cpu
            # Parameters of one device and type share a call, so its overhead is paid once for all of them.
            parameters_by_call: dict[tuple[torch.device, torch.dtype, bool, bool], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._init_state(parameter, rule)
                    # The core computes norms itself, and knows no other ranks.
                    is_part = rule.trust_ratio is not None and parameter in parts
                    is_native = allows_native and not is_part and self._fits_native(parameter, rule)
                    call = (parameter.device, parameter.dtype, is_native, is_part)
                    parameters_by_call.setdefault(call, []).append(parameter)
            for (_, _, is_native, is_part), parameters in parameters_by_call.items():
                if is_native:
                    self._step_native(parameters, rule, group, grad_scale, found_inf, numbers)
                else:
                    self._step_torch(parameters, rule, group, grad_scale, found_inf, numbers, is_part=is_part)
        return loss

    def list_states(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Returns (shape, dtype) of each state of a parameter by name."""
        return self._list_states(self._build_update_rule(dict(group)), parameter)

    def _list_states(self, rule: UpdateRule, parameter: Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        dtype = wide if self.rounding is None else torch.bfloat16
        states = dict.fromkeys(_name_arrays(rule), (parameter.shape, dtype))
        if rule.matrix_states is not None:
            sizes = rule.matrix_states(parameter)
            states |= {name: (torch.Size((size, size)), wide) for name, size in sizes.items()}
        if rule.has_step_count or self.rounding is not None:
            states["step"] = (SCALAR_SHAPE, torch.float32)
        if rule.norm_state is not None:
            states[rule.norm_state] = (SCALAR_SHAPE, wide)
        return states

    def _init_state(self, parameter: Tensor, rule: UpdateRule) -> None:
        """Creates the missing states of a parameter as zeros.

        Raises:
            UsageError: the gradient is sparse, or a loaded state has another shape or type.
        """
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            what = f"{type(self).__name__} takes no sparse gradients"
            raise UsageError(what, fix="Set sparse=False in that layer, or give it to another optimizer.")
        if self.rounding is not None:
            self.rounding.check(parameter)
        for name, (shape, dtype) in self._list_states(rule, parameter).items():
            if name not in state:
                # A parameter without dimensions has the shape of a count, which may belong on the host.
                if name != "step" and shape == parameter.shape:
                    # It keeps the memory format, which the native core needs to be that of the parameter.
                    state[name] = torch.zeros_like(parameter, dtype=dtype)
                else:
                    is_on_host = name == "step" and rule.counts_on_host
                    state[name] = torch.zeros(shape, dtype=dtype, device="cpu" if is_on_host else parameter.device)
                continue
            value = state[name]
            if value.dtype != dtype or value.shape != shape:
                what = f"{type(self).__name__} has {name!r} of shape {tuple(value.shape)} and {value.dtype}"
                what += f" for a parameter of shape {tuple(parameter.shape)} and {parameter.dtype}"
                fix = "Load the state of an optimizer of the same network, with use_bf16 as it had it."
                raise UsageError(what, fix=fix)

    def _fits_native(self, parameter: Tensor, rule: UpdateRule) -> bool:
        """Returns True if the native core can step a parameter: on the CPU, of a known type, with equal strides."""
        grad = parameter.grad
        assert grad is not None
        return (
            parameter.device.type == "cpu"
            and parameter.dtype in native.NATIVE_TYPE_BY_DTYPE
            # To the nearest number of 16 bits only torch's operations round.
            and (self.rounding is not None or parameter.dtype != torch.bfloat16)
            and grad.dtype == parameter.dtype
            and _have_same_layout(parameter, grad, [self.state[parameter][name] for name in _name_arrays(rule)])
            and native.is_available()
        )

    def _step_native(
        self,
        parameters: list[Tensor],
        rule: UpdateRule,
        group: Group,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        numbers: Mapping[Tensor, int],
    ) -> None:
        # The core gets parallel lists: entry i of each belongs to parameter i.
        states = [self.state[parameter] for parameter in parameters]

        def get_states(name: str | None) -> list[Tensor] | None:
            return None if name is None else [state[name] for state in states]

        has_trust_ratio, rounding = rule.has_trust_ratio, self.rounding
        assert rule.native_rule is not None
        native.step_native(
            rule.native_rule,
            native.NativeTensors(
                weights=parameters,
                grads=[parameter.grad for parameter in parameters],  # type: ignore[misc]
                keys=None if rounding is None else [rounding.compute_key(numbers[one]) for one in parameters],
                first=get_states(rule.first_state),
                second=get_states(rule.second_state),
                count=get_states("step") if rule.has_step_count or rounding is not None else None,
                norm=get_states(rule.norm_state),
                adapt=None if has_trust_ratio is None else [has_trust_ratio(parameter) for parameter in parameters],
            ),
            options=rule.native_options,
            lr=group["lr"],
            grad_scale=grad_scale,
            found_inf=found_inf,
        )

    def _step_torch(
        self,
        parameters: list[Tensor],
        rule: UpdateRule,
        group: Group,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        numbers: Mapping[Tensor, int],
        *,
        is_part: bool,
    ) -> None:
        device = parameters[0].device
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        weights = [parameter.to(dtype) for parameter in parameters]
        grads = [parameter.grad.to(dtype) for parameter in parameters]  # type: ignore[union-attr]
        if grad_scale is not None:
            inverse_scale = grad_scale.to(device, torch.float64, non_blocking=True).reciprocal().to(dtype)
            grads = list(torch._foreach_mul(grads, inverse_scale))
        live = None
        if found_inf is not None:
            live = (found_inf.to(device, non_blocking=True).reshape(()) == 0).to(dtype)
            # Infinity times 0 is NaN, so the gradients of a skipped step are replaced, not multiplied.
            grads = [grad.masked_fill(live == 0, 0) for grad in grads]
        states: list[dict[str, Tensor]] = [self.state[parameter] for parameter in parameters]
        if self.rounding is not None:
            # A state in bfloat16 is copied to float32; all others are changed in place.
            states = [
                {name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in state.items()}
                for state in states
            ]
        sum_over_ranks = self.split.sum_over_ranks if is_part and self.split is not None else None
        inputs = StepInputs(
            weights=weights, grads=grads, states=states, group=group, live=live, sum_over_ranks=sum_over_ranks
        )
        rule.apply(inputs)
        if self.rounding is not None:
            if not rule.has_step_count:
                inputs.count_step()
            steps = torch.stack(inputs.get_states("step")).to(device, non_blocking=True)
            places = [numbers[parameter] for parameter in parameters]
            if parameters[0].dtype == torch.bfloat16:
                self.rounding.round_(weights, places, steps, 0)
            for array, name in enumerate((rule.first_state, rule.second_state), 1):
                if name is not None:
                    values = inputs.get_states(name)
                    self.rounding.round_(values, places, steps, array)
                    torch._foreach_copy_([self.state[parameter][name] for parameter in parameters], values)
        # 16-bit parameters were stepped in float32 copies.
        if dtype != parameters[0].dtype:
            torch._foreach_copy_(parameters, weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch's optimizers do, but each tensor keeps its dtype and gets its parameter's strides."""
        # torch converts states to the type of their parameter; a 16-bit parameter would lose its float32 moments.
        super().load_state_dict(state_dict)
        # It replaces whole groups, and those of an earlier version lack the options that came later.
        for group in self.param_groups:
            group.update({name: value for name, value in self.defaults.items() if name not in group})
        saved_indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved_indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                    self.state[parameter][name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                elif isinstance(value, Tensor):
                    is_on_host = name == "step" and not self.defaults["capturable"]
                    self.state[parameter][name] = value.to("cpu" if is_on_host else parameter.device, copy=True)


def _have_same_layout(parameter: Tensor, grad: Tensor, states: list[Tensor]) -> bool:
    """Returns True if all tensors are dense, with the same strides."""
    strides = parameter.stride()
    if grad.stride() != strides:
        return False
    # States are always dense, so equal strides mean that the parameter is dense too.
    if not states:
        return parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    return all(state.stride() == strides for state in states)


def _name_arrays(rule: UpdateRule) -> list[str]:
    """Returns the names of the states that have the parameter's shape."""
    return [name for name in (rule.first_state, rule.second_state) if name is not None]


def require_steps_per_epoch(name: str, steps_per_epoch: float | None) -> None:
    """Raises UsageError if `steps_per_epoch` is None, for an optimizer that counts in epochs."""
    if steps_per_epoch is None:
        fix = "Give it steps_per_epoch: samples of the data set / batch."
        raise UsageError(f"{name} counts in epochs, and does not know the length of one", fix=fix)


def check_ranges(name: str, group: Group, **limits: tuple[float, float]) -> None:
    """Raises UsageError if an option is not a number in [low, high).

    Args:
        name: name of the optimizer.
        group: the options.
        limits: (low, high) by option. A tensor, allowed for `lr` alone, is not read: that would be a sync.
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


def check_whole_numbers(name: str, group: Group, **least: int) -> None:
    """Raises UsageError if an option is not an int, or below its least value."""
    for option, low in least.items():
        if type(group[option]) is not int or group[option] < low:
            what = f"{name} has {option}={group[option]!r}"
            raise UsageError(what, fix=f"Give it a whole number of at least {low}.")


def check_betas(name: str, group: Group) -> None:
    """Raises UsageError unless the betas are two numbers in [0, 1)."""
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise UsageError(f"{name} has betas={betas!r}", fix="Give it two numbers in [0, 1), for example (0.9, 0.999).")
    beta1, beta2 = betas
    check_ranges(name, {"betas[0]": beta1, "betas[1]": beta2}, **{"betas[0]": (0, 1), "betas[1]": (0, 1)})
