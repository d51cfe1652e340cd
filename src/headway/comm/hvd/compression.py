"""What gradients look like while they travel."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor


class Compressor(Protocol):
    """Two functions; a class with them as static methods, or an object, may be given wherever `compression` is."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and what `decompress` needs to know."""
        ...

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor back."""
        ...


@final
class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


@final
class CastCompressor:
    """Floating-point tensors travel in another type, and are summed in it; others as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return (tensor.to(self._dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    def decompress(self, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


@final
class Compression:
    """The forms there are: `none`, `fp16`, and `bf16`, which keeps the range of float32 and loses precision."""

    none = NoneCompressor
    fp16 = CastCompressor(torch.float16)
    bf16 = CastCompressor(torch.bfloat16)
