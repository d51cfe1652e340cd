"""An ONNX graph with the ranges of its tensors over calibration images, from which int8 files are made."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.files import write_and_sync
from headway.export.gate import count_flips
from headway.export.targets.onnx import OnnxSession
from headway.export.targets.target import INPUT

Pixels = NDArray[np.uint8]

LAYERS = ("Conv", "Gemm", "MatMul")
"""Operators with weights: nearly all of the work. These are the layers that go back to fp32."""
BETWEEN = ("Add", "Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat", "Flatten", "Reshape")
"""Operators that keep 8 bits between layers. Softmax and layer norm are not among them: 256 levels are too few."""
CALIBRATION_BATCH = 32


@final
class CalibratedGraph:
    """An ONNX graph that is ready for quantisation, with the ranges of its tensors. `prepare` makes one.

    Attributes:
        layers: names of the nodes with weights, in the order of the graph.
        nodes: names of all nodes that can be quantised: the layers, and what lies between the first and the last one.
    """

    def __init__(self, proto: Any, ranges: Any, *, reduce_range: bool) -> None:
        self._proto, self._ranges, self._reduce_range = proto, ranges, reduce_range
        weighted = [place for place, node in enumerate(proto.graph.node) if node.op_type in LAYERS]
        inside = range(weighted[0], weighted[-1] + 1) if weighted else range(0)
        # Outside lie the normalisation and the head, whose 8 bits would be those of the answer.
        self.nodes = [
            node.name
            for place, node in enumerate(proto.graph.node)
            if place in inside and node.op_type in LAYERS + BETWEEN
        ]
        self.layers = [proto.graph.node[place].name for place in weighted]
        self._reference: NDArray[np.float32] | None = None

    @staticmethod
    def prepare(model: Path, folder: Path, images: Pixels, reduce_range: bool) -> CalibratedGraph:
        """Folds constants, infers shapes, and measures the ranges of all tensors over the images."""
        import onnx
        from onnxruntime.quantization import CalibrationMethod, create_calibrator, quant_pre_process

        prepared = folder / "prepared.onnx"
        # Shapes by ONNX alone: the symbolic ones need a package more, and tell nothing about these graphs.
        with _quiet_log():
            quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)
        proto = onnx.load(str(prepared))
        for number, node in enumerate(proto.graph.node):
            # Layers are chosen by their names, so each needs one of its own.
            node.name = f"{node.op_type}_{number}" if not node.name else node.name
        onnx.save(proto, str(prepared))
        with _quiet_log():
            calibrator = create_calibrator(
                prepared,
                list(LAYERS + BETWEEN),
                augmented_model_path=str(folder / "ranges.onnx"),
                calibrate_method=CalibrationMethod.MinMax,
            )
            calibrator.collect_data(_Batches(images))
        return CalibratedGraph(proto, calibrator.compute_data(), reduce_range=reduce_range)

    def write(self, out: Path, nodes: Sequence[str]) -> None:
        """Writes a file in which these nodes are quantised."""
        write_and_sync(out, self._quantise(nodes).SerializeToString(deterministic=True))

    def compare_alone(self, layer: str, images: Pixels, kind: str) -> tuple[int, float]:
        """Returns the answers that one quantised layer changes, and the mean difference of an output."""
        if self._reference is None:
            self._reference = _run(self._proto, images)
        outputs = _run(self._quantise([layer]), images)
        return count_flips(kind, self._reference, outputs), float(np.abs(self._reference - outputs).mean())

    def _quantise(self, nodes: Sequence[str]) -> Any:
        from onnxruntime.quantization import QDQQuantizer, QuantType

        # `quantize_static` would measure the ranges anew for each try.
        with _quiet_log():
            quantizer = QDQQuantizer(
                copy.deepcopy(self._proto),
                per_channel=True,
                reduce_range=self._reduce_range,
                weight_qType=QuantType.QInt8,
                activation_qType=QuantType.QUInt8,
                # It narrows the ranges before a ReLU that it quantises, for the tries after this one too.
                tensors_range=copy.deepcopy(self._ranges),
                nodes_to_quantize=list(nodes),
                nodes_to_exclude=[],
                op_types_to_quantize=list(LAYERS + BETWEEN),
                # The last layer's outputs are the answer: 256 levels would make ties of near answers.
                extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},
            )
            return quantizer.quantize_model()


@final
class _Batches:
    """Feeds calibration images to ONNX Runtime, which asks until it gets None."""

    def __init__(self, images: Pixels) -> None:
        self._batches: Iterator[Pixels] = (
            images[low : low + CALIBRATION_BATCH] for low in range(0, len(images), CALIBRATION_BATCH)
        )

    def get_next(self) -> dict[str, Pixels] | None:
        batch = next(self._batches, None)
        return None if batch is None else {INPUT: batch}


def _run(proto: Any, images: Pixels) -> NDArray[np.float32]:
    """Returns the outputs of a graph, float32 [n, outputs]."""
    with OnnxSession(proto.SerializeToString()) as session:
        batches = (images[low : low + CALIBRATION_BATCH] for low in range(0, len(images), CALIBRATION_BATCH))
        return np.concatenate([session.run(batch) for batch in batches])


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Keeps the quantiser's notes about its own steps out of the root log; errors come through."""
    log = logging.getLogger()
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
