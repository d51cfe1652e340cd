"""Operations on images that two processes share: ours, PyTorch's DTensor, and LBANN's DistConv if it can be imported.

Each is judged against one process.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional as F

from bench._parallel.forks import run_ranks
from headway.core.errors import HeadwayError
from headway.core.world import Membership, World
from headway.parallel.maps import SplitMap, cut
from headway.parallel.place import Place
from headway.parallel.strips import Strip, make_strip

RANKS, TIMEOUT_S = 2, 20.0
# Twelve rows divide evenly among strides and ranks; thirteen do not.
SAMPLES, CHANNELS, HEIGHTS, WIDTH = 2, 4, (12, 13), 10
RIGHT = 1e-10
VERDICTS = ("right", "refused", "wrong", "killed")

Operation = Callable[[Tensor, Any], Tensor]
Judge = Callable[[Operation, Tensor | None, int], str]


def make_weight(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def list_operations() -> dict[str, tuple[Operation, Tensor | None]]:
    """Sixteen operations of networks for images, and the weights of those that have some."""
    square, wide, point = make_weight(6, 4, 3, 3), make_weight(6, 4, 7, 7), make_weight(6, 4, 1, 1)
    even, depth, back = make_weight(6, 4, 2, 2), make_weight(4, 1, 3, 3), make_weight(4, 6, 3, 3)
    return {
        "conv 3x3": (lambda x, w: F.conv2d(x, w, padding=1), square),
        "conv 3x3, stride 2": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), square),
        "conv 7x7, stride 2": (lambda x, w: F.conv2d(x, w, stride=2, padding=3), wide),
        "conv 1x1, stride 2": (lambda x, w: F.conv2d(x, w, stride=2), point),
        "conv 3x3, dilation 2": (lambda x, w: F.conv2d(x, w, padding=2, dilation=2), square),
        "conv 2x2, stride 2": (lambda x, w: F.conv2d(x, w, stride=2), even),
        "conv 3x3, depthwise": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), depth),
        "transposed conv 3x3, stride 2": (
            lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1), back,
        ),
        "max pool 3x3, stride 2": (lambda x, _: F.max_pool2d(x, 3, 2, 1), None),
        "average pool 3x3": (lambda x, _: F.avg_pool2d(x, 3, 1, 1), None),
        "max pool 2x2, ceil_mode": (lambda x, _: F.max_pool2d(x, 2, ceil_mode=True), None),
        "batch norm": (lambda x, _: F.batch_norm(x, None, None, training=True), None),
        "group norm": (lambda x, _: F.group_norm(x, 2), None),
        "bilinear x 2": (lambda x, _: F.interpolate(x, scale_factor=2, mode="bilinear"), None),
        "global pooling": (lambda x, _: F.adaptive_avg_pool2d(x, 1), None),
        "pooling to 3 x 4": (lambda x, _: F.adaptive_avg_pool2d(x, (3, 4)), None),
    }  # fmt: skip


def compare_operations() -> dict[str, dict[str, list[str]]]:
    """What each way gives for each operation, by height: `right`, `wrong`, `refused`, or `killed` with its process."""
    ways = ["ours", "DTensor"]
    if find_spec("distconv") is not None:
        ways.append("DistConv")
    return {way: _judge_operations(way) for way in ways}


def _judge_operations(way: str) -> dict[str, list[str]]:
    cases = [(name, height) for name in list_operations() for height in HEIGHTS]
    # What kills its process must not take the verdicts of the others with it.
    together = [[case] for case in cases] if way == "DistConv" else [cases]
    found: dict[str, list[str]] = {name: [] for name, _ in cases}
    for some in together:
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(_run_rank, (way, folder, some), RANKS)
                parts = [json.loads((Path(folder) / str(rank)).read_text(encoding="utf-8")) for rank in range(RANKS)]
            except ProcessExitedException:
                parts = [["killed"] * len(some)]
        for (name, _), verdicts in zip(some, zip(*parts, strict=True), strict=True):
            found[name].append(max(verdicts, key=VERDICTS.index))
    return found


def _run_rank(rank: int, way: str, folder: str, cases: list[tuple[str, int]]) -> None:
    torch.set_num_threads(1)
    # DTensor warns of each implicit step.
    warnings.simplefilter("ignore")
    judge = {"ours": _judge_ours, "DTensor": _judge_dtensor, "DistConv": _judge_distconv}[way](rank, folder)
    operations = list_operations()
    verdicts = [judge(*operations[name], height) for name, height in cases]
    (Path(folder) / str(rank)).write_text(json.dumps(verdicts), encoding="utf-8")


def make_images(height: int) -> Tensor:
    generator = torch.Generator().manual_seed(height)
    return torch.randn(SAMPLES, CHANNELS, height, WIDTH, generator=generator, dtype=torch.float64)


def run_whole(operation: Operation, weight: Tensor | None, height: int) -> tuple[Tensor, Tensor]:
    """Returns outputs and gradients of the images, of the sum of squares, in one process."""
    images = make_images(height).requires_grad_()
    out = operation(images, weight)
    out.square().sum().backward()
    assert images.grad is not None
    return out.detach(), images.grad


def _judge_ours(rank: int, folder: str) -> Judge:
    store = dist.FileStore(f"{folder}/store", RANKS)
    membership = Membership(rank, RANKS, identities=["host"] * RANKS)
    world = World.create(store, membership, torch.device("cpu"), master="127.0.0.1", secret=b"bench", interface="lo")
    place = Place.create(world, (RANKS, 1))

    def judge(operation: Operation, weight: Tensor | None, height: int) -> str:
        out, grad = run_whole(operation, weight, height)
        split = cut(make_images(height), place)
        own = split.own.clone().requires_grad_()
        try:
            mine = operation(make_strip(SplitMap(own, split.part)), weight)
        except HeadwayError:
            return "refused"
        is_strip = isinstance(mine, Strip)
        values = mine.as_subclass(Tensor)
        values.square().sum().backward()
        expected = cut(out, place).own if is_strip else out[slice(*place.divide_samples(SAMPLES)[rank])]
        assert own.grad is not None
        pairs = ((values.detach(), expected), (own.grad, cut(grad, place).own))
        return "right" if all(a.shape == b.shape and torch.allclose(a, b, 0, RIGHT) for a, b in pairs) else "wrong"

    return judge


def _judge_dtensor(rank: int, folder: str) -> Judge:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    mesh = init_device_mesh("cpu", (RANKS,))

    def judge(operation: Operation, weight: Tensor | None, height: int) -> str:
        out, grad = run_whole(operation, weight, height)
        images = distribute_tensor(make_images(height), mesh, [Shard(2)]).requires_grad_()
        # Whole on every rank, as data parallel weights are.
        shared = None if weight is None else distribute_tensor(weight, mesh, [Replicate()])
        try:
            mine = operation(images, shared)
        except Exception:
            return "refused"
        # Without an error, everything counts: an error in the backward pass is one of a result that was given.
        try:
            whole = mine.full_tensor().detach()
            mine.square().sum().backward()
            assert images.grad is not None
            pairs = ((whole, out), (images.grad.full_tensor(), grad))
        except Exception:
            return "wrong"
        return "right" if all(a.shape == b.shape and torch.allclose(a, b, 0, RIGHT) for a, b in pairs) else "wrong"

    return judge


def _judge_distconv(rank: int, folder: str) -> Judge:
    from distconv import DCTensor, ParallelStrategy

    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    strategy = ParallelStrategy(num_shards=RANKS, shard_dim=2, device_type="cpu")

    def judge(operation: Operation, weight: Tensor | None, height: int) -> str:
        out, grad = run_whole(operation, weight, height)
        images = DCTensor.distribute(make_images(height), strategy).requires_grad_()
        try:
            mine = operation(images, weight)
        except Exception:
            return "refused"
        # As DTensor: without an error, everything counts.
        try:
            whole = mine.to_replicate().detach()
            mine.square().sum().backward()
            assert images.grad is not None
            pairs = ((whole, out), (images.grad.to_replicate(), grad))
        except Exception:
            return "wrong"
        return "right" if all(a.shape == b.shape and torch.allclose(a, b, 0, RIGHT) for a, b in pairs) else "wrong"

    return judge
