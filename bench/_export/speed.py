"""What an exported network costs beside eager PyTorch: CPU seconds of one thread.

Whole pipelines, uint8 pixels in, probabilities out, random weights. All engines are in one process and take turns; CPU
time is that of all threads of the process, so that an engine with a helping thread gains nothing by it. ONNX Runtime's
threads do not spin. Eager is the network as PyTorch builds it (NCHW); eager with channels last stands beside it, since
a part of what a graph gains is the layout alone.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench._common import Claim, median, table
from bench._export.engines import (
    EAGER,
    INT8,
    LAST,
    RUNTIME,
    VINO,
    Arms,
    list_versions,
    open_onnx,
    open_openvino,
    open_torch,
    read_flags,
    write_int8,
    write_model,
)
from bench._export.networks import build_random
from headway.doctor.environment_builds import INT8 as INT8_FLAGS

ROUNDS, TURN_S = 7, 0.3
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Case:
    """A network with the side of its images."""

    name: str
    side: int
    classes: int
    batches: tuple[int, ...] = (1, 32)


CIFAR = Case("cifar_resnet", 32, 10)
SMALL = Case("resnet18", 64, 10)
LARGE = Case("resnet18", 224, 1000)


def compare_speed(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Measures all cases, prints the table, and returns the claims `ort_vs_eager_...` and `int8_vs_eager_bs32`."""
    print(f"Engines: {', '.join(list_versions())}; spinning of ONNX Runtime off; one thread.")
    cases, rounds, turn_s = (CIFAR, SMALL, LARGE), ROUNDS, TURN_S
    if options.quick:
        cases, rounds, turn_s = (CIFAR,), 2, 0.05
    before = torch.get_num_threads()
    found: dict[tuple[Case, int], dict[str, list[float]]] = {}
    try:
        for number, case in enumerate(cases):
            found |= measure_case(case, folder / str(number), rounds, turn_s, quick=options.quick)
    finally:
        torch.set_num_threads(before)
    rows = [("network", "batch", "engine", "CPU ms a call", "over eager (95 %)", "over channels last")]
    for (case, batch), times in found.items():
        for name, own in times.items():
            gains = [format_interval(compare(times, base, name)) for base in (EAGER, LAST)]
            label = f"{case.name} {case.side}"
            rows.append((label, str(batch), name, f"{1e3 * statistics.median(own):.3f}", *gains))
    table(rows)
    return list(build_claims(found, rounds))


def measure_case(
    case: Case, folder: Path, rounds: int, turn_s: float, *, quick: bool = False
) -> dict[tuple[Case, int], dict[str, list[float]]]:
    """Returns CPU seconds of a call by (case, batch), engine and round."""
    model = write_model(build_random(case.name, case.side, classes=case.classes), folder)
    shape = (max(case.batches), case.side, case.side, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    quantised = write_int8(model, pixels)
    sessions = {
        EAGER: open_torch(build_random(case.name, case.side, classes=case.classes)),
        LAST: open_torch(build_random(case.name, case.side, classes=case.classes), channels_last=True),
        RUNTIME: open_onnx(model),
        VINO: open_openvino(model),
        INT8: open_onnx(quantised),
    }
    with Arms(sessions) as arms:
        return {
            (case, batch): arms.take_turns(pixels[:batch], rounds, turn_s)
            for batch in (case.batches[:1] if quick else case.batches)
        }


def compare(times: dict[str, list[float]], base: str, name: str) -> Interval:
    """Returns the median of the ratios within a round, and its interval."""
    return median([a / b for a, b in zip(times[base], times[name], strict=True)])


def format_interval(interval: Interval) -> str:
    """Returns `1.85 [1.80, 1.90]`."""
    middle, low, high = interval
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def build_claims(found: dict[tuple[Case, int], dict[str, list[float]]], rounds: int) -> list[Claim]:
    """Builds the claims that the cases measured allow."""
    claims = []
    single = (("ort_vs_eager_resnet18_bs1", LARGE), ("ort_vs_eager_cifar_resnet_bs1", CIFAR))
    for name, case in single:
        if (times := found.get((case, 1))) is not None:
            interval, last = compare(times, EAGER, RUNTIME), compare(times, LAST, RUNTIME)
            how = f"CPU seconds of eager over ONNX Runtime, one thread, {rounds} rounds; 95 % "
            how += f"[{interval[1]:.2f}, {interval[2]:.2f}]; over channels last {last[0]:.2f}"
            claims.append(Claim(name, interval[0], "", how))
    for name, engine in (("ort_vs_eager_bs32", RUNTIME), ("int8_vs_eager_bs32", INT8)):
        gains = {case: compare(times, EAGER, engine) for (case, batch), times in found.items() if batch == 32}
        if not gains:
            continue
        worst = min(gains, key=lambda case: gains[case][0])
        each = ", ".join(f"{case.name} {case.side}: {format_interval(gain)}" for case, gain in gains.items())
        how = f"the least of the networks: {each}"
        if engine == INT8:
            how += f"; the processor has {'' if read_flags() & INT8_FLAGS else 'no '}int8 units"
        claims.append(Claim(name, gains[worst][0], "", how))
    return claims
