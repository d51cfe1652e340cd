"""Calls the native core (native/headway.h) for convolutions; the only file of this room that uses ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from typing import final

import torch
from torch import Tensor

from headway.core import native
from headway.core.errors import UsageError

KERNEL_SIDE = 3
"""Side of the filters that the core convolves with, in pixels."""

# Printed once, if the library is missing.
_MISSING_LIBRARY_LOSS = "3x3 convolutions take about twice as long on a CPU"


@final
class _NativeConvolution(ctypes.Structure):
    # The layout of `hw_convolution` in native/headway.h; `size` lets the core refuse a caller with another layout.
    _fields_ = [
        *((name, c_uint32) for name in ("size", "threads")),
        *((name, c_int64) for name in ("n", "height", "width", "in_channels", "out_channels", "padding", "tile")),
        *((name, c_void_p) for name in ("input", "filter", "bias", "output", "filter_gradient")),
        ("strides", c_int64 * 4),
        ("team", c_void_p),
    ]


@cache
def _load_library() -> ctypes.CDLL | None:
    """Returns the core, which the first call loads; None if it is not built."""
    arguments = [ctypes.POINTER(_NativeConvolution)]
    signatures = dict.fromkeys(("hw_convolve", "hw_convolve_filter"), (c_int32, arguments))
    return native.load_library(signatures, loss=_MISSING_LIBRARY_LOSS)


def is_available() -> bool:
    """Returns True if the native core can be used here. The first call logs a warning if it is not built."""
    # Without GNU's OpenMP in torch it has one thread, and is slower than torch with several.
    return _load_library() is not None and (native.find_gomp() is not None or torch.get_num_threads() == 1)


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None, *, padding: int, tile: int = 0) -> Tensor:
    """Convolves images with 3x3 filters, stride 1, and zeros around the images.

    Args:
        images: float32 [N, C, H, W] on the CPU.
        weight: float32 [K, C, 3, 3].
        bias: float32 [K]; None: no bias.
        padding: zeros on each side, 0 to 2.
        tile: side of the tiles, in outputs, 2 to 7; 0: what takes the least time.

    Returns:
        float32 [N, K, H + 2 * padding - 2, W + 2 * padding - 2], channels last.

    Raises:
        UsageError: the tensors do not fit together, or memory cannot be had.
    """
    fits = _can_read(images, weight) and weight.shape[1] == images.shape[1]
    if bias is not None:
        fits = fits and bias.is_cpu and bias.dtype == torch.float32 and bias.shape == weight.shape[:1]
    _require(fits, images, weight)
    return _convolve(images, weight.shape[0], weight.data_ptr(), weight.stride(), bias, padding, tile)


def compute_input_gradient(grad: Tensor, weight: Tensor, *, padding: int, tile: int = 0) -> Tensor:
    """Returns the gradient of the images of `convolve`, from that of its output: float32 [N, K, H', W']."""
    _require(_can_read(grad, weight) and weight.shape[0] == grad.shape[1], grad, weight)
    # The same convolution with every filter mirrored, and input and output channels swapped.
    out_step, in_step, row_step, column_step = weight.stride()
    last_tap = weight.data_ptr() + (KERNEL_SIDE - 1) * (row_step + column_step) * weight.element_size()
    strides = (in_step, out_step, -row_step, -column_step)
    return _convolve(grad, weight.shape[1], last_tap, strides, None, KERNEL_SIDE - 1 - padding, tile)


def compute_weight_gradient(grad: Tensor, images: Tensor, weight: Tensor, *, padding: int, tile: int = 0) -> Tensor:
    """Returns the gradient of the filters of `convolve`, with their shape and strides, from that of its output."""
    fits = _can_read(images, weight) and weight.shape[1] == images.shape[1]
    _require(fits, images, weight)
    expected = _find_output_shape(images, weight.shape[0], padding)
    _require(_can_read(grad, weight) and tuple(grad.shape) == expected, grad, weight)
    images, grad = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (images, grad))
    gradient = torch.empty_like(weight)
    pointers = (images.data_ptr(), None, None, grad.data_ptr(), gradient.data_ptr())
    _call("hw_convolve_filter", images, weight.shape[0], (padding, tile), pointers, gradient.stride())
    return gradient


def _convolve(
    images: Tensor,
    num_outputs: int,
    first_tap: int,
    strides: tuple[int, ...],
    bias: Tensor | None,
    padding: int,
    tile: int,
) -> Tensor:
    images = images.contiguous(memory_format=torch.channels_last)
    shape = _find_output_shape(images, num_outputs, padding)
    # Named, as the caller may have set another default device.
    output = torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)
    # It must live until the call returns.
    bias = None if bias is None else bias.contiguous()
    pointers = (images.data_ptr(), first_tap, None if bias is None else bias.data_ptr(), output.data_ptr(), None)
    _call("hw_convolve", images, num_outputs, (padding, tile), pointers, strides)
    return output


def _find_output_shape(images: Tensor, num_outputs: int, padding: int) -> tuple[int, int, int, int]:
    n, _, height, width = images.shape
    grown = 2 * padding - KERNEL_SIDE + 1
    if min(n, num_outputs, height + grown, width + grown) < 1:
        raise _build_error(images, num_outputs, padding)
    return n, num_outputs, height + grown, width + grown


def _can_read(images: Tensor, weight: Tensor) -> bool:
    # The core walks flat memory: with a wrong shape or type it would read and write beyond the end of a tensor.
    are_native = all(one.is_cpu and one.dtype == torch.float32 and one.ndim == 4 for one in (images, weight))
    return are_native and tuple(weight.shape[2:]) == (KERNEL_SIDE, KERNEL_SIDE)


def _require(fits: bool, images: Tensor, weight: Tensor) -> None:
    if not fits:
        parts = (f"{tuple(one.shape)} of {one.dtype} on {one.device}" for one in (images, weight))
        what = f"the native core cannot convolve {' with '.join(parts)}"
        raise UsageError(
            what, fix="Give it float32 tensors on the CPU, 3x3 filters, and a bias for each filter or none."
        )


def _call(
    name: str,
    images: Tensor,
    num_outputs: int,
    padding_and_tile: tuple[int, int],
    pointers: tuple[int | None, ...],
    strides: tuple[int, ...],
) -> None:
    library = _load_library()
    assert library is not None
    n, channels, height, width = images.shape
    request = _NativeConvolution(
        ctypes.sizeof(_NativeConvolution),
        torch.get_num_threads(),
        *(n, height, width, channels, num_outputs, *padding_and_tile),
        *pointers,
        (c_int64 * 4)(*strides),
        native.find_gomp(),
    )
    if getattr(library, name)(request):
        raise _build_error(images, num_outputs, padding_and_tile[0])


def _build_error(images: Tensor, num_outputs: int, padding: int) -> UsageError:
    what = f"the native core cannot convolve {tuple(images.shape)} with {num_outputs} filters and {padding=}"
    return UsageError(what, fix="If memory is short, take a smaller batch, or set winograd: false.")
