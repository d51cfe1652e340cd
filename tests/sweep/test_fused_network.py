"""Networks that are computed together give what each gives alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from headway.model.cifar import cifar_net
from headway.model.resnet_cifar import cifar_resnet
from headway.model.small import small_net
from headway.sweep.fused_activations import CannotFuseError
from headway.sweep.fused_network import FusedNetwork

CLASSES = 3
EXACT = 1e-9
"""Of float64; in float32 a ReLU may fall on the other side of 0."""


class Residual(nn.Module):
    """A block that adds its input, and reads activations twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        branch = self.norm(self.conv(F.relu(hidden)))
        return hidden + 0.5 * branch


def build(seed: int, blocks: list[str], width: int, side: int) -> nn.Module:
    """Builds a network of named parts with a linear head."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    channels = 2
    for block in blocks:
        if block in ("conv", "strided", "same"):
            options = {"conv": {"padding": 1}, "strided": {"stride": 2, "padding": 1}, "same": {"padding": "same"}}
            layers.append(nn.Conv2d(channels, width, 3, bias=block != "same", **options[block]))
            channels = width
        elif block == "grouped":
            layers.append(nn.Conv2d(channels, 2 * channels, 1, groups=channels))
            channels *= 2
        elif block == "residual":
            layers.append(Residual(channels))
        else:
            layers.append(
                {
                    "norm": nn.BatchNorm2d(channels, momentum=0.3),
                    "relu": nn.ReLU(),
                    "inplace": nn.ReLU(inplace=True),
                    "gelu": nn.GELU(),
                    "pool": nn.MaxPool2d(3, stride=1, padding=1),
                    "average": nn.AvgPool2d(3, stride=1, padding=1),
                }[block]
            )
    sides = side
    for block in blocks:
        sides = (sides + 1) // 2 if block == "strided" else sides
    layers += [nn.Flatten(), nn.Linear(channels * sides * sides, 5), nn.BatchNorm1d(5), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(5, CLASSES)).double()


def expect_alike(networks: list[nn.Module], images: Tensor, passes: int = 2, within: float = EXACT) -> None:
    """Outputs, gradients and statistics of each network are those that it has alone; later passes overwrite more."""
    alone = copy.deepcopy(networks)
    fused = FusedNetwork(networks)
    labels = torch.arange(len(images)) % CLASSES
    for _ in range(passes):
        outputs = fused(images)
        torch.autograd.backward([F.cross_entropy(one, labels) * (1 + place) for place, one in enumerate(outputs)])
        assert fused.is_linked
        for place, (one, own, taken) in enumerate(zip(alone, networks, fused.take_gradients(), strict=True)):
            expected = one(images)
            torch.testing.assert_close(outputs[place], expected, rtol=within, atol=within)
            one.zero_grad()
            (F.cross_entropy(expected, labels) * (1 + place)).backward()
            for parameter, gradient in zip(one.parameters(), taken, strict=True):
                assert (parameter.grad is None) == (gradient is None)
                torch.testing.assert_close(gradient, parameter.grad, rtol=within, atol=within)
            for buffer, value in zip(one.buffers(), own.buffers(), strict=True):
                torch.testing.assert_close(value, buffer, rtol=within, atol=within)
            # The next pass has other weights, changed as an optimizer changes them.
            with torch.no_grad():
                for parameter, other, gradient in zip(one.parameters(), own.parameters(), taken, strict=True):
                    if gradient is not None:
                        other -= 0.1 * gradient
                        parameter.copy_(other)


@settings(max_examples=12, deadline=None)
@given(
    blocks=st.lists(
        st.sampled_from(
            ["conv", "strided", "same", "grouped", "residual", "norm", "relu", "inplace", "gelu", "pool", "average"]
        ),
        max_size=6,
    ),
    width=st.integers(1, 4),
    side=st.integers(3, 6),
    count=st.integers(1, 4),
    is_last=st.booleans(),
)
def test_networks_together_are_the_networks_alone(
    blocks: list[str], width: int, side: int, count: int, is_last: bool
) -> None:
    # Weights of the first part: an in-place ReLU would otherwise change the images.
    networks = [build(seed, ["conv", *blocks], width, side) for seed in range(count)]
    memory = torch.channels_last if is_last else torch.contiguous_format
    networks = [network.to(memory_format=memory) for network in networks]  # type: ignore[call-overload]
    images = torch.randn(5, 2, side, side, dtype=torch.float64).contiguous(memory_format=memory)
    expect_alike(networks, images)


@pytest.mark.parametrize(
    ("make", "side"),
    [
        (lambda: small_net(CLASSES, 2, width=3), 8),
        (lambda: cifar_net(CLASSES, 2, widths=(3, 4, 5)), 24),
        (lambda: cifar_resnet(CLASSES, 2, depth=8), 8),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 4), nn.ReLU(), nn.Linear(4, CLASSES)), 8),
    ],
    ids=["small_net", "cifar_net", "cifar_resnet", "perceptron"],
)
def test_networks_of_the_library_fuse(make: Callable[[], nn.Module], side: int) -> None:
    networks = []
    for seed in range(3):
        torch.manual_seed(seed)
        networks.append(make().double().to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    expect_alike(networks, torch.randn(4, 2, side, side, dtype=torch.float64))


def pass_once(networks: Sequence[nn.Module | None], images: Tensor) -> list[list[Tensor]]:
    """Outputs and gradients of each network."""
    fused = FusedNetwork(copy.deepcopy(networks))
    outputs = fused(images)
    torch.autograd.backward([F.cross_entropy(one, torch.arange(len(images)) % CLASSES) for one in outputs])
    return [
        [one.detach(), *(value for value in taken if value is not None)]
        for one, taken in zip(outputs, fused.take_gradients(), strict=True)
    ]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(value, expected) for value, expected in zip(one, other, strict=True))


@pytest.mark.parametrize("width", [3, 5, 16])
def test_a_network_has_the_same_bits_whoever_is_beside_it(width: int) -> None:
    """Also beside an empty place, or beside numbers that are not finite. So a stopped sweep goes on with its bits."""
    networks = []
    for seed in range(5):
        torch.manual_seed(seed)
        networks.append(small_net(CLASSES, 1, width=width).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    images = torch.randn(16, 1, 8, 8).contiguous(memory_format=torch.channels_last)
    expected = pass_once(networks, images)
    assert equal(pass_once([networks[0], None, None, None, None], images)[0], expected[0])
    assert equal(pass_once([None, None, None, *networks[3:]], images)[1], expected[4])
    for parameter in networks[2].parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    beside = pass_once(networks, images)
    assert not equal(beside[2], beside[2])
    assert all(equal(beside[place], expected[place]) for place in (0, 1, 3, 4))


class Odd(nn.Module):
    """Calls a function on its activations, its first weight, or its input."""

    def __init__(self, call: Callable[[Odd, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.head, self.call = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, CLASSES), call

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.call(self, images).flatten(1))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda own, images: F.dropout(own.conv(images), 0.2, own.training), "dropout"),
        (lambda own, images: own.conv(F.dropout(images, 0.2, own.training)), "dropout"),
        (lambda own, images: F.conv2d(images, own.conv.weight * 2), "with weights"),
        (lambda own, images: own.conv(images) * float(own.conv.weight.mean()), "way that is not known"),
        (lambda own, images: own.conv(images) * own.conv.bias.view(1, 4, 1, 1), "reshape|way"),
        (lambda own, images: own.conv(images).softmax(1), "`softmax`"),
        (lambda own, images: own.conv(images).flip(0), "`flip`"),
        (lambda own, images: own.conv(images)[:, :2].repeat(1, 2, 1, 1), "channels"),
        (lambda own, images: own.conv(images).view(-1, 36), "reshape"),
        (lambda own, images: own.conv(images) if own.conv(images) > 0 else images, "way that is not known"),
        (lambda own, images: own.conv(images) + torch.rand(1), "rand"),
    ],
)
def test_what_is_not_known_is_refused(call: Callable[[Odd, Tensor], Tensor], reason: str) -> None:
    networks: list[nn.Module] = [Odd(call), Odd(call)]
    with pytest.raises(CannotFuseError, match=reason):
        FusedNetwork(networks)(torch.randn(2, 1, 8, 8))


def test_networks_that_differ_or_have_hooks_are_refused() -> None:
    networks = [small_net(CLASSES, 1, width=2), small_net(CLASSES, 1, width=2)]
    networks[1].layer1.norm.eps = 0.1
    with pytest.raises(CannotFuseError, match="differ"):
        FusedNetwork(networks)
    networks[1].layer1.norm.eps = networks[0].layer1.norm.eps
    networks[1].head.register_forward_hook(lambda *_: None)
    with pytest.raises(CannotFuseError, match="hooks"):
        FusedNetwork(networks)


def test_operations_that_change_between_steps_are_noticed() -> None:
    """A ReLU that overwrote activations must not have been the first of two readers."""
    reads = iter([1, 1, 2])

    def call(own: Odd, images: Tensor) -> Tensor:
        hidden = own.conv(images)
        positive = F.relu(hidden)
        return positive + hidden if next(reads) == 2 else positive

    fused = FusedNetwork([Odd(call), Odd(call)])
    images = torch.randn(2, 1, 8, 8)
    fused(images)
    fused(images)
    with pytest.raises(CannotFuseError, match="change from step to step"):
        fused(images)
