"""A network as small as LeNet-5, for colour images of 32 x 32."""

from __future__ import annotations

from torch import nn

MOST_MULTIPLY_ADDS = 1_000_000
"""Of one image, forward: 2 MFLOP."""


def lenet(num_classes: int = 10) -> nn.Module:
    """Two convolutions with max pools and three linear layers: 651,720 multiply-adds for an image (after LeCun et al.
    1998, with ReLU).

    Input: float [N, 3, 32, 32]; output: logits [N, num_classes].
    """
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )
