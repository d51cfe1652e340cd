from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from headway.model import resnet18, resnet34, resnet50
from headway.model.resnet import ResNet

Factory = Callable[..., ResNet]


@pytest.mark.parametrize(
    ("factory", "parameters", "tensors"),
    [(resnet18, 11_689_512, 122), (resnet34, 21_797_672, 218), (resnet50, 25_557_032, 320)],
)
def test_published_sizes(factory: Factory, parameters: int, tensors: int) -> None:
    with torch.device("meta"):
        model = factory()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(model.state_dict()) == tensors
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_the_common_names() -> None:
    with torch.device("meta"):
        basic, bottleneck = (dict(factory().named_parameters()) for factory in (resnet18, resnet50))
    assert list(basic)[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert list(basic)[-2:] == ["fc.weight", "fc.bias"]
    assert basic["layer1.0.conv1.weight"].shape == (64, 64, 3, 3)
    assert basic["layer4.0.downsample.0.weight"].shape == (512, 256, 1, 1)
    assert "layer1.0.downsample.0.weight" not in basic
    assert bottleneck["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert bottleneck["layer4.2.conv3.weight"].shape == (2048, 512, 1, 1)
    assert bottleneck["layer3.5.bn3.bias"].shape == (1024,)


def test_version_1_5_has_its_stride_in_the_3x3_convolution() -> None:
    with torch.device("meta"):
        model = resnet50()
    strides = [model.get_submodule(f"layer2.0.conv{index}").stride for index in (1, 2, 3)]
    assert strides == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("factory", [resnet18, resnet50])
def test_blocks_begin_as_the_identity(factory: Factory) -> None:
    torch.manual_seed(0)
    block = factory().layer1[1]
    hidden = torch.randn(2, block.conv1.in_channels, 5, 5).relu()
    assert torch.equal(block(hidden.clone()), hidden)
    plain = factory(zero_init_last=False).layer1[1]
    assert not torch.equal(plain(hidden.clone()), hidden)


@pytest.mark.parametrize("factory", [resnet18, resnet50])
def test_gray_images_and_gradients(factory: Factory) -> None:
    model = factory(3, in_channels=1)
    logits = model(torch.randn(2, 1, 64, 64))
    assert logits.shape == (2, 3)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_convolutions_begin_with_variance_two_over_fan_out() -> None:
    torch.manual_seed(0)
    conv = resnet18().layer3[1].conv1
    assert isinstance(conv, nn.Conv2d)
    assert conv.weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)
