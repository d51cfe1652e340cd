from __future__ import annotations

import copy
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

TILES = (2, 3, 4, 5, 6, 7)
TOLERANCES = dict.fromkeys((0, *TILES), 1e-5) | {7: 1e-4}
"""Largest error with tiles of a side (0: what takes the least time, here never 7), relative to the norm of the result
for absolute values: several times what is seen, and far below a wrong tile's."""


def convolve_and_differentiate(
    images: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, padding: int
) -> list[Tensor]:
    """Computes output and gradients of the images and the filters by torch in float64."""
    x, w, g = (one.detach().double().requires_grad_() for one in (images, weight, grad))
    out = F.conv2d(x, w, None if bias is None else bias.double(), padding=padding)
    return [out.detach(), *torch.autograd.grad(out, (x, w), g)]


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_with_float64(images: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tile: int) -> None:
    """Compares output and gradients with torch's convolution in float64."""
    height, width = (side + 2 * padding - 2 for side in images.shape[2:])
    grad = torch.randn(len(images), len(weight), height, width)
    found = [
        native.convolve(images, weight, bias, padding=padding, tile=tile),
        native.compute_input_gradient(grad, weight, padding=padding, tile=tile),
        native.compute_weight_gradient(grad, images, weight, padding=padding, tile=tile),
    ]
    assert found[2].stride() == weight.stride()
    exact = convolve_and_differentiate(images, weight, bias, grad, padding)
    # A result may be near zero by chance; this one is not.
    largest = convolve_and_differentiate(
        images.abs(), weight.abs(), None if bias is None else bias.abs(), grad.abs(), padding
    )
    for ours, expected, scale in zip(found, exact, largest, strict=True):
        assert ours.shape == expected.shape
        error = float((ours - expected).norm() / scale.norm())
        assert error <= TOLERANCES[tile], f"{error:.1e}"


@given(
    n=st.integers(1, 9),
    channels=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    side=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    padding=st.integers(0, 2),
    tile=st.sampled_from([0, *TILES]),
    is_channels_last=st.booleans(),
    has_bias=st.booleans(),
    threads=st.sampled_from([1, 3]),
)
def test_any_shape_is_convolved_as_in_float64(
    n: int,
    channels: tuple[int, int],
    side: tuple[int, int],
    padding: int,
    tile: int,
    is_channels_last: bool,
    has_bias: bool,
    threads: int,
) -> None:
    torch.manual_seed(0)
    height, width = (max(one, 3 - 2 * padding) for one in side)
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    images = torch.randn(n, channels[0], height, width).contiguous(memory_format=layout)
    weight = torch.randn(channels[1], channels[0], 3, 3).contiguous(memory_format=layout)
    with use_threads(threads):
        compare_with_float64(images, weight, torch.randn(channels[1]) if has_bias else None, padding, tile)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_each_instruction_set_convolves_many_blocks_and_panels(isa: str) -> None:
    """More tiles than a block has, more channels than a chunk; the tests of one shape take the best set alone."""
    program = (
        "import torch\n"
        "from headway.data.native import describe_features\n"
        "from tests.model.test_winograd import compare_with_float64\n"
        "images, weight, bias = torch.randn(40, 72, 7, 7), torch.randn(136, 72, 3, 3), torch.randn(136)\n"
        "for tile in range(2, 8):\n"
        "    compare_with_float64(images, weight, bias, 1, tile)\n"
        "print(describe_features())\n"
    )
    environment = os.environ | {"HEADWAY_ISA": isa}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    if not done.stdout.startswith(isa):
        pytest.skip(f"this processor has no {isa}")


def test_large_tiles_are_for_many_images() -> None:
    """One tile of 7x7 takes the fewest products, but its filters take long to transform."""
    images, weight = torch.randn(300, 64, 7, 7), torch.randn(64, 64, 3, 3)
    for count, tile in ((300, 7), (30, 4)):
        some = images[:count]
        chosen, asked = (native.convolve(some, weight, None, padding=1, tile=one) for one in (0, tile))
        assert chosen.equal(asked), f"{count} images are convolved with other tiles than {tile}"


def test_threads_do_not_change_a_bit() -> None:
    images, weight = torch.randn(5, 24, 15, 15), torch.randn(40, 24, 3, 3)
    grad = torch.randn(5, 40, 15, 15)
    results = []
    for threads in (1, 2, 5):
        with use_threads(threads):
            results.append(
                (
                    native.convolve(images, weight, None, padding=1),
                    native.compute_input_gradient(grad, weight, padding=1),
                    native.compute_weight_gradient(grad, images, weight, padding=1),
                )
            )
    for one in results[1:]:
        assert all(torch.equal(found, first) for found, first in zip(one, results[0], strict=True))


