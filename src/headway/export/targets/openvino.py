"""OpenVINO: runs `model.onnx` on the CPU, in float32, or in bf16 where that is asked for by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import HeadwayError, UsageError
from headway.export.targets.target import BuildContext, Session, Target, check_packages, take_first_line

if TYPE_CHECKING:
    from headway.export.pipeline import Pipeline

MODEL = "model.onnx"
TELEMETRY = "openvino_telemetry"
OpenVinoPrecision = Literal["f32", "bf16"]


@final
class OpenVinoTarget(Target):
    """The graph of the target `onnx` in OpenVINO, in float32.

    Where the processor has bf16 units, OpenVINO by itself computes in bf16, which moves probabilities by some 1e-3. So
    float32 is set.
    """

    name, file, files = "openvino", MODEL, ()
    packages, extra, after = ("openvino",), "openvino", "onnx"

    def build(self, pipeline: Pipeline, folder: Path, context: BuildContext) -> Mapping[str, Any]:
        """Writes nothing, as it runs model.onnx; see `Target.build`."""
        check_packages(self)
        return describe_runtime("f32")

    def load(self, folder: Path, threads: int | None = None) -> Session:
        """Loads model.onnx; see `Target.load`."""
        check_packages(self)
        return OpenVinoSession(folder / MODEL, threads)


@final
class OpenVinoBf16Target(Target):
    """The graph of the target `onnx` in OpenVINO, in bf16: for processors that have units for it."""

    name, file, files, precision = "openvino-bf16", MODEL, (), "bf16"
    packages, extra, after = ("openvino",), "openvino", "onnx"

    def build(self, pipeline: Pipeline, folder: Path, context: BuildContext) -> Mapping[str, Any]:
        """Writes nothing, as it runs model.onnx; see `Target.build`.

        Raises:
            UsageError: the processor has no bf16 units.
        """
        check_packages(self)
        expect_bf16()
        return describe_runtime("bf16")

    def load(self, folder: Path, threads: int | None = None) -> Session:
        """Loads model.onnx; see `Target.load`. Raises UsageError if the processor has no bf16 units."""
        check_packages(self)
        expect_bf16()
        return OpenVinoSession(folder / MODEL, threads, "bf16")


@final
class OpenVinoSession(Session):
    """A graph in OpenVINO. The first call with another batch size takes longer than the next ones.

    Args:
        path: the file, ONNX.
        threads: number of threads; None: the usable cores.
        precision: in which it computes what is float32 in the file.

    Raises:
        HeadwayError: the file cannot be loaded.
    """

    def __init__(self, path: Path, threads: int | None = None, precision: OpenVinoPrecision = "f32") -> None:
        openvino = import_openvino()
        options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": threads or count_usable_cores(),
            "PERFORMANCE_HINT": "LATENCY",
            # A thread that is bound to a core stands still while another program has that core.
            "ENABLE_CPU_PINNING": False,
        }
        try:
            compiled = openvino.Core().compile_model(str(path), "CPU", options)
        # OpenVINO raises RuntimeError for whatever is wrong with a file.
        except RuntimeError as error:
            what = f"OpenVINO cannot load this graph ({take_first_line(error)})"
            raise HeadwayError(what, where=str(path), fix="Export the run again.") from error
        self._request: Any = compiled.create_infer_request()

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Runs the graph; see `Session.run`."""
        outputs = self._request.infer([np.ascontiguousarray(pixels)], share_inputs=True)[0]
        # A copy, as the next call overwrites the outputs of this one.
        return np.array(outputs, np.float32)

    def close(self) -> None:
        """Frees the graph."""
        self._request = None


def import_openvino() -> Any:
    """Imports OpenVINO without its telemetry, which by itself sends an event to a server at each import."""
    if "openvino" in sys.modules or TELEMETRY in sys.modules:
        return importlib.import_module("openvino")
    # A module that cannot be imported: OpenVINO then takes a stub of its own, which sends nothing.
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[TELEMETRY]


def expect_bf16() -> None:
    """Raises UsageError if OpenVINO cannot compute in bf16 on this processor."""
    if "BF16" not in import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        what = "this processor has no bf16 units that OpenVINO could use"
        raise UsageError(what, where="openvino-bf16", fix="Take the target openvino, which computes in float32.")


def describe_runtime(precision: OpenVinoPrecision) -> dict[str, Any]:
    """Returns the facts about OpenVINO for pipeline.json."""
    return {"openvino": import_openvino().get_version(), "inference_precision": precision}
