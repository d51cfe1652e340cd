"""The networks that the benches have for the decks' tables: published sizes, shapes of outputs, boxes, translations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from bench._export.deck_networks import SPEED
from bench._export.networks import DECK_NETWORKS, find_network
from bench._export.zoo.faster_rcnn import build_anchors, move_boxes, pool_regions, select_boxes
from bench._export.zoo.gnmt import Gnmt
from bench._export.zoo.resnet_v2 import resnet_v2
from torch import nn
from torch.nn import functional as F

from headway.export.deck import ACCURACY, read_deck

GLUON = {
    "densenet121": 8_062_504,
    "densenet161": 28_900_936,
    "densenet169": 14_307_880,
    "densenet201": 20_242_984,
    "inception_v3": 23_869_000,
    "mobilenet_0.25": 475_544,
    "mobilenet_0.5": 1_342_536,
    "mobilenet_0.75": 2_601_976,
    "mobilenet_1.0": 4_253_864,
    "mobilenet_v2_0.25": 1_526_856,
    "mobilenet_v2_0.5": 1_983_104,
    "mobilenet_v2_0.75": 2_653_864,
    "mobilenet_v2_1.0": 3_539_136,
}
"""Parameters in the table of MXNet's model zoo, where the deck's networks are from. It counts the statistics of batch
norm too."""

PARAMETERS = {
    # Tables of torchvision (SSD) and timm (Inception), and the usual example of DCGAN.
    "vgg16": 138_357_544,
    "inception_v4": 42_679_816,
    "inception_resnet_v2": 55_843_464,
    "ssd_vgg16": 35_641_826,
    "dcgan": 3_576_704,
    # VGG16 without its last layer; the proposal network; scores and boxes of 21 classes.
    "faster_rcnn": 138_357_544 - 4_097_000 + (512 * 9 + 1) * 512 + 513 * 54 + 4097 * 105,
}


def build_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a network without memory for its weights."""
    with torch.device("meta"):
        return build().eval()


def count(network: nn.Module, *, statistics: bool = False) -> int:
    """Counts parameters, and the statistics of batch norm if asked to."""
    found = sum(one.numel() for one in network.parameters())
    return found + statistics * sum(one.numel() for one in network.buffers() if one.ndim)


@pytest.mark.parametrize("network", DECK_NETWORKS, ids=lambda one: one.name)
def test_a_network_of_the_table_of_accuracy_has_the_published_size(network: object) -> None:
    own = find_network(network.name)  # type: ignore[attr-defined]
    assert count(build_meta(partial(own.build, 1000, 3, **own.arguments)), statistics=True) == GLUON[own.name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_network_of_the_table_of_speed_has_the_published_size(name: str) -> None:
    network = SPEED[name]
    assert count(build_meta(partial(network.build, network.outputs, network.size[2]))) == PARAMETERS[name]


def test_networks_whose_size_is_published_in_millions() -> None:
    # Gluon's table has 25,595,060, and counts statistics.
    assert count(build_meta(resnet_v2), statistics=True) == 25_595_060
    assert count(build_meta(partial(SPEED["ssd_mobilenet"].build, 91, 3))) == pytest.approx(6.8e6, abs=5e4)
    # 278 million, of sizes that the papers do not print.
    assert count(build_meta(partial(SPEED["gnmt"].build, 32_000, 1))) == pytest.approx(278e6, rel=0.005)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (2, 1000)) for name in ("resnet50_v2", "inception_v3", "inception_v4", "inception_resnet_v2")),
        *((name, (2, 1000)) for name in ("densenet121", "mobilenet", "vgg16")),
        ("ssd_vgg16", (2, 8732, 95)),
        ("ssd_mobilenet", (2, 1917, 95)),
        ("dcgan", (2, 3, 64, 64)),
    ],
)
def test_outputs_have_the_published_shape(name: str, shape: tuple[int, ...]) -> None:
    network = SPEED[name]
    height, width, channels = network.size
    built = build_meta(partial(network.build, network.outputs, channels))
    assert built(torch.empty(2, channels, height, width, device="meta")).shape == shape


def test_every_row_of_the_deck_has_a_network() -> None:
    assert {row.name for row in read_deck()} == SPEED.keys()
    assert len(ACCURACY) == 17
    for _, name in ACCURACY:
        find_network(name)


def test_regions_are_those_of_the_definitions() -> None:
    anchors = build_anchors(2, 3)
    assert anchors.shape == (2 * 3 * 9, 4)
    sides = anchors[:, 2:] - anchors[:, :2]
    assert torch.allclose(sides.prod(1).sqrt().reshape(6, 3, 3).mean(2), torch.tensor([128.0, 256.0, 512.0]))
    assert torch.allclose((anchors[:9, :2] + anchors[:9, 2:]) / 2, torch.tensor([8.0, 8.0]))
    assert torch.allclose((anchors[-9:, :2] + anchors[-9:, 2:]) / 2, torch.tensor([40.0, 24.0]))
    boxes = torch.tensor([[10.0, 10.0, 30.0, 50.0]])
    # A quarter of a side to the right, half as high, cut at 32 pixels.
    moved = move_boxes(boxes, torch.tensor([[0.25, 0.0, 0.0, -0.6931472]]), 40, 32)
    assert torch.allclose(moved, torch.tensor([[15.0, 20.0, 32.0, 40.0]]))


def test_the_better_of_two_boxes_that_overlap_is_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    low = 50 * torch.rand(60, 2, generator=generator)
    boxes = torch.cat([low, low + 10 + 30 * torch.rand(60, 2, generator=generator)], 1)
    expected = list[int]()
    for place, box in enumerate(boxes.tolist()):
        if all(compute_overlap(box, boxes[other].tolist()) <= 0.3 for other in expected):
            expected.append(place)
    assert 1 < len(expected) < len(boxes)
    assert select_boxes(boxes, 0.3, 300).tolist() == expected
    assert select_boxes(boxes, 0.3, 2).tolist() == expected[:2]


def compute_overlap(one: list[float], other: list[float]) -> float:
    sides = [min(one[at + 2], other[at + 2]) - max(one[at], other[at]) for at in (0, 1)]
    common = max(sides[0], 0) * max(sides[1], 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return common / (sum(areas) - common)


def test_a_region_has_the_maxima_of_its_parts() -> None:
    features = torch.randn(2, 20, 30, generator=torch.Generator().manual_seed(0))
    pooled = pool_regions(features, torch.tensor([[3.0, 2.0, 17.0, 16.0], [29.9, 19.9, 30.0, 20.0]]))
    assert torch.equal(pooled[0], F.max_pool2d(features[:, 2:16, 3:17], 2))
    # At least one pixel.
    assert torch.equal(pooled[1], features[:, 19:, 29:].expand(2, 7, 7))


def test_a_translation_is_greedy_and_as_long_as_its_source() -> None:
    torch.manual_seed(0)
    network = Gnmt(50, 8, 3).eval()
    tokens = torch.randint(0, 50, (2, 1, 5, 1))
    with torch.no_grad():
        scores, alone = network(tokens), network(tokens[1:])
    assert scores.shape == (2, 5, 50)
    # A sentence does not depend on its neighbours in the batch.
    assert torch.allclose(scores[1:], alone, atol=1e-6)
