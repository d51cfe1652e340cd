"""Convolutions on tiny maps as one matrix product for the whole batch.

Runtimes compute a convolution image by image, a row of its output at a time. On a map of 2 x 2 each row is 2 wide and
touches the padding, so the weights of a layer, often the largest ones of the network, are read anew for every image. As
a matrix product they are read once for a batch: ResNet-18 on 64 pixels, 32 images, takes ONNX Runtime 0.71 of the time
and OpenVINO 0.76, int8 0.88. A single image takes 1.07 of it (int8 1.3), since its pixels are copied nine times.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headway.core.modules import replace_modules, switch_to_evaluation
from headway.export.pipeline import Pipeline
from headway.model.winograd import WinogradConv2d

MOST_SIDE = 2
"""Largest side of an output. With 4, 32 images took ONNX Runtime 0.74 of the time, and one image 1.1."""


@final
class UnfoldedConv(nn.Module):
    """Computes what a convolution without groups and dilation computes.

    Args:
        conv: the layer; its weights are copied.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.kernel, self.stride = conv.kernel_size, conv.stride
        # The layout that the columns have: place in the kernel, then channel.
        weight = conv.weight.detach().permute(2, 3, 1, 0).reshape(-1, conv.out_channels)
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("bias", None if conv.bias is None else conv.bias.detach().clone())
        # "same" and "valid" are refused by `_is_plain`.
        down, across = map(int, conv.padding)
        self.padding = (0, 0, across, across, down, down)
        self.weight: Tensor
        self.bias: Tensor | None

    def forward(self, images: Tensor) -> Tensor:
        padded = F.pad(images.permute(0, 2, 3, 1), self.padding)
        height, width = (
            (side - kernel) // stride + 1
            for side, kernel, stride in zip(padded.shape[1:3], self.kernel, self.stride, strict=True)
        )
        rows, columns = ((side - 1) * stride + 1 for side, stride in zip((height, width), self.stride, strict=True))
        parts = [
            padded[:, down : down + rows : self.stride[0], across : across + columns : self.stride[1]]
            for down in range(self.kernel[0])
            for across in range(self.kernel[1])
        ]
        product = torch.cat(parts, dim=3) @ self.weight
        return (product if self.bias is None else product + self.bias).permute(0, 3, 1, 2)


@torch.no_grad()
def unfold_small_maps(pipeline: Pipeline) -> Pipeline:
    """Replaces the convolutions whose outputs are small by matrix products, in place; returns the pipeline."""
    largest: dict[nn.Module, int] = {}

    def note(conv: nn.Module, inputs: Any, output: Tensor) -> None:
        largest[conv] = max(largest.get(conv, 0), *output.shape[2:])

    # Exactly these classes: another one computes something else, and so may hooks.
    kinds = (nn.Conv2d, WinogradConv2d)
    convs = [one for one in pipeline.modules() if type(one) in kinds and not one._forward_pre_hooks]
    handles = [one.register_forward_hook(note) for one in convs if not one._forward_hooks]
    try:
        with switch_to_evaluation(pipeline):
            pipeline(torch.zeros((1, *pipeline.size, pipeline.channels), dtype=torch.uint8))
    # The trace fails in the same way, and says where.
    except Exception:
        return pipeline
    finally:
        for handle in handles:
            handle.remove()

    def replace(module: nn.Module, name: str) -> nn.Module:
        is_small = largest.get(module, MOST_SIDE + 1) <= MOST_SIDE
        return UnfoldedConv(module) if is_small and isinstance(module, nn.Conv2d) and _is_plain(module) else module

    replace_modules(pipeline, replace)
    return pipeline


def _is_plain(conv: nn.Conv2d) -> bool:
    is_usual = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    # A kernel of 1 x 1 is a matrix product already.
    return is_usual and isinstance(conv.padding, tuple) and conv.kernel_size != (1, 1)
