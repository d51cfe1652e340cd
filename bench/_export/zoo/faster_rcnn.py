"""Faster R-CNN on VGG16 (Ren, He, Girshick and Sun 2015, arXiv 1506.01497) for the 20 classes of PASCAL VOC."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench._export.zoo.vgg16 import build_features, build_linear

CLASSES, STRIDE, POOLED = 21, 16, 7
"""Classes with the background; pixels of the image for one of the features; side of a region's features."""
SCALES, RATIOS = (128, 256, 512), (0.5, 1.0, 2.0)
"""Sides of the anchors in pixels, and heights over widths (section 3.1.1)."""
CANDIDATES, PROPOSALS, OVERLAP = 6000, 300, 0.7
"""Best anchors that are compared, regions that are kept, and the overlap above which the worse one goes (3.3)."""


@final
class FasterRcnn(nn.Module):
    """Proposes regions and classifies them: images [N, 3, H, W] -> [regions, classes + 4 classes].

    Regions of all images stand below each other: scores, then the offsets of the box of each class.
    """

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        anchors = len(SCALES) * len(RATIOS)
        # Without the last pool.
        self.features = nn.Sequential(*build_features(in_channels)[:-1])
        self.proposal = nn.Conv2d(512, 512, 3, padding=1)
        self.objectness = nn.Conv2d(512, 2 * anchors, 1)
        self.offsets = nn.Conv2d(512, 4 * anchors, 1)
        self.linear = nn.Sequential(*build_linear())
        self.scores = nn.Linear(4096, num_classes)
        self.boxes = nn.Linear(4096, 4 * num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images)
        shared = F.relu(self.proposal(features))
        objectness = self.objectness(shared).unflatten(1, (2, -1)).softmax(1)[:, 1].permute(0, 2, 3, 1).flatten(1)
        offsets = self.offsets(shared).permute(0, 2, 3, 1).reshape(len(images), -1, 4)
        anchors = build_anchors(*features.shape[2:])
        regions = []
        for own, score, offset in zip(features, objectness, offsets, strict=True):
            best = score.topk(min(CANDIDATES, len(score))).indices
            boxes = move_boxes(anchors[best], offset[best], *images.shape[2:])
            regions.append(pool_regions(own, boxes[select_boxes(boxes, OVERLAP, PROPOSALS)] / STRIDE))
        hidden = self.linear(torch.cat(regions))
        return torch.cat([self.scores(hidden), self.boxes(hidden)], 1)


def faster_rcnn(num_classes: int = CLASSES, in_channels: int = 3) -> FasterRcnn:
    """Builds Faster R-CNN on VGG16: 137.08 million parameters.

    These are VGG16 without its last layer, a proposal network of 2.39 million, and 105 outputs.
    """
    return FasterRcnn(num_classes, in_channels)


def build_anchors(height: int, width: int) -> Tensor:
    """Builds the anchors (left, top, right, bottom) in pixels of the image, [height * width * 9, 4]."""
    sides = torch.tensor([[scale / ratio**0.5, scale * ratio**0.5] for scale in SCALES for ratio in RATIOS])
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    centres = STRIDE * (torch.stack([columns, rows], 2).flatten(0, 1)[:, None] + 0.5)
    return torch.cat([centres - sides / 2, centres + sides / 2], 2).flatten(0, 1)


def move_boxes(boxes: Tensor, offsets: Tensor, height: int, width: int) -> Tensor:
    """Moves boxes by their offsets (equation 2 of the paper), and cuts them at the edges of the image."""
    sides = boxes[:, 2:] - boxes[:, :2]
    centres = boxes[:, :2] + sides / 2 + offsets[:, :2] * sides
    sides = sides * offsets[:, 2:].exp()
    limit = torch.tensor([width, height], dtype=boxes.dtype)
    ends = [torch.minimum(one.clamp(min=0), limit) for one in (centres - sides / 2, centres + sides / 2)]
    return torch.cat(ends, 1)


def select_boxes(boxes: Tensor, overlap: float, count: int) -> Tensor:
    """Selects boxes, the best first, that overlap none before them by more than a share of their union.

    Args:
        boxes: [n, 4], the best first.
        count: largest number of boxes.

    Returns:
        their places.
    """
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    left, kept = torch.arange(len(boxes)), list[int]()
    while len(left) and len(kept) < count:
        first = int(left[0])
        kept.append(first)
        left = left[1:]
        low = torch.maximum(boxes[left, :2], boxes[first, :2])
        common = (torch.minimum(boxes[left, 2:], boxes[first, 2:]) - low).clamp(min=0).prod(1)
        left = left[common <= overlap * (areas[left] + areas[first] - common)]
    return torch.tensor(kept)


def pool_regions(features: Tensor, boxes: Tensor) -> Tensor:
    """Pools the maximum of each region into 7 x 7 parts.

    Args:
        features: of one image, [channels, h, w].
        boxes: in pixels of the features, [n, 4].

    Returns:
        [n, channels, 7, 7].
    """
    height, width = features.shape[1:]
    pooled = []
    for box in boxes.tolist():
        # Whole pixels, at least one.
        left, top = min(int(box[0]), width - 1), min(int(box[1]), height - 1)
        right, bottom = max(round(box[2]), left + 1), max(round(box[3]), top + 1)
        pooled.append(F.adaptive_max_pool2d(features[:, top:bottom, left:right], POOLED))
    return torch.stack(pooled)
