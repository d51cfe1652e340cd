"""A recurrent network that reads an image as a sequence of pixels, in rows from the top left."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from headway.core.errors import UsageError


def gru(
    num_classes: int = 10,
    in_channels: int = 3,
    *,
    hidden: int = 64,
    layers: int = 1,
    pixels_per_step: int = 4,
) -> PixelGRU:
    """Builds a gated recurrent network (Cho et al. 2014, arXiv 1406.1078) that reads some pixels in each step.

    It has 14,090 parameters with the defaults and one channel. All its weights are shared by the steps.

    Input: normalised images, float [N, in_channels, H, W], H * W a multiple of `pixels_per_step`; output: logits
    [N, num_classes], from the last hidden state.

    Args:
        hidden: size of the hidden state of each layer.
        layers: number of layers; each reads the hidden states of the layer below.
        pixels_per_step: pixels that a step reads, all channels of each. The width of the images: a row in each step.

    Raises:
        UsageError: one of the three is below 1.
    """
    for name, value in (("hidden", hidden), ("layers", layers), ("pixels_per_step", pixels_per_step)):
        if value < 1:
            raise UsageError(f"gru has {name}={value}", fix="Give it a whole number of at least 1.")
    return PixelGRU(num_classes, in_channels, hidden, layers, pixels_per_step)


@final
class PixelGRU(nn.Module):
    """A GRU over the pixels of an image, and a linear head on its last hidden state. Made by `gru`."""

    def __init__(self, num_classes: int, in_channels: int, hidden: int, layers: int, pixels_per_step: int) -> None:
        super().__init__()
        self.pixels_per_step = pixels_per_step
        self.recurrent = nn.GRU(in_channels * pixels_per_step, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        if height * width % self.pixels_per_step:
            what = f"images of {height} x {width} have {height * width} pixels, no multiple of pixels_per_step"
            what += f" ({self.pixels_per_step})"
            fix = f"Set it to {width}, a row in each step, for example: model.args: {{pixels_per_step: {width}}}."
            raise UsageError(what, fix=fix)
        # Channels last, so that a step has whole pixels. In this order the loader's images need no copy.
        pixels = images.permute(0, 2, 3, 1)
        steps = pixels.reshape(len(images), -1, self.pixels_per_step * images.shape[1])
        outputs, _ = self.recurrent(steps)
        logits: Tensor = self.head(outputs[:, -1])
        return logits
