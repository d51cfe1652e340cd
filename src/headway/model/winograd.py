"""3x3 convolutions on a CPU by Winograd's minimal filtering (Lavin and Gray 2016, "Fast Algorithms for Convolutional
Neural Networks", arXiv 1509.09308), forward and backward.

A tile of 4x4 outputs takes 36 products for each pair of channels in place of 144, and one of 7x7 takes 81 in place of
441. PyTorch's convolutions on a CPU (oneDNN) make all of them. For each layer, the core chooses tiles from 2x2 to 7x7
by what they cost. The relative error in fp32 is below 1e-5; with tiles of 7x7 it is up to 7e-5. That of a direct sum
is up to 2e-6.
"""

from __future__ import annotations

from typing import Any, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from headway.core.modules import convert_module, replace_modules
from headway.model import native

MIN_CHANNELS = 16
"""Fewest input and output channels of a convolution that is changed. The work of the transforms does not shrink with
the channels on the other side, so that few channels save less. Fewer were not measured."""

TILE_SIDE, MIN_TILES = 4, 32
"""Fewest tiles of 4x4 outputs in a batch. With fewer, transforming the filters takes longer than the products: at 32
tiles and 512 channels, the last layers of `resnet18` in `bench.winograd`, both ways take about the same time."""


def can_use_winograd(module: nn.Module) -> bool:
    """Returns True if `use_winograd` would change a layer of this network."""
    return any(_can_be_changed(layer) for layer in module.modules())


def use_winograd(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """Makes every 3x3 convolution of a network use Winograd's filtering where it can, in place.

    A convolution is changed if its stride, dilation and groups are 1, its padding is at most 2 zeros, equal on all
    sides, and it has at least 16 input and output channels. Parameters keep their names and values. Only fp32 tensors
    on a CPU with at least 32 tiles of 4x4 outputs are computed in the new way, and not in a compiled or exported
    network.

    Returns:
        The network (another object only if it is itself such a layer), and the names of the changed layers.
    """
    changed: list[str] = []

    def replace(layer: nn.Module, name: str) -> nn.Module:
        if not _can_be_changed(layer):
            return layer
        changed.append(name)
        return convert_module(layer, WinogradConv2d)

    return replace_modules(module, replace), changed


@final
class WinogradConv2d(nn.Conv2d):
    """A 3x3 convolution by Winograd's filtering. It shares the parameters of the convolution it replaces."""

    # Not `forward`, by which other parts of Headway tell whether a layer is a plain convolution.
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding[0]
        assert isinstance(padding, int)
        if not _is_native(input, weight, bias) or _count_tiles(input, padding) < MIN_TILES:
            out: Tensor = super()._conv_forward(input, weight, bias)
        else:
            out = _Convolution.apply(input, weight, bias, padding)  # type: ignore[no-untyped-call]
        return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.padding = padding
        return native.convolve(input, weight, bias, padding=padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        # With `create_graph` the gradient is differentiated in turn, with `is_grads_batched` it is a batch of them, and
        # torch knows how.
        is_plain = type(grad) is Tensor and not torch._C._functorch.is_legacy_batchedtensor(grad)
        if torch.is_grad_enabled() or _is_watched() or not is_plain:
            settings = ([1, 1], [ctx.padding] * 2, [1, 1], False, [0, 0], 1, [needs_input, needs_weight, needs_bias])
            return *torch.ops.aten.convolution_backward(grad, input, weight, [weight.shape[0]], *settings), None
        # Once for both: a max pool's gradient, for one, may come in another memory format.
        grad = grad.contiguous(memory_format=torch.channels_last)
        return (
            native.compute_input_gradient(grad, weight, padding=ctx.padding) if needs_input else None,
            native.compute_weight_gradient(grad, input, weight, padding=ctx.padding) if needs_weight else None,
            grad.sum((0, 2, 3)) if needs_bias else None,
            None,
        )


def _can_be_changed(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    # A subclass is left alone: what it overrides or adds would be lost. Parametrised layers have one of their own.
    if type(layer) is not nn.Conv2d:
        return False
    is_dense = layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.kernel_size == (3, 3)
    is_padded = layer.padding_mode == "zeros" and layer.padding in ((0, 0), (1, 1), (2, 2))
    return is_dense and is_padded and min(layer.in_channels, layer.out_channels) >= MIN_CHANNELS


def _count_tiles(images: Tensor, padding: int) -> int:
    height, width = (max(0, side + 2 * padding - native.KERNEL_SIDE + 1) for side in images.shape[2:])
    return images.shape[0] * -(-height // TILE_SIDE) * -(-width // TILE_SIDE)


def _is_native(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # Subclasses are to see torch's own operation, as modes are: those of divided networks, fused sweeps and fake
    # tensors. They may refuse to be asked for more than their type.
    if _is_watched() or type(input) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return False
    given = (input, weight) if bias is None else (input, weight, bias)
    is_fp32 = all(one.is_cpu and one.dtype == torch.float32 and one.layout == torch.strided for one in given)
    # Whatever else is wrong is for torch to say.
    fits = input.ndim == 4 and tuple(weight.shape[1:]) == (input.shape[1], native.KERNEL_SIDE, native.KERNEL_SIDE)
    return is_fp32 and fits and not torch.is_autocast_enabled("cpu") and native.is_available()


def _is_watched() -> bool:
    """Returns True if a compiler, a transform, a trace or a mode is to see torch's own operation."""
    # First: Dynamo and functorch cannot follow the questions below. A trace must not hold Python, and forward
    # derivatives are known of torch's operation alone.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._is_tracing() or forward_ad._current_level >= 0:
        return True
    return torch._C._len_torch_function_stack() > 0 or _get_current_dispatch_mode() is not None
