"""Counts multiply-adds while operations run, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

from headway.core.rows import make_pair
from headway.core.workload import WorkloadWindow

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


def _describe_convolution(
    dimension: int,
    images: Tensor,
    weight: Tensor,
    _b: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    *_: Any,
    **__: Any,
) -> dict[str, Any]:
    return {
        "kernel": weight.shape[2 + dimension], "stride": _choose(stride, dimension),
        "padding": _choose(padding, dimension), "dilation": _choose(dilation, dimension),
        "is_transposed": transposed, "output_padding": _choose(output_padding, dimension),
    }  # fmt: skip


def _describe_maximum(
    dimension: int,
    images: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> dict[str, Any]:
    common = _describe_average(dimension, images, kernel, stride, padding, ceil_mode)
    return common | {"dilation": _choose(dilation, dimension)}


def _describe_average(
    dimension: int,
    images: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    *_: Any,
    **__: Any,
) -> dict[str, Any]:
    return {
        "kernel": _choose(kernel, dimension), "stride": _choose(stride or kernel, dimension),
        "padding": _choose(padding, dimension), "ceil_mode": ceil_mode, "is_convolution": False,
    }  # fmt: skip


def _choose(values: Sequence[int], dimension: int) -> int:
    """Returns the number for rows (0) or columns (1); a single one stands for both."""
    return make_pair(values)[dimension]


WINDOWS: dict[Any, Callable[..., dict[str, Any]]] = {
    aten.convolution: _describe_convolution,
    aten.max_pool2d_with_indices: _describe_maximum,
    aten.avg_pool2d: _describe_average,
}
"""For each operation with windows: the fields of a WorkloadWindow that its arguments give along a dimension."""


def describe_window(func: Any, images: Tensor, *args: Any, **kwargs: Any) -> WorkloadWindow | None:
    """Describes a call with windows along the rows and columns of its input; None: another operation or input."""
    describe = WINDOWS.get(func._overloadpacket)
    # Sequences and vectors have no rows.
    if describe is None or images.dim() != 4:
        return None
    value_bytes = images.element_size() * images.shape[1]
    rows, columns = (
        WorkloadWindow(
            rows=images.shape[2 + dimension], row_bytes=value_bytes * images.shape[3 - dimension],
            needs_gradient=images.requires_grad, **describe(dimension, images, *args, **kwargs),
        )
        for dimension in (0, 1)
    )  # fmt: skip
    return rows.model_copy(update={"columns": columns})


@final
class MultiplyAddCounter(TorchDispatchMode):
    """Counts the multiply-adds of convolutions, matrix products and attention within the block, forward and backward.

    Elementwise operations do not count, as in published numbers.

    Attributes:
        windows: the calls with windows so far; whoever reads them may clear the list.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = 0
        self.windows: list[WorkloadWindow] = []

    @property
    def total(self) -> int:
        """Multiply-adds so far."""
        # torch counts a multiply-add as two operations.
        return self._operations // 2

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler to keep it out of the method below: see headway.optim.eager_optimizer.
        return False

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
        if (window := describe_window(func, *args, **kwargs)) is not None:
            self.windows.append(window)
        return result
