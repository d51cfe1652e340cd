"""Tensors that travel together, in one flat block of bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes."""


@final
class FlatTensors:
    """A block of memory with a place for each of some tensors, and a byte for each that says if it is there.

    Args:
        like: tensors whose shapes, types and memory formats the places have.

    Attributes:
        data: uint8, all of it; to send and to receive.
        views: the places, with the strides of their tensors.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        sizes = [len(like), *(tensor.numel() * tensor.element_size() for tensor in like)]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + math.ceil(size / ALIGNMENT) * ALIGNMENT)
        self.data = torch.zeros(starts[-1], dtype=torch.uint8)
        self._present = self.data[: len(like)]
        # A parameter and its gradient need equal strides, or the native optimizers do not take them.
        self.views = [
            self.data[start : start + size]
            .view(tensor.dtype)
            .as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
            for tensor, start, size in zip(like, starts[1:], sizes[1:], strict=False)
        ]

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None]) -> None:
        """Copies tensors to their places; None: there is none."""
        for place, (view, tensor) in enumerate(zip(self.views, tensors, strict=True)):
            self._present[place] = tensor is not None
            if tensor is not None:
                view.copy_(tensor)

    def unpack(self) -> list[Tensor | None]:
        """Returns the tensors that are there, as views."""
        return [view if here else None for view, here in zip(self.views, self._present.tolist(), strict=True)]


def encode_state(scalars: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns scalars (JSON) and tensors by name as bytes, uint8."""
    text = json.dumps(scalars).encode()
    # Cloned, because safetensors refuses tensors that share memory.
    content = save_tensors({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text + content), dtype=torch.uint8)


def decode_state(data: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the scalars and tensors of `encode_state`."""
    content = data.numpy().tobytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), load_tensors(content[end:])
