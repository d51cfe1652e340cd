from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model import add_blur_pool, alexnet, cifar_net, measure_model_size, resnet50
from headway.model.blur_pool import BlurConv2d, BlurMaxPool2d


def blur(images: Tensor) -> Tensor:
    line = torch.tensor([1.0, 2.0, 1.0], dtype=images.dtype) / 4
    channels = images.shape[1]
    across = F.conv2d(images, line.expand(channels, 1, 1, 3), padding=(0, 1), groups=channels)
    return F.conv2d(across, line.view(3, 1).expand(channels, 1, 3, 1), padding=(1, 0), groups=channels)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [2, 3, (2, 1)])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_sees_a_blurred_image(kernel: int, stride: int | tuple[int, int], groups: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 8, kernel, stride, kernel // 2, groups=groups).double()
    model, changed = add_blur_pool(nn.Sequential(conv))
    assert changed == ["0"]
    for size in (7, 8):
        images = torch.randn(2, 16, size, size, dtype=torch.float64)
        torch.testing.assert_close(model(images), conv(blur(images)), rtol=0, atol=1e-12)
        assert model(images).shape == conv(images).shape


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 3, 1)])
@pytest.mark.parametrize("size", [9, 10, 13, 27])
def test_a_max_pool_is_dense_then_blurred_then_thinned(kernel: int, stride: int, padding: int, size: int) -> None:
    pool = nn.MaxPool2d(kernel, stride, padding)
    model, changed = add_blur_pool(nn.Sequential(nn.Identity(), pool))
    assert changed == ["1"]
    images = torch.randn(2, 5, size, size)
    found = model(images)
    torch.testing.assert_close(found, blur(F.max_pool2d(images, kernel, 1, padding))[:, :, ::stride, ::stride])
    assert found.shape == pool(images).shape


def test_which_layers_of_a_resnet_change() -> None:
    with torch.device("meta"):
        model, before = resnet50(), resnet50()
        names, shapes = list(model.state_dict()), [value.shape for value in model.state_dict().values()]
        same, changed = add_blur_pool(model)
    assert same is model
    stages = [f"layer{stage}.0.{name}" for stage in (2, 3, 4) for name in ("conv2", "downsample.0")]
    assert changed == ["maxpool", *stages]
    assert isinstance(model.layer2[0].conv2, BlurConv2d)
    assert isinstance(model.maxpool, BlurMaxPool2d)
    assert type(model.conv1) is nn.Conv2d
    assert list(model.state_dict()) == names, "weights load as before"
    assert [value.shape for value in model.state_dict().values()] == shapes
    images = torch.empty(1, 3, 224, 224, device="meta")
    more = measure_model_size(model, images).multiply_adds - measure_model_size(before, images).multiply_adds  # type: ignore[operator]
    assert 0 < more < 0.01 * 4.1e9
    assert measure_model_size(model, images).parameters == measure_model_size(before, images).parameters


def test_networks_with_pools_and_without() -> None:
    with torch.device("meta"):
        assert add_blur_pool(alexnet(batch_norm=True))[1] == ["towers.0.pool1", "towers.0.pool2", "pool5"]
        assert add_blur_pool(cifar_net())[1] == []
    other = nn.Sequential(
        nn.MaxPool2d(3, 1), nn.MaxPool2d(3, 2, ceil_mode=True), nn.MaxPool2d(2, dilation=2), nn.Conv2d(15, 8, 3, 2)
    )
    assert add_blur_pool(other)[1] == []


def test_a_shifted_image_changes_the_output_less() -> None:
    """What it is for: a strided layer of alternating lines answers 0 or 1 by one pixel; blurred, the same."""
    lines = torch.zeros(1, 16, 16, 16)
    lines[..., ::2] = 1
    pool = nn.MaxPool2d(1, 2)
    model, _ = add_blur_pool(nn.Sequential(pool))

    def gap(layer: nn.Module) -> float:
        inner = (slice(None), slice(None), slice(1, -1), slice(1, -1))
        return (layer(lines)[inner] - layer(lines.roll(1, 3))[inner]).abs().max().item()

    assert gap(pool) == 1
    assert gap(model) < 1e-6


def test_memory_format_precision_and_device_move_with_the_network() -> None:
    model, _ = add_blur_pool(nn.Sequential(nn.Conv2d(16, 8, 3, 2), nn.MaxPool2d(2)))
    model = model.double()
    images = torch.randn(2, 16, 11, 11, dtype=torch.float64).to(memory_format=torch.channels_last)
    out = model.to(memory_format=torch.channels_last)(images)  # type: ignore[call-overload]
    assert out.is_contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(images.float()).isfinite().all()
