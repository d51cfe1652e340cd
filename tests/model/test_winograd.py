from __future__ import annotations

import copy
import ctypes
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headway.core.errors import UsageError
from headway.core.native import LIBRARY
from headway.model import cifar_net, native, resnet50
from headway.model.flops import MultiplyAddCounter
from headway.model.winograd import WinogradConv2d, use_winograd

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")

TOLERANCE = 1e-5
"""Of the norm of a result: four times the largest error seen, and far below that of a wrong tile."""


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected).norm() / expected.norm()
    assert error <= TOLERANCE, f"{error:.1e}"


def compare_with_float64(images: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> None:
    """Compares output and gradients with torch's convolution in float64."""
    given = [None if one is None else one.detach().double().requires_grad_() for one in (images, weight, bias)]
    out = F.conv2d(*given, padding=padding)  # type: ignore[arg-type]
    grad = torch.randn(out.shape)
    expected = torch.autograd.grad(out, [one for one in given if one is not None], grad.double())
    assert_near(native.convolve(images, weight, bias, padding=padding), out)
    assert_near(native.compute_input_gradient(grad, weight, padding=padding), expected[0])
    found = native.compute_weight_gradient(grad, images, weight, padding=padding)
    assert_near(found, expected[1])
    assert found.stride() == weight.stride()


@given(
    n=st.integers(1, 9),
    channels=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    side=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    padding=st.integers(0, 2),
    is_channels_last=st.booleans(),
    has_bias=st.booleans(),
    threads=st.sampled_from([1, 3]),
)
def test_any_shape_is_convolved_as_in_float64(
    n: int,
    channels: tuple[int, int],
    side: tuple[int, int],
    padding: int,
    is_channels_last: bool,
    has_bias: bool,
    threads: int,
) -> None:
    height, width = (max(one, 3 - 2 * padding) for one in side)
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    images = torch.randn(n, channels[0], height, width).contiguous(memory_format=layout)
    weight = torch.randn(channels[1], channels[0], 3, 3).contiguous(memory_format=layout)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare_with_float64(images, weight, torch.randn(channels[1]) if has_bias else None, padding)
    finally:
        torch.set_num_threads(before)


def test_each_instruction_set_convolves_many_blocks_and_panels() -> None:
    """More tiles than a block has, more channels than a chunk; the tests of one shape take the best set alone."""
    program = (
        "import torch\n"
        "from tests.model.test_winograd import compare_with_float64\n"
        "for side in (5, 7, 8):\n"
        "    compare_with_float64(torch.randn(40, 72, side, side), torch.randn(136, 72, 3, 3), torch.randn(136), 1)\n"
    )
    for isa in ("portable", "avx2", "avx512"):
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"HEADWAY_ISA": isa}, check=True)


def test_threads_do_not_change_a_bit() -> None:
    images, weight = torch.randn(5, 24, 15, 15), torch.randn(40, 24, 3, 3)
    grad = torch.randn(5, 40, 15, 15)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(
            (
                native.convolve(images, weight, None, padding=1),
                native.compute_input_gradient(grad, weight, padding=1),
                native.compute_weight_gradient(grad, images, weight, padding=1),
            )
        )
    torch.set_num_threads(before)
    for one in results[1:]:
        assert all(torch.equal(found, first) for found, first in zip(one, results[0], strict=True))


def test_a_network_has_the_same_outputs_and_gradients() -> None:
    torch.manual_seed(0)
    plain = cifar_net(widths=(16, 24, 32), batchnorm_eps=0.1)
    model, changed = use_winograd(copy.deepcopy(plain))
    assert changed == [f"blocks.{block}.conv{number}" for block in range(3) for number in (1, 2)]
    assert list(model.state_dict()) == list(plain.state_dict())
    images = torch.randn(8, 3, 32, 32)
    for one in (plain, model):
        one(images).square().sum().backward()
    for (name, left), right in zip(plain.named_parameters(), model.parameters(), strict=True):
        if left.grad is not None:
            torch.testing.assert_close(right.grad, left.grad, rtol=1e-3, atol=1e-3 * float(left.grad.abs().max())), name


def test_a_frozen_layer_computes_only_what_is_needed() -> None:
    model, _ = use_winograd(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)))
    model[0].weight.requires_grad_(False)
    images = torch.randn(2, 16, 6, 6, requires_grad=True)
    model(images).sum().backward()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    assert images.grad is not None
    grad = torch.autograd.grad(model(images).square().sum(), images, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_only_plain_3x3_convolutions_change() -> None:
    class Own(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    kept = [
        nn.Conv2d(16, 16, 1),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.Conv2d(16, 16, 3, dilation=2),
        nn.Conv2d(32, 32, 3, groups=2),
        nn.Conv2d(16, 16, 3, padding=3),
        nn.Conv2d(16, 16, 3, padding=(0, 1)),
        nn.Conv2d(16, 16, 3, padding="same"),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(3, 16, 3),
        nn.Conv2d(16, 3, 3),
        Own(16, 16, 3),
    ]
    same, changed = use_winograd(nn.ModuleList(kept))
    assert changed == []
    assert list(same) == kept
    root, changed = use_winograd(nn.Conv2d(16, 16, 3, padding=2))
    assert (type(root), changed) == (WinogradConv2d, [""])
    with torch.device("meta"):
        assert len(use_winograd(resnet50())[1]) == 13, "of 16, three have a stride"


def test_torch_convolves_where_the_core_cannot() -> None:
    conv = nn.Conv2d(16, 16, 3, padding=1)
    model, _ = use_winograd(copy.deepcopy(nn.Sequential(conv)))
    images = torch.randn(2, 16, 6, 6)
    for layer in (conv, model):
        layer.double()
    assert torch.equal(model(images.double()), conv(images.double()))
    for layer in (conv, model):
        layer.float()
    assert not torch.equal(model(images), conv(images)), "here the core convolves"
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(images), conv(images))
    assert model(images[:0]).shape == (0, 16, 6, 6)
    with MultiplyAddCounter() as counter:
        model(images)
    assert counter.total > 0, "operations are still counted"
    exported = torch.export.export(model.eval(), (images,)).module()
    assert torch.equal(exported(images), conv(images))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        use_winograd(nn.Conv2d(16, 16, 3))[0](torch.randn(1, 16, 2, 2))


@pytest.mark.parametrize(
    ("images", "weight"),
    [
        (torch.randn(1, 4, 5, 5), torch.randn(4, 5, 3, 3)),
        (torch.randn(1, 4, 5, 5), torch.randn(4, 4, 5, 5)),
        (torch.randn(1, 4, 5, 5).double(), torch.randn(4, 4, 3, 3)),
        (torch.randn(4, 5, 5), torch.randn(4, 4, 3, 3)),
        (torch.randn(1, 4, 1, 1), torch.randn(4, 4, 3, 3)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(images: Tensor, weight: Tensor) -> None:
    with pytest.raises(UsageError, match="cannot convolve"):
        native.convolve(images, weight, None, padding=0)


def test_what_is_out_of_range_is_refused() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    for function in (library.hw_convolve, library.hw_convolve_filter):
        assert function(None) == -1
        assert function((ctypes.c_uint8 * 200)()) == -1
