"""3x3 convolutions on a CPU in fp32 by Winograd's filtering (`winograd: true`) against PyTorch's own, side by side.

layers: forward, the gradient of the input and that of the filter, of the 3x3 convolutions of a network whose stride is
1, each shape once. They take turns; ratios are computed within a round.

winograd_layers_NETWORK   PyTorch's seconds over ours, sum of all shapes, forward and backward
winograd_limit_NETWORK    seconds of the matrix products alone, by torch.bmm, over ours; above 1, ours are faster
winograd_error_NETWORK    largest relative error of a result against float64 (2-norm); beside it, PyTorch's
winograd_error_6_NETWORK  the same with tiles of 2x2 to 6x6 in every layer

networks: forward and backward pass of the whole network, channels last.

winograd_NETWORK          PyTorch's seconds over ours
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench._common import Claim, add_only, median, parser, run_parts, table, take_turns
from bench._family import run_bench
from headway.core.malloc import keep_freed_memory
from headway.model import cifar_net, native, resnet18, use_winograd
from headway.model.winograd import WinogradConv2d

aten = torch.ops.aten
ROUNDS = 9
TILES = (2, 3, 4, 5, 6, 7)
"""Sides of the core's tiles, in outputs."""

RESULTS = ("forward", "input", "filter")
"""Those of a layer: its output, and the gradients of its input and its filter."""


@dataclass(frozen=True)
class Network:
    """A network, and the images it gets."""

    build: Callable[[], nn.Module]
    side: int
    batch: int


NETWORKS = {"cifar_net": Network(cifar_net, 32, 256), "resnet18": Network(resnet18, 224, 8)}


@dataclass(frozen=True)
class Shape:
    """A convolution with padding 1."""

    inputs: int
    outputs: int
    side: int


def make_images(batch: int, channels: int, side: int) -> Tensor:
    return torch.randn(batch, channels, side, side).contiguous(memory_format=torch.channels_last)


def list_shapes(network: Network) -> list[Shape]:
    """Lists the shapes of the convolutions that use Winograd's filtering, in order, each once."""
    with torch.device("meta"):
        model, _ = use_winograd(network.build())
        found: list[Shape] = []
        for module in model.modules():
            if isinstance(module, WinogradConv2d):
                module.register_forward_pre_hook(
                    lambda layer, given: found.append(
                        Shape(layer.in_channels, layer.out_channels, given[0].shape[2])  # type: ignore[arg-type]
                    )
                )
        model(torch.empty(1, 3, network.side, network.side))
    return list(dict.fromkeys(found))


Calls = dict[str, Callable[[], object]]


def find_tile(inputs: int, outputs: int, side: int, batch: int) -> int:
    """Finds the side of the tiles that the core chooses: those with the same result, bit for bit."""
    images, weight = make_images(batch, inputs, side), torch.randn(outputs, inputs, 3, 3)
    chosen = native.convolve(images, weight, None, padding=1)
    return next(one for one in TILES if native.convolve(images, weight, None, padding=1, tile=one).equal(chosen))


def find_tiles(shape: Shape, batch: int) -> dict[str, int]:
    """Finds the side of the tiles of each of a layer's three results."""
    forward = find_tile(shape.inputs, shape.outputs, shape.side, batch)
    # The gradient of the input is a convolution from output channels to input channels, with transforms of other sizes.
    return {
        "forward": forward,
        "input": find_tile(shape.outputs, shape.inputs, shape.side, batch),
        "filter": forward,
    }


