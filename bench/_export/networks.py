"""Every network of `headway.model`, and those of the deck's table of accuracy, as pipelines that know digits.

They need no training: the features are those of random weights; batch norm has the statistics of the images, and the
last layer is fitted to them by least squares. That takes one forward pass, gives 10 classes with margins between them,
and so an accuracy that a changed answer would change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bench._export.zoo.densenet import DEPTHS, densenet
from bench._export.zoo.inception_v3 import inception_v3
from bench._export.zoo.mobilenet import mobilenet, mobilenet_v2
from headway import model as networks
from headway.core.modules import replace_modules
from headway.export.dense_mixture import densify_mixture
from headway.export.pipeline import Member, Pipeline
from headway.model.gates import NoisyTopKGate

CLASSES, EVALUATED, SIDE = 10, 597, 8
"""scikit-learn's digits: 1,797 images of 8 x 8 gray pixels; the first 1,200 are for fitting."""

FITTING_BATCH = 64
RIDGE = 0.3
"""Added to the diagonal of the normal equations, relative to its mean."""
BRANCH_SCALE = 0.3
"""Scale of the last batch norm of each residual block. With 1, as it is drawn, 33 blocks of random weights amplify
rounding so much (differences of 7e-4 where the largest of other networks is 1e-5), and forget so much of the image
(15 % right), that the answers say little about an engine. Trained networks do neither."""
SHIFT = 1.0
"""Shift of all batch norms of the deck's other networks. With 0, as it is drawn, the 27 random layers of MobileNet,
which has no shortcuts, forget the image: 11 to 18 % right, and with rounding one answer of 597 changes. With 1 most
units of a ReLU are active, and 73 to 86 % are right."""


@dataclass(frozen=True)
class Network:
    """A network, how many times as large as a digit its images are, and the shift that its batch norms begin with."""

    name: str
    build: Callable[..., nn.Module]
    scale: int
    channels: int = 3
    arguments: dict[str, Any] = field(default_factory=dict)
    shift: float = 0.0

    @property
    def side(self) -> int:
        """Side of the images in pixels."""
        return SIDE * self.scale


NETWORKS = (
    Network("small_net", networks.small_net, 1, 1),
    Network("gru", networks.gru, 1, 1),
    # Gray images as RGB have constant channels after whitening, whose rounding errors the default of 1e-12 amplifies.
    Network("cifar_net", networks.cifar_net, 4, 3, {"batchnorm_eps": 0.1}),
    Network("cifar_moe", networks.cifar_moe, 4),
    Network("cifar_resnet", networks.cifar_resnet, 4),
    Network("vgg", networks.vgg, 4),
    Network("resnet18", networks.resnet18, 8),
    Network("resnet34", networks.resnet34, 8),
    Network("resnet50", networks.resnet50, 8),
    Network("resnet101", networks.resnet101, 8),
    # At least 67 pixels.
    Network("alexnet", networks.alexnet, 9),
    Network("alexnet, batch norm", networks.alexnet, 9, 3, {"batch_norm": True, "pool5_norm": True}),
)
"""All of `headway.model`. Tests hold this list against its public functions."""

WIDTHS = (0.25, 0.5, 0.75, 1.0)
DECK_NETWORKS = (
    *(Network(f"densenet{depth}", densenet, 8, 3, {"depth": depth}, SHIFT) for depth in DEPTHS),
    # At least 75 pixels.
    Network("inception_v3", inception_v3, 10, shift=SHIFT),
    *(Network(f"mobilenet_{width}", mobilenet, 8, 3, {"width": width}, SHIFT) for width in WIDTHS),
    *(Network(f"mobilenet_v2_{width}", mobilenet_v2, 8, 3, {"width": width}, SHIFT) for width in WIDTHS),
)
"""Those of the deck's table of accuracy that `headway.model` does not have."""


def find_network(name: str) -> Network:
    """Returns a network of the lists."""
    return next(one for one in (*NETWORKS, *DECK_NETWORKS) if one.name == name)


