"""The functions that networks may call with split maps, and the rule of each. All others are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.parallel.norms import normalise_batches, normalise_groups, normalise_instances, normalise_layers
from headway.parallel.sizes import average, flatten, interpolate, pool_adaptively, pool_maximum_adaptively
from headway.parallel.values import (
    apply_to_channels,
    apply_to_values,
    ask,
    divide_channels,
    drop,
    get_length,
    get_shape,
    get_size,
    index,
    join_channels,
)
from headway.parallel.windows import convolve, convolve_transposed, pool_average, pool_maximum


def get_property(name: str) -> Any:
    """Returns what `__torch_function__` is given when an attribute of a tensor is read."""
    return inspect.getattr_static(Tensor, name).__get__


FUNCTIONS_OF_VALUES: dict[Any, str] = {
    torch: "relu relu_ sigmoid tanh exp abs sqrt square clamp neg add sub mul div pow maximum minimum clone",
    F: "relu relu6 gelu silu mish elu celu selu softplus leaky_relu hardtanh hardswish hardsigmoid logsigmoid sigmoid"
    " tanh",
    Tensor: "relu relu_ sigmoid tanh exp abs sqrt square clamp neg __neg__ add add_ __add__ __radd__ __iadd__ sub sub_"
    " __sub__ __rsub__ __isub__ mul mul_ __mul__ __rmul__ __imul__ div div_ __truediv__ pow __pow__ clone contiguous"
    " float double half bfloat16 to type_as detach",
}
PROPERTIES = "dtype device requires_grad is_cuda ndim grad_fn is_leaf layout"


@cache
def load_rules() -> dict[Any, Callable[..., Any]]:
    """Loads the rule of each function. A rule takes the function and its arguments, split maps among them."""
    per_value = {
        getattr(room, name): apply_to_values for room, names in FUNCTIONS_OF_VALUES.items() for name in names.split()
    }
    asked = {get_property(name): ask for name in PROPERTIES.split()}
    return {
        **per_value, **asked,
        torch.conv2d: convolve, torch.conv_transpose2d: convolve_transposed,
        F.max_pool2d: pool_maximum, torch.max_pool2d: pool_maximum, F.avg_pool2d: pool_average,
        F.adaptive_avg_pool2d: pool_adaptively, F.adaptive_max_pool2d: pool_maximum_adaptively,
        torch.mean: average, Tensor.mean: average,
        torch.flatten: flatten, Tensor.flatten: flatten, F.interpolate: interpolate,
        F.batch_norm: normalise_batches, F.group_norm: normalise_groups,
        F.instance_norm: normalise_instances, F.layer_norm: normalise_layers,
        F.local_response_norm: apply_to_channels, torch.cat: join_channels, torch.chunk: divide_channels,
        Tensor.chunk: divide_channels, torch.split: divide_channels, Tensor.split: divide_channels,
        F.dropout: drop, F.dropout2d: drop, Tensor.__getitem__: index, Tensor.dim: ask,
        Tensor.is_floating_point: ask, Tensor.is_contiguous: ask, Tensor.size: get_size, Tensor.__len__: get_length,
        get_property("shape"): get_shape,
    }  # fmt: skip
