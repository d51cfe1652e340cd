"""Master weights: a 16-bit network whose optimizer steps fp32 copies of the weights.

Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740), section 3.1; multi_precision in MXNet, O2 in
apex. A 16-bit weight loses an update of less than half of its last digit; on the fp32 copy such updates add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from headway.core.errors import UsageError

KEPT = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Modules whose parameters and statistics stay fp32. Kernels of batch norm accept 16-bit images beside fp32 parameters.
For the others, inputs are widened and outputs narrowed."""

KINDS = (torch.bfloat16, torch.float16)


@final
class MasterWeights:
    """Converts a network to 16 bits in place, and gives its optimizer fp32 masters instead of its weights.

    Clipping, loss scaling and parameter groups then act on the masters. A step is: `take_gradients`, the optimizer's
    step, `write_back`; none of them waits for the device. The weights are always the rounded masters: a value that you
    write into a weight is lost at the next step.

    Parameters and statistics of batch, instance, group, layer and RMS norm stay fp32, and the optimizer steps them
    directly. All other parameters and floating-point buffers become 16 bit wide, and so do floating-point inputs of the
    network. A gradient has the type of its parameter: gradients of several backward passes add up in 16 bits.

    Args:
        model: in fp32, with its initial weights, on its device and in its memory format.
        optimizer: any optimizer over parameters of the network.
        kind: torch.bfloat16 or torch.float16.

    Raises:
        UsageError: another type, or the optimizer has no parameter of the network.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, kind: torch.dtype) -> None:
        if kind not in KINDS:
            raise UsageError(f"{kind} is not a 16-bit type", fix="Give MasterWeights torch.bfloat16 or torch.float16.")
        mine = {id(value) for value in model.parameters()}
        if not any(id(value) in mine for group in optimizer.param_groups for value in group["params"]):
            fix = "Make the optimizer from the parameters of the network, and its MasterWeights once."
            raise UsageError("the optimizer has no parameter of this network, and would train nothing", fix=fix)
        # Norms stay fp32: their statistics lose too much in 16 bits.
        kept = {id(value) for one in model.modules() if isinstance(one, KEPT) for value in one.parameters(False)}
        self._model = model
        self._masters: dict[Tensor, nn.Parameter] = {}
        value: Tensor
        for value in model.parameters():
            if value.is_floating_point() and id(value) not in kept:
                self._masters[value] = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
        # The optimizer keeps its groups and its state, with masters in the places of the weights.
        for group in optimizer.param_groups:
            group["params"] = [self._masters.get(value, value) for value in group["params"]]
        for value in [value for value in optimizer.state if value in self._masters]:
            optimizer.state[self._masters[value]] = optimizer.state.pop(value)
        # Frozen weights have masters, too, so that checkpoints hold them in fp32; but no gradients go there.
        self._trained = [(half, master) for half, master in self._masters.items() if half.requires_grad]
        self._narrow(kind)

    def _narrow(self, kind: torch.dtype) -> None:
        for half in self._masters:
            # The parameter object stays the same, for everyone who holds it.
            half.data = half.data.to(kind)
        for module in self._model.modules():
            # Batch norm accepts 16-bit images beside fp32 parameters; the other norms do not.
            if isinstance(module, KEPT):
                if not isinstance(module, _BatchNorm):
                    module.register_forward_pre_hook(_widen_inputs)
                    module.register_forward_hook(partial(_narrow_output, kind))
                continue
            for name, value in module.named_buffers(recurse=False):
                if value.is_floating_point():
                    module._buffers[name] = value.to(kind)
        self._model.register_forward_pre_hook(partial(_narrow_inputs, kind))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Moves the gradients of the weights to the masters, in fp32."""
        found = [(half, master) for half, master in self._trained if half.grad is not None]
        if not found:
            return
        grads: list[Any] = [half.grad for half, _ in found]
        for half, master in found:
            master.grad = torch.empty_like(master)
            half.grad = None
        # One multi-tensor copy in place of a kernel for each gradient.
        wide: list[Any] = [master.grad for _, master in found]
        torch._foreach_copy_(wide, grads)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies the masters into the weights, rounded to 16 bits."""
        if self._trained:
            torch._foreach_copy_([half for half, _ in self._trained], [master for _, master in self._trained])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The network's parameters by name, with masters instead of 16-bit weights."""
        for name, value in self._model.named_parameters():
            yield name, self._masters.get(value, value)

    def state_dict(self) -> dict[str, Tensor]:
        """The network's state to save, with masters instead of 16-bit weights."""
        state = self._model.state_dict(keep_vars=True)
        return {name: self._masters.get(value, value).detach() for name, value in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads such a state into masters and weights, in place."""
        for name, value in self._model.state_dict(keep_vars=True).items():
            if value in self._masters:
                self._masters[value].copy_(state[name])
        self._model.load_state_dict(state)


def _narrow_inputs(kind: torch.dtype, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.to(kind) if isinstance(one, Tensor) and one.is_floating_point() else one for one in inputs)


def _widen_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.float() if isinstance(one, Tensor) and one.is_floating_point() else one for one in inputs)


def _narrow_output(kind: torch.dtype, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return output.to(kind) if isinstance(output, Tensor) else output