def list_calls(shape: Shape, batch: int, tiles: Mapping[str, int]) -> dict[str, Calls]:
    """Lists the calls of a layer's three results, by both arms, and by the products alone, of the same sizes."""
    images, grad = make_images(batch, shape.inputs, shape.side), make_images(batch, shape.outputs, shape.side)
    weight = torch.randn(shape.outputs, shape.inputs, 3, 3).contiguous(memory_format=torch.channels_last)

    def make_operands(result: str) -> tuple[Tensor, Tensor, Tensor]:
        tile = tiles[result]
        points, count = (tile + 2) ** 2, batch * (-(-shape.side // tile)) ** 2
        inputs, outputs = (torch.randn(points, count, n) for n in (shape.inputs, shape.outputs))
        return inputs, outputs, torch.randn(points, shape.inputs, shape.outputs)

    def differentiate(*wanted: bool) -> Tensor:
        settings = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [*wanted, False])
        found = aten.convolution_backward(grad, images, weight, *settings)
        return found[0 if wanted[0] else 1]

    inputs, outputs, filters = make_operands("forward")
    _, input_outputs, input_filters = make_operands("input")
    return {
        "forward": {
            "torch": lambda: F.conv2d(images, weight, padding=1),
            "ours": lambda: native.convolve(images, weight, None, padding=1),
            "products": lambda: torch.bmm(inputs, filters),
        },
        "input": {
            "torch": lambda: differentiate(True, False),
            "ours": lambda: native.compute_input_gradient(grad, weight, padding=1),
            "products": lambda: torch.bmm(input_outputs, input_filters.transpose(1, 2)),
        },
        "filter": {
            "torch": lambda: differentiate(False, True),
            "ours": lambda: native.compute_weight_gradient(grad, images, weight, padding=1),
            "products": lambda: torch.bmm(inputs.transpose(1, 2), outputs),
        },
    }


def measure_errors(shape: Shape, batch: int) -> tuple[dict[int, dict[str, float]], float]:
    """Returns the relative errors of the three results by the side of the tiles, and PyTorch's largest."""
    images, grad = (make_images(batch, n, shape.side) for n in (shape.inputs, shape.outputs))
    weight = torch.randn(shape.outputs, shape.inputs, 3, 3)

    def run(*given: Tensor) -> list[Tensor]:
        x, w, g = (one.detach().requires_grad_() for one in given)
        out = F.conv2d(x, w, padding=1)
        return [out.detach(), *torch.autograd.grad(out, (x, w), g)]

    exact = run(images.double(), weight.double(), grad.double())

    def compute_errors(found: list[Tensor]) -> list[float]:
        return [float((one - right).norm() / right.norm()) for one, right in zip(found, exact, strict=True)]

    ours = {
        tile: [
            native.convolve(images, weight, None, padding=1, tile=tile),
            native.compute_input_gradient(grad, weight, padding=1, tile=tile),
            native.compute_weight_gradient(grad, images, weight, padding=1, tile=tile),
        ]
        for tile in TILES
    }
    by_tile = {tile: dict(zip(RESULTS, compute_errors(found), strict=True)) for tile, found in ours.items()}
    return by_tile, max(compute_errors(run(images, weight, grad)))


def bench_layers(folder: Path, options: argparse.Namespace) -> list[Claim]:
    del folder
    claims = []
    for name, network in NETWORKS.items():
        rounds, batch = (2, 2) if options.quick else (ROUNDS, network.batch)
        rows = [("channels", "side", "tile", "result", "torch ms", "ours ms", "products ms", "torch over ours")]
        sums = {arm: [0.0] * rounds for arm in ("torch", "ours", "products")}
        tiles = {shape: find_tiles(shape, batch) for shape in list_shapes(network)}
        for shape in tiles:
            for result, calls in list_calls(shape, batch, tiles[shape]).items():
                taken = take_turns(calls, rounds, warm=1)
                for arm, times in taken.items():
                    sums[arm] = [a + b for a, b in zip(sums[arm], times, strict=True)]
                middle = {arm: median(times)[0] for arm, times in taken.items()}
                shown = [f"{1e3 * value:.1f}" for value in middle.values()]
                ratio = median(divide(taken["torch"], taken["ours"]))[0]
                layer = (f"{shape.inputs} to {shape.outputs}", str(shape.side), str(tiles[shape][result]))
                rows.append((*layer, result, *shown, f"{ratio:.2f}"))
        print(f"{name}, {batch} images, {torch.get_num_threads()} threads")
        table(rows)
        errors = {shape: measure_errors(shape, batch) for shape in tiles}
        for kind, against in (("layers", "torch"), ("limit", "products")):
            claims.append(claim(f"winograd_{kind}_{name}", divide(sums[against], sums["ours"])))
        theirs = f"PyTorch's {max(error for _, error in errors.values()):.2g}; largest of {len(tiles)} shapes"
        chosen = [errors[shape][0][tile][result] for shape in tiles for result, tile in tiles[shape].items()]
        claims.append(Claim(f"winograd_error_{name}", max(chosen), "", theirs))
        small = [error for ours, _ in errors.values() for tile in TILES[:-1] for error in ours[tile].values()]
        claims.append(Claim(f"winograd_error_{TILES[-2]}_{name}", max(small), "", f"{len(tiles)} shapes"))
    return claims


def divide(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def claim(name: str, ratios: list[float]) -> Claim:
    middle, low, high = median(ratios)
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    return Claim(name, middle, "", f"median of {len(ratios)} rounds [{low:.3f}, {high:.3f}]; {threads}")


def bench_networks(folder: Path, options: argparse.Namespace) -> list[Claim]:
    del folder
    claims = []
    for name, network in NETWORKS.items():
        rounds, batch = (2, 2) if options.quick else (ROUNDS, network.batch)
        plain = network.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ours, _ = use_winograd(copy.deepcopy(plain))
        images = make_images(batch, 3, network.side)

        def step(model: nn.Module, images: Tensor = images) -> None:
            model(images).square().mean().backward()
            model.zero_grad()

        arms: Calls = {"torch": partial(step, plain), "ours": partial(step, ours)}
        taken = take_turns(arms, rounds, warm=1)
        claims.append(claim(f"winograd_{name}", divide(taken["torch"], taken["ours"])))
    return claims


PARTS = {"layers": bench_layers, "networks": bench_networks}


def main() -> None:
    asked = parser(__doc__ or "")
    add_only(asked, PARTS)
    options = asked.parse_args()
    if not native.is_available():
        print("The native core is not built: nothing to measure.")
        sys.exit(0)
    # As every training does: otherwise the kernel zeroes the pages of every output anew.
    keep_freed_memory()
    run_parts(PARTS, options)


if __name__ == "__main__":
    run_bench(main)
