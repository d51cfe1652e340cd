"""Compression of gradients that are sent."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor


class Compressor(Protocol):
    """The two functions of a compression: static methods of a class, or methods of an object."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to send, and the context that `decompress` needs."""
        ...

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Restores the tensor."""
        ...


@final
class CastCompressor:
    """Sends and sums floating-point tensors in another dtype, None for their own; others are sent unchanged."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        # Integers keep their values: a cast would round them.
        must_cast = self._dtype is not None and tensor.is_floating_point()
        return (tensor.to(self._dtype) if must_cast else tensor), tensor.dtype

    def decompress(self, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


@final
class Compression:
    """The built-in compressions: `none`, `fp16`, and `bf16`, which keeps the range of float32 and loses precision."""

    none = CastCompressor(None)
    fp16 = CastCompressor(torch.float16)
    bf16 = CastCompressor(torch.bfloat16)
