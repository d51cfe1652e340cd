"""AlexNet-BN for small images: the network of the decks' table on the decay of biases, beta and gamma."""

from __future__ import annotations

from torch import nn

CHANNELS = (8, 16, 24, 24, 16)
"""A sixteenth of the paper's, apart from the first layer, which would have six."""
UNITS = 256


def small_alexnet(num_classes: int, in_channels: int) -> nn.Module:
    """Builds AlexNet-BN with a sixteenth of its channels, for images of 32 pixels.

    Krizhevsky et al. 2012, with a batch norm after each convolution (You et al. 2017, arXiv 1708.03888) and one after
    pool5 (Jia et al. 2018, arXiv 1807.11205). Filters of the first layer have 5 x 5 pixels at a stride of 2 in place of
    11 x 11 at 4. No dropout: a dozen epochs are too few for it. 636,000 multiply-adds an image, 101,000 parameters.
    """
    modules: list[nn.Module] = []
    before = in_channels
    # (kernel, stride, whether an overlapping pool follows), as in the paper but for the first layer.
    shapes = ((5, 2, True), (5, 1, True), (3, 1, False), (3, 1, False), (3, 1, True))
    for channels, (kernel, stride, has_pool) in zip(CHANNELS, shapes, strict=True):
        conv = nn.Conv2d(before, channels, kernel, stride, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        modules += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
        if has_pool:
            modules.append(nn.MaxPool2d(3, 2, padding=1))
        before = channels
    modules += [nn.BatchNorm2d(before), nn.Flatten()]
    # Three pools and the first stride leave 2 x 2 pixels of 32.
    inputs = 4 * before
    for _ in range(2):
        layer = nn.Linear(inputs, UNITS)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        modules += [layer, nn.ReLU()]
        inputs = UNITS
    return nn.Sequential(*modules, nn.Linear(inputs, num_classes))
