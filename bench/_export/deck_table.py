"""The deck's inference tables, measured here: with and without oneDNN (the deck's MKL-DNN), accuracy, TensorRT.

- E03: latency at batch 1 and images/s at batch 128 of 14 networks, on 72 virtual CPUs of a c5.18xlarge, MXNet 1.3.
- E04: top-1 and top-5 of 17 networks with and without MKL-DNN, on ImageNet; every difference is 0.00000000.
- E05: what TensorRT gains, on an NVIDIA GPU.

The networks are PyTorch modules with random weights: speed does not depend on them (bench/_export/deck_networks.py).
Images are made. Time is CPU time of one thread, as threads that wait for each other on a busy machine take CPU time
too; arms take turns within a round. Instead of batch 128 it is 16, or 8 for the largest networks.

The accuracy is that of networks whose last layer is fitted to scikit-learn's digits (bench/_export/networks.py), as
there are no weights for ImageNet here.

Each measurement of E03 and E04 is kept in bench/results/inference.jsonl with the name of the machine, and a later call
makes those that this machine lacks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import closing
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from bench._accuracy.results import Results, commit, this_machine
from bench._common import Claim, use_one_thread
from bench._export.deck_networks import SPEED, DeckNetwork
from bench._export.deck_results import (
    LAST,
    RESULTS,
    WITH,
    WITHOUT,
    DeckResults,
    compute_deltas,
    format_accuracy,
    format_markdown,
    format_speed,
)
from bench._export.engines import (
    Arms,
    list_versions,
    open_onnx,
    open_openvino,
    open_torch,
    read_flags,
    run_all,
    write_int8,
    write_model,
)
from bench._export.networks import build_known, build_random, find_network, split_digits
from headway.export.deck import ACCURACY, SIDE, TENSORRT
from headway.export.table_engines import turn_onednn_off
from headway.export.targets.target import Session
from headway.export.top_classes import compute_top_share

ROUNDS, TURN_S, FITTED = 5, 0.5, 400
QUICK_SPEED, QUICK_ACCURACY = ("mobilenet", "dcgan"), ("mobilenet_0.25",)
SHOWN = frozenset({"avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile"})


def compare_deck(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Measures what is missing of all three tables, prints them as Markdown, and returns claims about them."""
    results = Results(folder / RESULTS.name if options.quick else RESULTS)
    print(f"Engines: {', '.join(list_versions())}; one thread; flags {', '.join(sorted(read_flags() & SHOWN))}\n")
    with use_one_thread():
        measure_speed(results, quick=options.quick)
        measure_accuracy(results, quick=options.quick)
        found = DeckResults(results, this_machine())
        for title, text in (("E03", format_speed(found)), ("E04", format_accuracy(found))):
            print(f"### {title}\n\n{text}")
        print(f"### E05\n\n{format_markdown(measure_engines(folder, quick=options.quick))}")
    return build_claims(found)


def build_claims(found: DeckResults) -> list[Claim]:
    """Builds the claims about the networks that were measured."""
    claims = []
    for name in SPEED:
        for record in found.find_speed(name):
            gain = record.compute_gain()
            how = f"CPU seconds without oneDNN over those with it, eager PyTorch; [{gain[1]:.2f}, {gain[2]:.2f}]"
            claims.append(Claim(f"onednn_gain_{name}_bs{record.batch}", gain[0], "", how))
    records = [record for _, name in ACCURACY if (record := found.find_accuracy(name)) is not None]
    worst = max((abs(delta) for record in records for delta in compute_deltas(record)), default=0.0)
    how = f"largest difference of top-1 or top-5 with and without oneDNN; digits, fitted heads, {len(records)} networks"
    return [*claims, Claim("onednn_accuracy_delta", worst, "", how)]


def measure_speed(results: Results, *, quick: bool) -> None:
    """Measures the networks of E03 that this machine lacks, with and without oneDNN; batch 1 first, which is cheap."""
    names = QUICK_SPEED if quick else tuple(SPEED)
    jobs = [(min(batch, 2) if quick else batch, name) for name in names for batch in SPEED[name].batches]
    for batch, name in sorted(jobs, key=lambda job: job[0]):
        key = {"table": "speed", "network": name, "machine": this_machine(), "batch": batch}
        if not results.where(**key):
            print(f"{name}, batch {batch}, with and without oneDNN", file=sys.stderr)
            with open_arms(SPEED[name]) as arms:
                seconds = time_batch(arms, SPEED[name].size, batch, quick=quick)
            results.add({**key, "seconds": seconds, "commit": commit()})


