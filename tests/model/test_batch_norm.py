from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from headway.core.errors import UsageError
from headway.model import GhostBatchNorm, convert_to_ghost, recompute_statistics
from headway.model.batch_norm import set_momentum

FORMATS = [torch.contiguous_format, torch.channels_last]


def pair(group: int, momentum: float | None = 0.1) -> tuple[GhostBatchNorm, nn.BatchNorm2d]:
    """Both with the same weights, in float64."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(5, momentum=momentum).double()
    nn.init.uniform_(plain.weight)
    nn.init.uniform_(plain.bias)
    ghost = GhostBatchNorm(5, momentum=momentum, group=group).double()
    ghost.load_state_dict(plain.state_dict())
    return ghost, plain


def images(samples: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 5, 4, 3, dtype=torch.float64, generator=generator).to(memory_format=layout) + 1


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("group", [8, 9, 100])
def test_a_group_of_the_whole_batch_is_batch_norm(group: int, layout: torch.memory_format) -> None:
    ghost, plain = pair(group)
    for step in range(3):
        x, y = (images(8, layout).mul_(step + 1).requires_grad_() for _ in range(2))
        one, other = ghost(x), plain(y)
        assert torch.equal(one, other)
        for out in (one, other):
            out.square().sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    for name, value in plain.state_dict().items():
        assert torch.equal(ghost.state_dict()[name], value), name


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(1, 24), group=st.integers(1, 26), channels_last=st.booleans())
def test_each_group_is_normalised_alone(samples: int, group: int, channels_last: bool) -> None:
    """Outputs, gradients of input, scale and shift, and the running statistics, to 1e-12, for any sizes."""
    ghost, plain = pair(group)
    x = images(samples, FORMATS[channels_last]).requires_grad_()
    y = images(samples).requires_grad_()
    count = -(-samples // group)
    parts = y.tensor_split(count)
    sizes = [len(part) for part in parts]
    assert max(sizes) <= group
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == samples
    weights = torch.arange(y.numel(), dtype=torch.float64).view_as(y).sin()

    expected = torch.cat([F.batch_norm(part, None, None, plain.weight, plain.bias, training=True) for part in parts])
    found = ghost(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found.is_contiguous(memory_format=FORMATS[channels_last])
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-12)
    for name, value in ghost.named_parameters():
        torch.testing.assert_close(value.grad, dict(plain.named_parameters())[name].grad, rtol=0, atol=1e-11)

    mean = sum(part.mean((0, 2, 3)) * len(part) for part in parts).detach() / samples  # type: ignore[union-attr]
    var = sum(part.var((0, 2, 3)) * len(part) for part in parts).detach() / samples  # type: ignore[union-attr]
    torch.testing.assert_close(ghost.running_mean, 0.1 * mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(ghost.running_var, 0.9 + 0.1 * var, rtol=0, atol=1e-12)
    assert ghost.num_batches_tracked == 1


def test_without_momentum_the_running_statistics_are_plain_means() -> None:
    ghost, _ = pair(2, momentum=None)
    batches = [images(samples) for samples in (4, 6, 8)]
    for batch in batches:
        ghost(batch)
    expected = torch.stack([batch.mean((0, 2, 3)) for batch in batches]).mean(0)
    torch.testing.assert_close(ghost.running_mean, expected, rtol=0, atol=1e-12)


def test_evaluation_is_that_of_batch_norm() -> None:
    ghost, plain = pair(3)
    ghost(images(12))
    plain.load_state_dict(ghost.state_dict())
    assert torch.equal(ghost.eval()(images(7)), plain.eval()(images(7)))


def test_half_precision_keeps_its_type() -> None:
    ghost = GhostBatchNorm(5, group=3)
    with torch.autocast("cpu", torch.bfloat16):
        out = ghost(images(7).bfloat16())
    assert out.dtype == torch.bfloat16
    assert ghost.running_mean is not None
    assert ghost.running_mean.dtype == torch.float32


def test_conversion_keeps_names_parameters_and_places() -> None:
    norm = nn.BatchNorm2d(3, momentum=0.3)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.Sequential(norm, nn.Flatten(), nn.BatchNorm1d(12)))
    before, ids = copy.deepcopy(net.state_dict()), [id(value) for value in net.parameters()]
    assert convert_to_ghost(net, 4) is net
    assert isinstance(net[1], GhostBatchNorm)
    assert net[1] is net.get_submodule("2.0"), "used twice, it stays one"
    assert net[1].momentum == 0.3
    assert [id(value) for value in net.parameters()] == ids
    assert net.state_dict().keys() == before.keys()
    net.load_state_dict(before)
    assert net(torch.randn(6, 3, 2, 2)).shape == (6, 12)
    convert_to_ghost(net, 2)
    assert net[1].group == 2
    alone = convert_to_ghost(nn.BatchNorm2d(3), 4)
    assert isinstance(alone, GhostBatchNorm)


def test_what_cannot_be_converted_is_refused() -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return input

    with pytest.raises(UsageError, match=r"^0: Own is a batch norm with a forward pass of its own"):
        convert_to_ghost(nn.Sequential(Own(3)), 4)
    for change in (lambda net: convert_to_ghost(net, 4), lambda net: set_momentum(net, 0.9)):
        with pytest.raises(UsageError, match=r"the network has no batch norm\. Remove it"):
            change(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"of 5 channels was given an input of shape \[4, 3, 2, 2\]"):
        GhostBatchNorm(5, group=2)(torch.randn(4, 3, 2, 2))


def test_momentum_is_the_share_that_is_kept() -> None:
    net = nn.Sequential(nn.BatchNorm2d(5))
    set_momentum(net, 0.75)
    net.double()(images(4))
    norm = net[0]
    assert isinstance(norm, nn.BatchNorm2d)
    torch.testing.assert_close(norm.running_mean, 0.25 * images(4).mean((0, 2, 3)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", [None, 3])
def test_recomputed_statistics_are_means_over_the_batches(group: int | None) -> None:
    net: nn.Module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(5, momentum=0.01), nn.BatchNorm2d(5)).double()
    if group is not None:
        net = convert_to_ghost(net, group)
    frozen, norm = net.get_submodule("2"), net.get_submodule("1")
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    frozen.eval()
    for _ in range(3):
        net(images(8))
    kept = {name: value.clone() for name, value in net.named_buffers()}
    random = torch.get_rng_state()
    batches = [images(6), images(9) * 3]
    with torch.no_grad(), recompute_statistics(net):
        for batch in batches:
            net(batch)
    assert torch.equal(torch.get_rng_state(), random), "dropout is off"
    expected = torch.stack([batch.mean((0, 2, 3)) for batch in batches]).mean(0)
    torch.testing.assert_close(norm.running_mean, expected, rtol=0, atol=1e-12)
    groups = [batch.tensor_split(1 if group is None else -(-len(batch) // group)) for batch in batches]
    spread = [sum(part.var((0, 2, 3)) for part in parts) / len(parts) for parts in groups]
    torch.testing.assert_close(norm.running_var, torch.stack(spread).mean(0), rtol=0, atol=1e-12)  # type: ignore[arg-type]
    assert (norm.momentum, norm.num_batches_tracked) == (0.01, 3)
    assert torch.equal(net.get_buffer("2.running_mean"), kept["2.running_mean"]), "one that stands still stays"
    assert [one.training for one in net.children()] == [True, True, False]


def test_a_broken_forward_pass_leaves_modes_as_they_were() -> None:
    net = nn.Sequential(nn.BatchNorm2d(5))
    norm = net[0]
    assert isinstance(norm, nn.BatchNorm2d)
    with pytest.raises(ValueError, match="expected 4D input"), recompute_statistics(net):
        net(torch.randn(2, 3))
    assert net.training
    assert (norm.training, norm.momentum, norm.num_batches_tracked) == (True, 0.1, 0)