def test_a_network_has_the_same_outputs_and_gradients() -> None:
    torch.manual_seed(0)
    plain = cifar_net(widths=(16, 24, 32), batchnorm_eps=0.1)
    model, changed = use_winograd(copy.deepcopy(plain))
    assert changed == [f"blocks.{block}.conv{number}" for block in range(3) for number in (1, 2)]
    assert list(model.state_dict()) == list(plain.state_dict())
    images = torch.randn(8, 3, 32, 32)
    outputs = [one(images) for one in (plain, model)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4 * float(outputs[0].detach().abs().max()))
    for one in outputs:
        one.square().sum().backward()
    for (name, left), right in zip(plain.named_parameters(), model.parameters(), strict=True):
        if not left.requires_grad:  # the whitening layer's filters
            continue
        assert left.grad is not None
        largest = float(left.grad.abs().max())
        torch.testing.assert_close(right.grad, left.grad, rtol=1e-3, atol=1e-3 * largest, msg=name)


def test_only_the_gradients_that_are_needed_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = use_winograd(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)))
    computed: list[str] = []
    for name in ("compute_input_gradient", "compute_weight_gradient"):
        function = getattr(native, name)
        monkeypatch.setattr(
            native,
            name,
            lambda *given, name=name, function=function, **more: computed.append(name) or function(*given, **more),
        )
    images = torch.randn(9, 16, 6, 6)
    model(images).sum().backward()
    assert computed == ["compute_weight_gradient"]
    model[0].weight.requires_grad_(False)
    model(images.requires_grad_()).sum().backward()
    assert computed == ["compute_weight_gradient", "compute_input_gradient"]
    assert model[0].bias.grad is not None


def test_a_gradient_can_be_differentiated() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3))
    model, changed = use_winograd(copy.deepcopy(plain))
    assert changed == ["0", "2"]
    images, products = torch.randn(9, 16, 6, 6), []
    for one in (plain, model):
        weights = list(one.parameters())
        first = torch.autograd.grad(one(images).square().sum(), weights, create_graph=True)
        products.append(torch.autograd.grad(sum(part.square().sum() for part in first), weights))
    for left, right in zip(*products, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-3, atol=1e-3 * float(left.abs().max()))


def test_torch_differentiates_where_the_core_cannot() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 16, 3, padding=1)
    model, _ = use_winograd(copy.deepcopy(nn.Sequential(conv)))
    images, grads = torch.randn(9, 16, 6, 6, requires_grad=True), torch.randn(3, 9, 16, 6, 6)
    batches = [torch.autograd.grad(one(images), images, grads, is_grads_batched=True)[0] for one in (conv, model)]
    torch.testing.assert_close(batches[1], batches[0], rtol=1e-4, atol=1e-4)
    totals = []
    for one in (conv, model):
        out = one(images)
        with MultiplyAddCounter() as counter:
            out.sum().backward()
        totals.append(counter.total)
    assert totals[0] == totals[1] > 0, "operations of a backward pass are counted"


def test_only_plain_3x3_convolutions_change() -> None:
    class Own(nn.Conv2d):
        """A subclass, whatever it adds."""

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
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(16, 16, 3)),
    ]
    same, changed = use_winograd(nn.ModuleList(kept))
    assert changed == []
    assert list(same) == kept
    same[-1](torch.randn(1, 16, 3, 3))
    root, changed = use_winograd(nn.Conv2d(16, 16, 3, padding=2))
    assert (type(root), changed) == (WinogradConv2d, [""])
    with torch.device("meta"):
        assert len(use_winograd(resnet50())[1]) == 13, "of 16, three have a stride"


def test_torch_convolves_where_the_core_cannot() -> None:
    conv = nn.Conv2d(16, 16, 3, padding=1)
    model, _ = use_winograd(copy.deepcopy(nn.Sequential(conv)))
    images = torch.randn(9, 16, 6, 6)
    for layer in (conv, model):
        layer.double()
    assert torch.equal(model(images.double()), conv(images.double()))
    for layer in (conv, model):
        layer.float()
    assert not torch.equal(model(images), conv(images)), "here the core convolves"
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(images), conv(images))
    assert torch.equal(model(images[:7]), conv(images[:7])), "few tiles"
    assert model(images[:0]).shape == (0, 16, 6, 6)
    with MultiplyAddCounter() as counter:
        model(images)
    assert counter.total > 0, "operations are still counted"
    exported = torch.export.export(model.eval(), (images,)).module()
    assert torch.equal(exported(images), conv(images))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), conv(images))
    assert torch.equal(torch.func.vmap(model)(images[:, None])[:, 0], torch.func.vmap(conv)(images[:, None])[:, 0])
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(model(images), conv(images)), "there torch knows the forward derivative"
    with torch.device("meta"):
        assert model(images).device == images.device, "another default device"
    with pytest.raises(RuntimeError, match="to have 16 channels"):
        model(images[:, :4])
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        use_winograd(nn.Conv2d(16, 16, 3))[0](torch.randn(1, 16, 2, 2))


