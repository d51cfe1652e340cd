"""int8: static quantisation of model.onnx by ONNX Runtime; layers go back to fp32 until the gate holds.

Weights become 8-bit numbers with a scale for each channel (S8), activations with a scale for each tensor (U8). The
scales of activations come from calibration: the pipeline runs over training images, and the smallest and the largest
value of each tensor count. Normalisation and the task's head stay in fp32.
"""

from __future__ import annotations

import logging
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError, UsageError
from headway.doctor.environment_builds import VNNI
from headway.doctor.environment_host import HostFiles
from headway.export.calibration import Calibration, draw_calibration
from headway.export.gate_run import find_kind
from headway.export.pipeline import Pipeline
from headway.export.targets.int8_graph import LAYERS, CalibratedGraph
from headway.export.targets.onnx import MODEL, OnnxSession
from headway.export.targets.target import BuildContext, Session, Target
from headway.export.verdict import Verdict
from headway.setup.inputs import open_dataset

LOG = logging.getLogger("headway.export")
FILE = "int8.onnx"


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """How int8.onnx was made.

    Attributes:
        verdict: of the gate about the last try; None: nothing is judged.
        layers: number of layers with weights.
        in_fp32: names of those that went back to fp32, in this order.
        reduce_range: weights have 7 bits, for a processor whose 8-bit products saturate.
        tries: number of files that the gate judged.
    """

    verdict: Verdict | None
    layers: int
    in_fp32: tuple[str, ...]
    reduce_range: bool
    tries: int

    def to_json(self) -> dict[str, Any]:
        """Returns all but the verdict, by name."""
        return {
            "layers": self.layers,
            "in_fp32": list(self.in_fp32),
            "reduce_range": self.reduce_range,
            "tries": self.tries,
        }


@final
class Int8Target(Target):
    """The pipeline in 8 bits, run by ONNX Runtime on the CPU."""

    name, file, files, precision, after = "int8", FILE, (FILE,), "int8", "onnx"
    packages, build_packages = ("onnxruntime",), ("onnx",)

    def build(self, pipeline: Pipeline, folder: Path, context: BuildContext) -> Mapping[str, Any]:
        """Writes int8.onnx; see `Target.build`.

        Raises:
            UsageError: there are no training images, or they are those that the gate sees.
        """
        setup, gate = context.setup, context.gate
        calibration = _draw_from_training_set(context)

        def check(path: Path) -> Verdict:
            assert gate is not None
            with OnnxSession(path) as session:
                found = gate.check_all(session, self.precision)
            return next((verdict for verdict in found if not verdict.passed), found[-1])

        found = quantise(
            folder / MODEL,
            folder / FILE,
            calibration.images,
            kind=find_kind(setup.task, setup.target.kind, len(setup.target.classes)),
            check=None if gate is None else check,
            reduce_range=needs_reduced_range(HostFiles(Path("/"), os.environ).flags, platform.machine()),
            show=LOG.info,
        )
        return found.to_json() | {"calibration": calibration.to_json()}

    def load(self, folder: Path, threads: int | None = None) -> Session:
        """Loads int8.onnx; see `Target.load`."""
        return OnnxSession(folder / FILE, threads)


def _draw_from_training_set(context: BuildContext) -> Calibration:
    """Opens the training set of the run, and draws from it."""
    setup = context.setup
    uri, fix = setup.recipe.data.train, "Leave int8 out of --to."
    if uri == "synthetic":
        raise UsageError("int8 is calibrated on training images, and this run has none", where="--to", fix=fix)
    try:
        train = open_dataset(setup.loaded.base, uri)
    except HeadwayError as error:
        what = f"int8 is calibrated on training images, and they cannot be read: {error.what}"
        raise UsageError(what, where=error.where, fix=f"Put them back, or l{fix[1:]}") from error
    with closing(train):
        return draw_calibration(setup, train, context.evaluation)


def needs_reduced_range(flags: frozenset[str], machine: str) -> bool:
    """Returns True if sums of 8-bit products saturate on a processor: x86 without VNNI adds pairs of them in 16 bits.

    Args:
        flags: of /proc/cpuinfo.
        machine: of `platform.machine()`.
    """
    return machine in ("x86_64", "AMD64", "i686") and not flags & VNNI


def quantise(
    model: Path,
    out: Path,
    images: NDArray[np.uint8],
    *,
    kind: str,
    check: Callable[[Path], Verdict] | None,
    reduce_range: bool,
    show: Callable[[str], None] = lambda text: None,
) -> Quantised:
    """Writes an int8 file of an ONNX file, with as many layers in int8 as the gate allows.

    First all layers are quantised. If the gate refuses that, each layer is quantised alone, and the one that changes
    most answers on the calibration images goes back to fp32, then the next, until the gate holds. One layer stays in
    int8 in any case: without it there would be nothing to judge.

    Args:
        model: model.onnx of an export.
        out: the file that is written; it holds the last try.
        images: training images for calibration, uint8 [n, H, W, C]; never those that the gate sees.
        kind: kind of the labels: `class`, `multi` or `value`.
        check: judges a file; the gate. None: all layers are quantised.
        reduce_range: see `needs_reduced_range`.
        show: called with a line about each try.

    Raises:
        HeadwayError: the file has no layer that can be quantised.
    """
    with tempfile.TemporaryDirectory(prefix="headway-int8-") as folder:
        graph = CalibratedGraph.prepare(model, Path(folder), images, reduce_range)
        if not graph.layers:
            what, fix = f"it has no {', '.join(LAYERS[:-1])} or {LAYERS[-1]}", "Leave int8 out."
            raise HeadwayError(f"{what} that could be computed in int8", where=str(model), fix=fix)
        ranked, back = list[str](), list[str]()
        while True:
            graph.write(out, [name for name in graph.nodes if name not in back])
            verdict = None if check is None else check(out)
            if verdict is None or verdict.passed or len(back) + 1 == len(graph.layers):
                return Quantised(
                    verdict=verdict,
                    layers=len(graph.layers),
                    in_fp32=tuple(back),
                    reduce_range=reduce_range,
                    tries=len(back) + 1,
                )
            if not back:
                show(f"int8 in all {len(graph.layers)} layers is refused: each layer is tried alone.")
                ranked = rank_layers(graph.layers, lambda name: graph.compare_alone(name, images, kind))
            back.append(ranked[len(back)])
            left = len(graph.layers) - len(back)
            show(f"{back[-1]} goes back to fp32; {left} layer{'s are' if left > 1 else ' is'} left in int8.")


def rank_layers(layers: Sequence[str], measure: Callable[[str], tuple[int, float]]) -> list[str]:
    """Ranks layers by the damage that each does alone, the worst first; equal ones stay in their order.

    Args:
        measure: returns the answers changed and the mean difference of an output.
    """
    damage = {name: measure(name) for name in layers}
    return sorted(layers, key=lambda name: damage[name], reverse=True)