@final
class WithoutOneDnn(Session):
    """A session in PyTorch whose calls do without oneDNN."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        with turn_onednn_off():
            return self._session.run(pixels)

    def close(self) -> None:
        """Leaves the session to the arm that it belongs to."""


def open_arms(network: DeckNetwork) -> Arms:
    """Opens a network as the arms of E03. A network without images has no memory format."""
    plain = open_torch(network.build_pipeline())
    sessions: dict[str, Session] = {WITH: plain, WITHOUT: WithoutOneDnn(plain)}
    if network.normalises:
        sessions[LAST] = open_torch(network.build_pipeline(), channels_last=True)
    return Arms(sessions)


def time_batch(arms: Arms, size: tuple[int, int, int], batch: int, *, quick: bool) -> dict[str, list[float]]:
    """Returns CPU seconds of a call by arm and round."""
    pixels = np.random.default_rng(0).integers(0, 256, (batch, *size), np.uint8)
    return arms.take_turns(pixels, *((2, 0.0) if quick else (ROUNDS, TURN_S)))


def measure_accuracy(results: Results, *, quick: bool) -> None:
    """Measures the networks of E04 that this machine lacks: top-1 and top-5 on digits with and without oneDNN."""
    for label, name in ACCURACY:
        key = {"table": "accuracy", "network": name, "machine": this_machine()}
        if (quick and name not in QUICK_ACCURACY) or results.where(**key):
            continue
        print(f"{label}, accuracy with and without oneDNN", file=sys.stderr)
        _, pixels, labels = split_digits(find_network(name))
        pixels, labels = (pixels[:64], labels[:64]) if quick else (pixels, labels)
        session = open_torch(build_known(name, 64 if quick else FITTED))
        with closing(session):
            outputs = [run_all(one, pixels, 64) for one in (WithoutOneDnn(session), session)]
        shares = {f"top{count}": [compute_top_share(one, labels, count) for one in outputs] for count in (1, 5)}
        flips = int((outputs[0].argmax(1) != outputs[1].argmax(1)).sum())
        results.add({**key, **shares, "flips": flips, "commit": commit()})


def measure_engines(folder: Path, *, quick: bool) -> list[tuple[str, ...]]:
    """Measures the engines of this processor for the networks of E05, one thread, batch 1."""
    rows: list[tuple[str, ...]] = [
        ("network", "deck, TensorRT on", "deck", "here, ONNX Runtime", "OpenVINO f32", "int8", "verdict")
    ]
    known: dict[str, list[str]] = {}
    for label, name, device, gain in TENSORRT[1:2] if quick else TENSORRT:
        missing = "not measurable here: TensorRT needs an NVIDIA GPU"
        if not name:
            rows.append((label, device, f"{gain:g}x", "-", "-", "-", f"{missing}; headway.model has no such network"))
            continue
        if name not in known:
            print(f"{label}, engines", file=sys.stderr)
            known[name] = measure_gains(folder / name, name, quick=quick)
        rows.append((label, device, f"{gain:g}x", *known[name], f"{missing}; beside it, what this processor gains"))
    return rows


def measure_gains(folder: Path, name: str, *, quick: bool) -> list[str]:
    """Returns the gains of ONNX Runtime, OpenVINO and int8 over eager PyTorch, as text."""
    side = 32 if name == "cifar_resnet" else SIDE
    model = write_model(build_random(name, side), folder)
    pixels = np.random.default_rng(0).integers(0, 256, (16, side, side, 3), np.uint8)
    sessions = {
        "eager": open_torch(build_random(name, side)),
        "onnx": open_onnx(model),
        "openvino": open_openvino(model),
        "int8": open_onnx(write_int8(model, pixels)),
    }
    with Arms(sessions) as arms:
        times = arms.take_turns(pixels[:1], 2 if quick else 7, 0.02 if quick else 0.3)
    eager = statistics.median(times["eager"])
    return [f"{eager / statistics.median(times[one]):.2f}x" for one in ("onnx", "openvino", "int8")]
