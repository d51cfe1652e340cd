"""Multiply-adds of what runs, by torch's own formulas."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

aten = torch.ops.aten


def _convolution_backward(
    grad: Tensor,
    images: Tensor,
    weight: Tensor,
    _b: Any,
    _s: Any,
    _p: Any,
    _d: Any,
    transposed: bool,
    *more: Any,
    **_: Any,
) -> int:
    """As many as forward for the images' gradient, and as many for the weight's; torch's own formula (2.13) takes a
    convolution in groups for one that is not."""
    images_too, weight_too, _ = more[-1]
    return int(images_too + weight_too) * conv_flop_count([*images.shape], [*weight.shape], [*grad.shape], transposed)


FORMULAS = {
    **flop_registry,
    aten.convolution_backward: _convolution_backward,
    # The attention that torch takes on a CPU, which its table (2.13) lacks.
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


@final
class MultiplyAddCounter(TorchDispatchMode):
    """Counts, within it, the multiply-adds of convolutions, matrix products and attention, forward and backward; what
    is added or multiplied elementwise does not count, as in the published numbers.

    Attributes:
        total: so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = 0

    @property
    def total(self) -> int:
        return self._operations // 2  # torch counts two operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula: Any = FORMULAS.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            with self:  # an operation that is made of others, which are counted
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if formula is not None:
            self._operations += formula(*args, **kwargs, out_val=out)
        return out
