"""What bench.winograd stands on: the layers that it measures, and how it finds their tiles."""

from __future__ import annotations

import torch
from bench.winograd import NETWORKS, TILES, Shape, find_tiles, list_shapes, make_images

from headway.model import native


def test_the_layers_are_the_3x3_convolutions_with_stride_1() -> None:
    """Of `cifar_net` with widths of 64, 256 and 256, of images of 32 pixels: each shape once."""
    between = [Shape(64, 64, 15), Shape(64, 256, 15), Shape(256, 256, 7), Shape(256, 256, 3)]
    assert list_shapes(NETWORKS["cifar_net"]) == [Shape(24, 64, 31), *between]


def test_every_tile_rounds_in_its_own_way() -> None:
    """So the result tells which one the core has chosen, also for the gradient of the input."""
    shape = Shape(16, 64, 14)
    images, weight = make_images(4, shape.inputs, shape.side), torch.randn(shape.outputs, shape.inputs, 3, 3)
    found = [native.convolve(images, weight, None, padding=1, tile=tile) for tile in TILES]
    assert not any(one.equal(other) for place, one in enumerate(found) for other in found[:place])
    tiles, grad = find_tiles(shape, 4), make_images(4, shape.outputs, shape.side)
    assert native.convolve(images, weight, None, padding=1).equal(found[TILES.index(tiles["forward"])])
    gradients = [native.compute_input_gradient(grad, weight, padding=1, tile=tile) for tile in TILES]
    assert native.compute_input_gradient(grad, weight, padding=1).equal(gradients[TILES.index(tiles["input"])])
