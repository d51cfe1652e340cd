"""Counts multiply-adds while operations run, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

aten = torch.ops.aten


def _count_convolution_backward(
    grad: Tensor,
    images: Tensor,
    weight: Tensor,
    _b: Any,
    _s: Any,
    _p: Any,
    _d: Any,
    transposed: bool,
    *rest: Any,
    **_: Any,
) -> int:
    """Counts the operations of a convolution's backward pass: as many as forward for each gradient that is needed."""
    # torch's own formula (2.13) ignores the groups of a convolution.
    needs_images_grad, needs_weight_grad, _ = rest[-1]
    return int(needs_images_grad + needs_weight_grad) * conv_flop_count(
        [*images.shape], [*weight.shape], [*grad.shape], transposed
    )


FORMULAS = {
    **flop_registry,
    aten.convolution_backward: _count_convolution_backward,
    # torch's table (2.13) lacks the attention that it uses on a CPU.
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


def _find_convolution_window(
    images: Tensor,
    weight: Tensor,
    _b: Any,
    stride: Sequence[int],
    _p: Any,
    dilation: Sequence[int],
    *rest: Any,
    **_: Any,
) -> tuple[Tensor, int, int, int]:
    transposed = rest[0]
    # What a transposed convolution needs of the other half: rows that reach over the boundary.
    return images, 1 if transposed else weight.shape[2], 1 if transposed else stride[0], dilation[0]


def _find_pool_window(
    images: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), *rest: Any, **_: Any
) -> tuple[Tensor, int, int, int]:
    return images, kernel[0], (stride or kernel)[0], 1


WINDOWS: dict[Any, Callable[..., tuple[Tensor, int, int, int]]] = {
    aten.convolution: _find_convolution_window,
    aten.max_pool2d_with_indices: _find_pool_window,
    aten.avg_pool2d: _find_pool_window,
}
"""For each operation with windows: (input, kernel, stride, dilation) along the rows."""


def _count_halo_bytes(images: Tensor, kernel: int, stride: int, dilation: int) -> int:
    """Counts the bytes that two halves of the images exchange: the rows of windows that reach over the boundary.

    With a stride, the windows of the next row begin later: that many rows fewer are needed.
    """
    rows = max(0, dilation * (kernel - 1) + 1 - stride)
    # Sequences and vectors have no rows.
    if images.dim() != 4 or images.shape[2] < 2:
        return 0
    return rows * images.element_size() * images.shape[0] * images.shape[1] * images.shape[3]


@final
class MultiplyAddCounter(TorchDispatchMode):
    """Counts the multiply-adds of convolutions, matrix products and attention within the block, forward and backward.

    Elementwise operations do not count, as in published numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = 0
        self.halo_bytes = 0

    @property
    def total(self) -> int:
        """Multiply-adds so far."""
        # torch counts a multiply-add as two operations.
        return self._operations // 2

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula: Any = FORMULAS.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            # The parts of a composite operation are counted.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self._operations += formula(*args, **kwargs, out_val=result)
        if (window := WINDOWS.get(func._overloadpacket)) is not None:
            self.halo_bytes += _count_halo_bytes(*window(*args, **kwargs))
        return result
