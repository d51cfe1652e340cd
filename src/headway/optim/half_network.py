"""Converts a network to 16 bits in place; norms stay float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

FP32_MODULES = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Modules whose parameters and statistics stay fp32. Kernels of batch norm accept 16-bit images beside fp32 parameters.
For the others, inputs are widened and outputs narrowed."""


def convert_to_bf16(model: nn.Module) -> None:
    """Converts a network to bfloat16 in place, for an optimizer with `use_bf16`; no float32 copies are kept.

    Parameters and statistics of batch, instance, group, layer and RMS norm stay fp32. All other parameters and
    floating-point buffers become 16 bit wide, and so do floating-point inputs of the network. The Parameter objects
    stay the same, so an optimizer may have them already. For weights with float32 copies see `MasterWeights`.

    Args:
        model: in fp32, with its initial weights, on its device and in its memory format.
    """
    narrow_network(model, find_narrow(model), torch.bfloat16)


def find_narrow(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters by name that become 16 bit wide: all floating-point ones but those of norms."""
    # Norms stay fp32: their statistics lose too much in 16 bits.
    fp32_ids = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, FP32_MODULES)
        for parameter in module.parameters(False)
    }
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and id(parameter) not in fp32_ids
    }


def narrow_network(model: nn.Module, parameters: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Converts parameters of a network, its buffers and its inputs to a 16-bit type, in place."""
    for weight in parameters.values():
        # The Parameter object stays the same, as others hold references to it.
        weight.data = weight.data.to(dtype)
    for module in model.modules():
        # Batch norm accepts 16-bit images beside fp32 parameters; the other norms do not.
        if isinstance(module, FP32_MODULES):
            if not isinstance(module, _BatchNorm):
                module.register_forward_pre_hook(_widen_inputs)
                module.register_forward_hook(partial(_narrow_output, dtype))
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
    model.register_forward_pre_hook(partial(_narrow_inputs, dtype))


def _narrow_inputs(dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs
    )


def _widen_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.float() if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs
    )


def _narrow_output(dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return output.to(dtype) if isinstance(output, Tensor) else output
