"""The networks of Simonyan and Zisserman 2014 (arXiv 1409.1556), for images of 32 pixels."""

from __future__ import annotations

from torch import nn

from headway.core.errors import UsageError

# Table 1 of the paper: convolutions of each stage, and their widths over that of the first.
DEPTHS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
WIDTHS = (1, 2, 4, 8, 8)


def vgg(
    num_classes: int = 10, in_channels: int = 3, *, depth: int = 11, width: int = 64, batch_norm: bool = True
) -> nn.Sequential:
    """Builds VGG with one linear layer as its head, as is usual for images of 32 pixels.

    With 11 layers it has 9.2 million parameters at width 64, and 146,000 at width 8.

    Input: normalised images, float [N, in_channels, H, W], H and W at least 32; output: logits [N, num_classes].

    Args:
        depth: layers with weights in the paper: 11, 13, 16 or 19.
        width: channels of the first stage; 64 in the paper.
        batch_norm: a batch norm follows each convolution. The paper has none.

    Raises:
        UsageError: there is no such depth, or the width is below 1.
    """
    if depth not in DEPTHS:
        raise UsageError(f"VGG has 11, 13, 16 or 19 layers, not {depth}", where="depth", fix="Set it to one of them.")
    if width < 1:
        raise UsageError(f"vgg has width={width}", fix="Give it a whole number of at least 1.")
    layers, channels = list[nn.Module](), in_channels
    for factor, repeats in zip(WIDTHS, DEPTHS[depth], strict=True):
        for _ in range(repeats):
            # A bias would be subtracted by the batch norm.
            layers.append(nn.Conv2d(channels, factor * width, 3, padding=1, bias=not batch_norm))
            channels = factor * width
            layers += [nn.BatchNorm2d(channels)] if batch_norm else []
            layers.append(nn.ReLU(inplace=True))
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
