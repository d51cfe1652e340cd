"""The networks of the deck's table of speed, by their names in `headway/export/deck.csv`, with random weights.

Weights do not change the time of a network, apart from Faster R-CNN, where they decide how many regions are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from bench._export.zoo.dcgan import NOISE, dcgan
from bench._export.zoo.densenet import densenet
from bench._export.zoo.faster_rcnn import CLASSES as VOC
from bench._export.zoo.faster_rcnn import faster_rcnn
from bench._export.zoo.gnmt import PIECES, TOKENS, gnmt
from bench._export.zoo.inception_resnet import inception_resnet_v2
from bench._export.zoo.inception_v3 import inception_v3
from bench._export.zoo.inception_v4 import inception_v4
from bench._export.zoo.mobilenet import mobilenet
from bench._export.zoo.resnet_v2 import resnet_v2
from bench._export.zoo.ssd import CLASSES as COCO
from bench._export.zoo.ssd import ssd_mobilenet, ssd_vgg16
from bench._export.zoo.vgg16 import vgg16
from headway import model
from headway.export.pipeline import Member, Pipeline

BATCHES, SMALLER_BATCHES = (1, 16), (1, 8)
"""Instead of the deck's 128: they are taken to cost as much an image, and do not need its memory. The smaller for
networks of ten billion multiply-adds or more."""


@final
@dataclass(frozen=True)
class DeckNetwork:
    """A network of the table of speed.

    Attributes:
        build: makes it of the number of outputs and of channels.
        size: height, width and channels of its images: of noise and of tokens, where it takes these.
        outputs: classes, or numbers of a box, an image's pixel or a token.
        classifies: whether its outputs become probabilities.
        normalises: whether its input is normalised bytes; False: it gets the bytes.
        batches: images of a call.
    """

    build: Callable[[int, int], nn.Module]
    size: tuple[int, int, int] = (224, 224, 3)
    outputs: int = 1000
    classifies: bool = True
    normalises: bool = True
    batches: tuple[int, ...] = BATCHES

    def build_pipeline(self) -> Pipeline:
        """Builds the pipeline, the same one in every process."""
        height, width, channels = self.size
        torch.manual_seed(0)
        module = self.build(self.outputs, channels)
        for layer in module.modules():
            # As in a trained network, activations keep their scale. By torch's own numbers they shrink from layer to
            # layer, and products of denormal numbers take many times as long.
            if self.classifies and isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
        mean, std = ((128.0,) * channels, (64.0,) * channels) if self.normalises else (None, None)
        activation = "softmax" if self.classifies else None
        member = Member(module, mean, std)
        return Pipeline([member], activation, size=(height, width), channels=channels, outputs=self.outputs)


INCEPTION, SSD = (299, 299, 3), (300, 300, 3)
SPEED = {
    "resnet50": DeckNetwork(model.resnet50),
    "resnet50_v2": DeckNetwork(resnet_v2),
    "inception_v3": DeckNetwork(inception_v3, INCEPTION),
    "inception_v4": DeckNetwork(inception_v4, INCEPTION, batches=SMALLER_BATCHES),
    "densenet121": DeckNetwork(densenet),
    "mobilenet": DeckNetwork(mobilenet),
    "vgg16": DeckNetwork(vgg16, batches=SMALLER_BATCHES),
    "alexnet": DeckNetwork(model.alexnet),
    "inception_resnet_v2": DeckNetwork(inception_resnet_v2, INCEPTION, batches=SMALLER_BATCHES),
    "faster_rcnn": DeckNetwork(faster_rcnn, (600, 800, 3), VOC, classifies=False, batches=(1,)),
    "ssd_vgg16": DeckNetwork(ssd_vgg16, SSD, COCO, classifies=False, batches=SMALLER_BATCHES),
    "ssd_mobilenet": DeckNetwork(ssd_mobilenet, SSD, COCO, classifies=False),
    "gnmt": DeckNetwork(gnmt, (TOKENS, 1, 1), PIECES, classifies=False, normalises=False),
    "dcgan": DeckNetwork(dcgan, (1, 1, NOISE), 3, classifies=False),
}
