"""Every network of `headway.model` in every engine: the answers must be those of eager PyTorch.

The networks know digits (bench/_export/networks.py). The 597 evaluation images go through each engine in batches of 64,
and the first 64 of them in batches of 1, 2, 3 and 7 too, one thread. No answer may differ, and top-1 and top-5 must be
equal to 8 decimals. AOTInductor compiles for a minute or more, so it has some of the networks only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench._common import Claim, table
from bench._export.engines import list_versions, open_onnx, open_openvino, open_torch, run_all, write_model
from bench._export.networks import NETWORKS, Network, build_known, split_digits
from headway.export.targets.aoti import AotiTarget
from headway.export.targets.target import Session
from headway.export.top_classes import compute_top_share

BATCHES = (1, 2, 3, 7, 64)
AHEAD_OF_TIME = ("small_net", "cifar_net", "cifar_resnet", "resnet18")
"""Networks that AOTInductor compiles too."""


@dataclass(frozen=True)
class Outcome:
    """One network in one engine, against eager PyTorch."""

    network: str
    engine: str
    top1: float
    top5: float
    delta1: float
    delta5: float
    flips: int
    difference: float

    @property
    def is_exact(self) -> bool:
        """True if no answer and no share differs."""
        return not self.flips and not self.delta1 and not self.delta5


def compare_networks(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Compares all networks, prints the table, and returns `export_every_network` and `export_flips`."""
    before, outcomes = torch.get_num_threads(), list[Outcome]()
    torch.set_num_threads(1)
    names = ("small_net", "gru") if options.quick else tuple(one.name for one in NETWORKS)
    try:
        for network in (one for one in NETWORKS if one.name in names):
            print(f"{network.name}, {network.side} pixels", file=sys.stderr)
            compiles = network.name in AHEAD_OF_TIME and not options.quick
            outcomes += compare_network(network, folder / network.name, compiles=compiles)
    finally:
        torch.set_num_threads(before)
    head = ("network", "engine", "top-1", "top-5", "delta top-1", "delta top-5", "flips", "max difference")
    rows: list[Sequence[str]] = [head]
    for one in outcomes:
        shares = [f"{value + 0.0:.8f}" for value in (one.top1, one.top5, one.delta1, one.delta5)]
        rows.append((one.network, one.engine, *shares, str(one.flips), f"{one.difference:.1e}"))
    print(f"Engines: {', '.join(list_versions())}; batches {', '.join(map(str, BATCHES))}; one thread.")
    table(rows)
    how = f"share of {len(outcomes)} pairs of {len(names)} networks and engines with 0 flips and equal top-1 and top-5"
    how += f"; AOTInductor: {', '.join(name for name in AHEAD_OF_TIME if name in names) or 'none'}"
    exact = sum(one.is_exact for one in outcomes) / len(outcomes)
    flips = float(sum(one.flips for one in outcomes))
    return [
        Claim("export_every_network", exact, "", how),
        Claim("export_flips", flips, "", "changed answers of all pairs and batches, among 597 digits"),
    ]


def compare_network(
    network: Network, folder: Path, *, compiles: bool = False, images: int | None = None
) -> list[Outcome]:
    """Compares the engines of one network with eager PyTorch.

    Args:
        compiles: whether AOTInductor is one of them.
        images: number of evaluation images; None: all.
    """
    pipeline = build_known(network.name)
    _, pixels, labels = split_digits(network)
    pixels, labels = pixels[:images], labels[:images]
    model = write_model(pipeline, folder)
    engines: dict[str, Callable[[], Session]] = {
        "ONNX Runtime": lambda: open_onnx(model),
        "OpenVINO f32": lambda: open_openvino(model),
    }
    if compiles:
        AotiTarget().build(pipeline, folder, None)  # type: ignore[arg-type]  # it needs nothing of the run
        engines["AOTInductor"] = lambda: AotiTarget().load(folder, 1)
    with closing(open_torch(pipeline)) as eager:
        reference = run_all(eager, pixels, 64)
    return list(_compare_engines(network.name, engines, pixels, labels, reference))


def _compare_engines(
    name: str,
    engines: dict[str, Callable[[], Session]],
    pixels: NDArray[np.uint8],
    labels: NDArray[np.int64],
    reference: NDArray[np.float32],
) -> Iterator[Outcome]:
    expected = [compute_top_share(reference, labels, count) for count in (1, 5)]
    for engine, load in engines.items():
        flips, difference = 0, 0.0
        shares = expected
        with closing(load()) as session:
            for batch in BATCHES:
                outputs = run_all(session, pixels if batch == BATCHES[-1] else pixels[:64], batch)
                base = reference[: len(outputs)]
                flips += int((outputs.argmax(1) != base.argmax(1)).sum())
                difference = max(difference, float(np.abs(outputs - base).max()))
                if batch == BATCHES[-1]:
                    shares = [compute_top_share(outputs, labels, count) for count in (1, 5)]
        yield Outcome(name, engine, *shares, shares[0] - expected[0], shares[1] - expected[1], flips, difference)