def load_digits(scale: int = 1, channels: int = 3) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Returns all digits as uint8 [n, H, W, C], each pixel repeated, and their classes; the last 597 for evaluation."""
    from sklearn import datasets

    digits = datasets.load_digits()
    pixels = np.clip(digits.images * 16, 0, 255).astype(np.uint8)
    pixels = pixels.repeat(scale, 1).repeat(scale, 2)[..., None]
    return np.ascontiguousarray(pixels.repeat(channels, 3)), digits.target.astype(np.int64)


def split_digits(network: Network) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """Returns fitting images, evaluation images, and the classes of the latter."""
    pixels, labels = load_digits(network.scale, network.channels)
    return pixels[:-EVALUATED], pixels[-EVALUATED:], labels[-EVALUATED:]


def build_known(name: str, images: int = 400) -> Pipeline:
    """Builds the pipeline of a network that knows digits: the same one in every process.

    Args:
        images: number of images to fit the last layer to.
    """
    network = find_network(name)
    torch.manual_seed(0)
    module = network.build(CLASSES, network.channels, **network.arguments)
    for norm in (one for one in module.modules() if network.shift and isinstance(one, nn.BatchNorm2d)):
        nn.init.constant_(norm.bias, network.shift)
    pixels, labels = load_digits(network.scale, network.channels)
    fit_head(module, torch.from_numpy(pixels[:images]), torch.from_numpy(labels[:images]))
    return wrap(module, network.side, network.channels)


def build_random(name: str, side: int, channels: int = 3, classes: int = 1000) -> Pipeline:
    """Builds the pipeline of a network with random weights, for figures that do not depend on them."""
    network = find_network(name)
    torch.manual_seed(0)
    return wrap(network.build(classes, channels, **network.arguments), side, channels, classes)


def wrap(module: nn.Module, side: int, channels: int = 3, classes: int = CLASSES) -> Pipeline:
    """Builds a pipeline of a network, with a mean of 128 and a deviation of 64."""
    network = replace_modules(module.eval(), densify_mixture)
    member = Member(network, (128.0,) * channels, (64.0,) * channels)
    return Pipeline([member], "softmax", size=(side, side), channels=channels, outputs=classes)


@torch.no_grad()
def fit_head(module: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> None:
    """Sets the statistics of batch norm and the last linear layer of a network, in place.

    Args:
        pixels: uint8 [n, H, W, C].
        labels: int64 [n].
    """
    batches = [((one.float() - 128) / 64).permute(0, 3, 1, 2) for one in pixels.split(FITTING_BATCH)]
    norms = [one for one in module.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    if hasattr(module, "initialise"):
        module.initialise(batches[0])
    module.eval()
    if not norms:
        # AlexNet's own random weights make features that hardly depend on the image.
        for layer in (one for one in module.modules() if isinstance(one, nn.Conv2d | nn.Linear)):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    for gate in (one for one in module.modules() if isinstance(one, NoisyTopKGate)):
        # They begin with zeros, so that all experts tie, and each engine breaks a tie in its own way.
        nn.init.normal_(gate.weight, std=0.1)
    for norm in (getattr(block, "last_norm", None) for block in module.modules()):
        if isinstance(norm, nn.BatchNorm2d):
            norm.weight.fill_(BRANCH_SCALE)
    for norm in norms:
        norm.train()
        # The mean over all batches, not a moving one.
        norm.momentum = None
        norm.reset_running_stats()
    for batch in batches if norms else ():
        module(batch)
    module.eval()
    head = [one for one in module.modules() if isinstance(one, nn.Linear)][-1]
    features = list[torch.Tensor]()
    handle = head.register_forward_hook(lambda layer, inputs, outputs: features.append(inputs[0].flatten(1)))
    for batch in batches:
        module(batch)
    handle.remove()
    known = torch.cat(features).double()
    # Without a bias, nothing takes the mean of the features back.
    mean = known.mean(0) if head.bias is not None else torch.zeros_like(known[0])
    centred = known - mean
    targets = nn.functional.one_hot(labels, CLASSES).double() - 1 / CLASSES
    gram = centred.T @ centred
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    # Ten times the targets: probabilities near 0 and 1, as those of a trained network.
    weight = 10 * torch.linalg.solve(gram, centred.T @ targets).T
    head.weight.copy_(weight)
    if head.bias is not None:
        head.bias.copy_(-weight @ mean)
