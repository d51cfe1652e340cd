"""The deck's inference tables, measured here: with and without oneDNN (the deck's MKL-DNN), accuracy, TensorRT.

- E03: latency at batch 1 and images/s at batch 128 of 14 networks, on 72 virtual CPUs of a c5.18xlarge, MXNet 1.3.
- E04: top-1 and top-5 of 17 networks with and without MKL-DNN, on ImageNet; every difference is 0.00000000.
- E05: what TensorRT gains, on an NVIDIA GPU.

`headway.model` has some of these networks, as PyTorch modules with random weights: speed does not depend on them. Time
is CPU time of all threads, arms interleaved: images are made. Instead of batch 128 it is 32, which costs as much an
image and does not need the deck's memory. The accuracy is that of networks whose last layer is
fitted to scikit-learn's digits (bench/_export/networks.py), as there are no weights for ImageNet here. Each row has a
verdict; a row that cannot be measured says what is missing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from bench._common import Claim
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
from headway.core.cpu_count import count_usable_cores
from headway.export.deck import ACCURACY, HELD, SIDE, TENSORRT, WHY_LESS, read_deck
from headway.export.top_classes import compute_top_share

LARGE_BATCH, FITTED = 32, 400

WITH, WITHOUT, LAST = "with", "without", "with, channels last"


def compare_deck(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Measures all three tables, prints them as Markdown, and returns claims about them."""
    threads = 1 if options.quick else count_usable_cores()
    before = torch.get_num_threads()
    try:
        speed, claims = measure_speed(quick=options.quick, threads=threads)
        accuracy, more = measure_accuracy(quick=options.quick)
        engines = measure_engines(folder, quick=options.quick)
    finally:
        torch.set_num_threads(before)
    print(
        f"Engines: {', '.join(list_versions())}; {threads} threads; flags {', '.join(sorted(read_flags() & SHOWN))}\n"
    )
    for title, rows in (("E03", speed), ("E04", accuracy), ("E05", engines)):
        print(f"### {title}\n")
        print(format_markdown(rows))
    return [*claims, *more]


SHOWN = frozenset({"avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile"})


def format_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows, the first of them the heading, as a table of Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:], ""])


def measure_speed(*, quick: bool, threads: int) -> tuple[list[tuple[str, ...]], list[Claim]]:
    """Measures E03: the networks of the deck with and without oneDNN."""
    head = (
        "network",
        "deck, ms at 1",
        "deck, images/s at 128",
        "here, CPU ms at 1",
        f"here, CPU ms an image at {LARGE_BATCH}",
    )
    rows: list[tuple[str, ...]] = [(*head, f"gain at 1, at {LARGE_BATCH}; channels last", "verdict")]
    claims, measured = list[Claim](), dict[str, tuple[float, float]]()
    for row in read_deck():
        deck = (f"{row.without_ms:g} → {row.with_ms:g} ({row.gains[0]:.1f}x)",)
        deck += (f"{row.without_images_s:g} → {row.with_images_s:g} ({row.gains[1]:.1f}x)",)
        if not row.factory:
            missing = "not measurable here: headway.model has no such network"
            rows.append((row.network, *deck, "-", "-", "-", missing))
            continue
        print(f"{row.network}, with and without oneDNN", file=sys.stderr)
        times = measure_network(row.factory, quick=quick, threads=threads)
        measured[row.factory] = gains = tuple(one[WITHOUT] / one[WITH] for one in times)  # type: ignore[assignment]
        last = [one[WITHOUT] / one[LAST] for one in times]
        cells = [f"{1e3 * one[WITHOUT]:.1f} → {1e3 * one[WITH]:.1f}" for one in times]
        shown = f"{gains[0]:.2f}, {gains[1]:.2f}; {last[0]:.2f}, {last[1]:.2f}"
        rows.append((row.network, *deck, *cells, shown, judge_gains(row.gains, gains)))
    for factory, gains in measured.items():
        how = "CPU seconds without oneDNN over those with it, eager PyTorch, 224 pixels"
        claims.append(Claim(f"onednn_gain_{factory}_bs1", gains[0], "", how))
        claims.append(Claim(f"onednn_gain_{factory}_bs32", gains[1], "", how))
    return rows, claims


def measure_network(factory: str, *, quick: bool, threads: int) -> list[dict[str, float]]:
    """Returns median CPU seconds an image by arm, at batch 1 and at a large batch."""
    sides, rounds = (64, 2) if quick else (SIDE, 3)
    sides = max(sides, 72) if factory == "alexnet" else sides
    found = []
    for batch in (1, 4 if quick else LARGE_BATCH):
        pixels = np.random.default_rng(0).integers(0, 256, (batch, sides, sides, 3), np.uint8)
        times: dict[str, list[float]] = {WITH: [], WITHOUT: [], LAST: []}
        # oneDNN is turned off for the whole process, so only one session is open at a time.
        for number in range(rounds):
            names = list(times)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                pipeline = build_random(factory, sides)
                with closing(
                    open_torch(pipeline, channels_last=name == LAST, onednn=name != WITHOUT, threads=threads)
                ) as session:
                    arms = Arms({name: session})
                    times[name] += arms.take_turns(pixels, 1, 0.0 if quick else 0.5)[name]
        found.append({name: statistics.median(own) / batch for name, own in times.items()})
    return found


def judge_gains(deck: tuple[float, float], here: tuple[float, float]) -> str:
    """Returns the verdict about a row of E03."""
    held = [own >= HELD * gain for gain, own in zip(deck, here, strict=True)]
    if all(held):
        return "reproduced"
    if any(held):
        good, bad = (1, LARGE_BATCH) if held[0] else (LARGE_BATCH, 1)
        return f"reproduced at batch {good}, refuted here at {bad}: {WHY_LESS}"
    return f"refuted here: {WHY_LESS}"


def measure_accuracy(*, quick: bool) -> tuple[list[tuple[str, ...]], list[Claim]]:
    """Measures E04: top-1 and top-5 on digits with and without oneDNN."""
    rows: list[tuple[str, ...]] = [
        ("network", "top-1 without, with", "delta", "top-5 without, with", "delta", "flips", "verdict")
    ]
    worst = 0.0
    for label, name in ACCURACY[:1] + ACCURACY[5:6] if quick else ACCURACY:
        if not name:
            rows.append((label, *["-"] * 5, "not measurable here: headway.model has no such network, and no weights"))
            continue
        print(f"{label}, accuracy with and without oneDNN", file=sys.stderr)
        network = find_network(name)
        _, pixels, labels = split_digits(network)
        pixels, labels = (pixels[:64], labels[:64]) if quick else (pixels, labels)
        outputs = []
        for onednn in (False, True):
            with closing(open_torch(build_known(name, 64 if quick else FITTED), onednn=onednn)) as session:
                outputs.append(run_all(session, pixels, 64))
        flips = int((outputs[0].argmax(1) != outputs[1].argmax(1)).sum())
        cells, deltas = list[str](), list[float]()
        for count in (1, 5):
            without, own = (compute_top_share(one, labels, count) for one in outputs)
            deltas.append(own - without)
            cells += [f"{without:.8f}, {own:.8f}", f"{own - without + 0.0:.8f}"]
        worst = max(worst, *map(abs, deltas))
        verdict = "reproduced, on 597 digits" if not any(deltas) else "refuted here"
        rows.append((label, *cells, str(flips), verdict))
    how = "largest difference of top-1 or top-5 with and without oneDNN; digits, fitted heads"
    return rows, [Claim("onednn_accuracy_delta", worst, "", how)]


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
