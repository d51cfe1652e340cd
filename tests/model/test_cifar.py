from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.core.errors import UsageError
from headway.model import measure_model_size
from headway.model.cifar import CifarNet, cifar_net


@pytest.fixture
def images() -> torch.Tensor:
    """Correlated pixels, as photographs have."""
    generator = torch.Generator().manual_seed(0)
    return F.avg_pool2d(torch.randn(300, 3, 34, 34, generator=generator), 3, stride=1) + 0.2


def test_eight_layers_with_weights_and_their_names() -> None:
    model = cifar_net()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == 8
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_972_792
    names = [name for name, _ in model.named_parameters()]
    biases = [name for name in names if re.search("norm.*bias", name)]
    assert len(biases) == 6
    assert {"whiten.weight", "whiten.bias", "head.weight"} <= set(names)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["whiten.weight", *(name.replace("bias", "weight") for name in biases)]


def test_a_run_of_airbench_costs_what_it_publishes() -> None:
    """0.36e15 operations: 9.9 epochs of 50,000 images, three passes each, two operations a multiply-add."""
    with torch.device("meta"):
        found = measure_model_size(cifar_net(), torch.empty(1, 3, 32, 32))
    assert found.multiply_adds is not None
    assert 9.9 * 50_000 * 3 * 2 * found.multiply_adds == pytest.approx(0.36e15, rel=0.03)


def test_the_activation_of_the_blocks_is_a_choice_and_that_of_the_patches_is_not() -> None:
    torch.manual_seed(0)
    net, images = cifar_net(widths=[8, 8, 8], activation="silu").eval(), torch.randn(2, 3, 32, 32)
    block = net.blocks[0]
    hidden = F.silu(block.norm1(F.max_pool2d(block.conv1(F.gelu(net.whiten(images))), 2)))
    hidden = net.blocks[1:](F.silu(block.norm2(block.conv2(hidden))))
    torch.testing.assert_close(net(images), net.head(hidden.amax((2, 3))) * net.scaling)
    with pytest.raises(UsageError, match="activation='relu'"):
        cifar_net(activation="relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [24, 31, 32, 33, 48])
@pytest.mark.parametrize("channels", [1, 3])
def test_sizes_and_channels(size: int, channels: int) -> None:
    model = cifar_net(7, channels, widths=[8, 8, 8])
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_whitened_patches_have_unit_variance(images: torch.Tensor) -> None:
    model = cifar_net()
    model.initialise(images)
    outputs = model.whiten(images).double().transpose(0, 1).flatten(1)
    half = len(outputs) // 2
    torch.testing.assert_close(outputs[half:], -outputs[:half])
    # an eigenvalue v gives the variance v / (v + 5e-4), and no correlation
    patches = F.unfold(images.double(), 2).transpose(0, 1).flatten(1)
    values = torch.linalg.eigvalsh(patches @ patches.T / patches.shape[1]).flip(0)
    moment = outputs[:half] @ outputs[:half].T / outputs.shape[1]
    torch.testing.assert_close(moment, torch.diag(values / (values + 5e-4)), atol=1e-5, rtol=1e-4)


def test_initialise_is_a_function_of_the_images(images: torch.Tensor) -> None:
    first, second, laid_otherwise = (cifar_net() for _ in range(3))
    first.initialise(images)
    second.initialise(images[torch.randperm(300, generator=torch.Generator().manual_seed(1))])
    laid_otherwise.initialise(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(first.whiten.weight, second.whiten.weight, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(first.whiten.weight, laid_otherwise.whiten.weight)
    assert not first.whiten.weight.requires_grad
    # no eigenvector has a sign of its own: the greatest entry of each is made positive
    filters = first.whiten.weight[:12].flatten(1)
    assert (filters.gather(1, filters.abs().argmax(1, keepdim=True)) > 0).all()


def test_flat_images_keep_the_filters_finite() -> None:
    model = cifar_net()
    model.initialise(torch.zeros(4, 3, 32, 32))
    assert model.whiten.weight.isfinite().all()


def test_convolutions_begin_by_passing_their_input_on() -> None:
    for module in cifar_net().blocks.modules():
        if isinstance(module, nn.Conv2d):
            hidden = torch.randn(1, module.in_channels, 6, 6)
            torch.testing.assert_close(module(hidden)[:, : module.in_channels], hidden[:, : module.out_channels])
            others = module.weight[module.in_channels :]
            assert others.count_nonzero() == others.numel()


def test_options_reach_the_network() -> None:
    torch.manual_seed(0)
    model = cifar_net(batchnorm_momentum=0.9, whiten_kernel=3)
    assert model.whiten.weight.shape == (54, 3, 3, 3)
    norm = model.get_submodule("blocks.0.norm1")
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.momentum == pytest.approx(0.1)
    model.eval()
    batch = torch.randn(2, 3, 32, 32)
    ninth = model(batch)
    model.scaling = 1.0
    torch.testing.assert_close(model(batch), ninth * 9)


@pytest.mark.parametrize(("options", "bounded"), [({}, False), ({"batchnorm_eps": 0.1}, True)])
def test_gray_images_stored_as_rgb_want_a_larger_epsilon(
    images: torch.Tensor, options: dict[str, float], bounded: bool
) -> None:
    """The filters of colour differences see nothing, so that half of the channels are the same everywhere."""
    torch.manual_seed(0)
    gray = images[:16, :1, :24, :24].expand(-1, 3, -1, -1).contiguous()
    model = cifar_net(widths=(24, 8, 8), **options)
    model.initialise(gray)
    F.cross_entropy(model(gray), torch.arange(16) % 10).backward()
    gradient = model.get_parameter("blocks.0.conv1.weight").grad
    assert gradient is not None
    assert (gradient.norm() < 100) == bounded


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan")])
def test_an_epsilon_that_is_none(eps: float) -> None:
    with pytest.raises(UsageError, match=r"cifar_net has batchnorm_eps=.*Give it a number above 0, for example 0.1"):
        cifar_net(batchnorm_eps=eps)


def test_it_learns_which_half_is_bright(images: torch.Tensor) -> None:
    torch.manual_seed(0)
    labels = torch.arange(300) % 2
    images[labels == 1, :, :16] += 1
    images[labels == 0, :, 16:] += 1
    model: CifarNet = cifar_net(2, widths=(8, 8, 8))
    model.initialise(images)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for start in range(0, 300, 30):
        optimizer.zero_grad()
        F.cross_entropy(model(images[start : start + 30]), labels[start : start + 30]).backward()
        optimizer.step()
    model.eval()
    assert (model(images).argmax(1) == labels).float().mean() > 0.95
