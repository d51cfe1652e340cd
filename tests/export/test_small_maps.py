"""Convolutions on tiny maps become matrix products that compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headway.export.pipeline import Member, Pipeline
from headway.export.small_maps import MOST_SIDE, UnfoldedConv, unfold_small_maps


def wrap(network: nn.Module, size: tuple[int, int], channels: int = 2) -> Pipeline:
    return Pipeline([Member(network, None, None)], "identity", size=size, channels=channels, outputs=3)


class Flat(nn.Module):
    """A convolution on floats in the range of weights, and its outputs as rows."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images.float() / 255).flatten(1)  # type: ignore[no-any-return]


@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    more=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    bias=st.booleans(),
)
def test_the_product_is_the_convolution(kernel: Any, stride: Any, padding: Any, more: Any, bias: bool) -> None:
    size = tuple(k + extra for k, extra in zip(kernel, more, strict=True))
    conv = nn.Conv2d(2, 3, kernel, stride, padding, bias=bias)
    pixels = torch.randint(0, 256, (5, *size, 2), dtype=torch.uint8)
    pipeline = wrap(Flat(conv), size)
    with torch.no_grad():
        expected = pipeline(pixels)
        sides = conv(torch.zeros(1, 2, *size)).shape[2:]
        found = unfold_small_maps(pipeline)(pixels)
    replaced = any(isinstance(one, UnfoldedConv) for one in pipeline.modules())
    assert replaced == (max(sides) <= MOST_SIDE and kernel != (1, 1))
    assert torch.allclose(found, expected, atol=1e-5)


def test_what_computes_something_else_stays() -> None:
    hooked, changed = nn.Conv2d(2, 4, 2), nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 4, 2))
    hooked.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    others = [
        nn.Conv2d(2, 4, 2, groups=2),
        nn.Conv2d(2, 4, 2, padding=1, dilation=2),
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(2, 4, 3, padding="same"),
        hooked,
        changed,
    ]
    for conv in others:
        pipeline = wrap(Flat(conv), (2, 2))
        pixels = torch.randint(0, 256, (4, 2, 2, 2), dtype=torch.uint8)
        with torch.no_grad():
            expected = pipeline(pixels)
            assert torch.equal(unfold_small_maps(pipeline)(pixels), expected), conv
        assert not any(isinstance(one, UnfoldedConv) for one in pipeline.modules())


def test_a_layer_that_also_sees_a_large_map_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, images: Tensor) -> Tensor:
            large = self.conv(images.float())
            return self.conv(large[:, :, :2, :2]).flatten(1)  # type: ignore[no-any-return]

    pipeline = unfold_small_maps(wrap(Twice(), (6, 6)))
    assert not any(isinstance(one, UnfoldedConv) for one in pipeline.modules())


def test_a_network_that_fails_is_left_to_the_trace() -> None:
    class Broken(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise RuntimeError("no such image")

    pipeline = wrap(Broken(), (6, 6))
    assert unfold_small_maps(pipeline) is pipeline
    with pytest.raises(RuntimeError, match="no such image"):
        pipeline(torch.zeros(1, 6, 6, 2, dtype=torch.uint8))