FITTING = (torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3), None)


def test_subclasses_of_tensors_see_torchs_operation() -> None:
    seen: list[object] = []

    class Watched(Tensor):
        """Allows nothing but the convolution: not even the question for its device."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            assert func in (torch.conv2d, F.conv2d)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    model, _ = use_winograd(nn.Conv2d(16, 16, 3, padding=1))
    images = torch.randn(9, 16, 6, 6)
    model(images.as_subclass(Watched))
    assert seen
    seen.clear()
    weight = model.weight.detach().as_subclass(Watched)
    torch.func.functional_call(model, {"weight": weight}, (images,))
    assert seen


@pytest.mark.parametrize(
    ("images", "weight", "bias"),
    [
        (FITTING[0], torch.randn(4, 5, 3, 3), None),
        (FITTING[0], torch.randn(4, 4, 5, 5), None),
        (FITTING[0].double(), FITTING[1], None),
        (FITTING[0][0], FITTING[1], None),
        (torch.randn(1, 4, 1, 1), FITTING[1], None),
        (*FITTING[:2], torch.randn(3)),
        (*FITTING[:2], torch.randn(4).double()),
    ],
)
def test_tensors_that_do_not_fit_are_refused(images: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert native.convolve(*FITTING, padding=0).shape == (1, 4, 3, 3)
    with pytest.raises(UsageError, match="cannot convolve"):
        native.convolve(images, weight, bias, padding=0)


@pytest.mark.parametrize(
    ("grad", "images", "weight", "padding"),
    [
        (torch.randn(1, 5, 3, 3), *FITTING[:2], 0),
        (torch.randn(4, 3, 3), *FITTING[:2], 0),
        (torch.randn(1, 4, 3, 3).double(), *FITTING[:2], 0),
        (torch.randn(1, 4, 3, 3), FITTING[0], torch.randn(4, 4, 5, 5), 0),
        (torch.randn(1, 4, 3, 3), FITTING[0], torch.randn(4), 0),
        (torch.randn(1, 4, 9, 9), *FITTING[:2], 3),
    ],
)
def test_gradients_that_do_not_fit_are_refused(grad: Tensor, images: Tensor, weight: Tensor, padding: int) -> None:
    with pytest.raises(UsageError, match="cannot convolve"):
        native.compute_input_gradient(grad, weight, padding=padding)
    with pytest.raises(UsageError, match="cannot convolve"):
        native.compute_weight_gradient(grad, images, weight, padding=padding)


@pytest.mark.parametrize(
    ("grad", "images"),
    [
        (torch.randn(1, 4, 4, 3), FITTING[0]),
        (torch.randn(2, 4, 3, 3), FITTING[0]),
        (torch.randn(1, 4, 3, 3), torch.randn(1, 5, 5, 5)),
        (torch.randn(1, 4, 3, 3), FITTING[0][0]),
        (torch.randn(1, 4, 3, 3), FITTING[0].double()),
    ],
)
def test_a_gradient_of_other_images_is_refused(grad: Tensor, images: Tensor) -> None:
    fitting = torch.randn(1, 4, 3, 3)
    assert native.compute_weight_gradient(fitting, *FITTING[:2], padding=0).shape == FITTING[1].shape
    with pytest.raises(UsageError, match="cannot convolve"):
        native.compute_weight_gradient(grad, images, FITTING[1], padding=0)


@pytest.mark.parametrize("tile", [-1, 1, 8])
def test_a_tile_of_another_size_is_refused(tile: int) -> None:
    with pytest.raises(UsageError, match="cannot convolve"):
        native.convolve(*FITTING, padding=0, tile=tile)


def test_a_wrong_structure_is_refused() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    for function in (library.hw_convolve, library.hw_convolve_filter):
        assert function(None) == -1
        assert function((ctypes.c_uint8 * 200)()) == -1
