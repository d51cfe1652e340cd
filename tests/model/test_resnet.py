from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from headway.model import measure_model_size, resnet18, resnet34, resnet50, resnet101, zero_init
from headway.model.resnet import ResNet

Factory = Callable[..., ResNet]


@pytest.mark.parametrize(
    ("factory", "parameters", "tensors", "billions"),
    [
        (resnet18, 11_689_512, 122, 1.8),
        (resnet34, 21_797_672, 218, 3.6),
        (resnet50, 25_557_032, 320, 4.1),
        (resnet101, 44_549_160, 626, 7.8),
    ],
)
@pytest.mark.thin(1)
def test_published_sizes(factory: Factory, parameters: int, tensors: int, billions: float) -> None:
    with torch.device("meta"):
        model = factory()
        found = measure_model_size(model, torch.empty(2, 3, 224, 224))
    assert found.parameters == parameters
    assert found.multiply_adds == pytest.approx(billions * 1e9, rel=0.03)
    assert len(model.state_dict()) == tensors
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_resnet_50_is_within_3_percent_of_25_million_and_4_billion() -> None:
    with torch.device("meta"):
        found = measure_model_size(resnet50(), torch.empty(1, 3, 224, 224))
    assert found.parameters == pytest.approx(25e6, rel=0.03)
    assert found.multiply_adds == pytest.approx(4e9, rel=0.03)


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


@pytest.mark.parametrize(("factory", "blocks"), [(resnet18, 8), (resnet50, 16)])
def test_blocks_begin_as_the_identity_where_asked(factory: Factory, blocks: int) -> None:
    torch.manual_seed(0)
    model = factory()
    block = model.layer1[1]
    hidden = torch.randn(2, block.conv1.in_channels, 5, 5).relu()
    assert not torch.equal(block(hidden.clone()), hidden)
    assert len(zero_init(model)) == blocks
    assert torch.equal(block(hidden.clone()), hidden)


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
