"""ONNX: `model.onnx` and `resize.onnx`, by torch's exporter, and their session in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import HeadwayError
from headway.export.targets.target import INPUT, OUTPUT, BuildContext, Session, Target, take_first_line

if TYPE_CHECKING:
    from headway.export.pipeline import Pipeline

MODEL, RESIZE = "model.onnx", "resize.onnx"


@final
class OnnxTarget(Target):
    """The pipeline as an ONNX file, run by ONNX Runtime on the CPU."""

    name, file, files = "onnx", MODEL, (MODEL, RESIZE)
    packages, build_packages = ("onnxruntime",), ("onnx", "onnxscript")

    def build(self, pipeline: Pipeline, folder: Path, context: BuildContext) -> Mapping[str, Any]:
        """Writes model.onnx and resize.onnx; see `Target.build`."""
        # Here, as loading an export needs no torch.
        from headway.export.targets.onnx_graph import OPSET, write_model, write_resize

        write_model(pipeline, folder / MODEL)
        write_resize(pipeline, context.setup.recipe.data.crop.share, folder / RESIZE)
        return {"opset": OPSET}

    def load(self, folder: Path, threads: int | None = None) -> Session:
        """Loads model.onnx; see `Target.load`."""
        return OnnxSession(folder / MODEL, threads)


@final
class OnnxSession(Session):
    """A graph in ONNX Runtime.

    Args:
        model: the file, or its bytes.
        threads: number of threads; None: the usable cores.
        providers: execution providers of ONNX Runtime, the first one preferred.
    """

    def __init__(
        self, model: Path | bytes, threads: int | None = None, providers: Sequence[Any] = ("CPUExecutionProvider",)
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or count_usable_cores()
        options.inter_op_num_threads = 1
        # Waiting threads would take the cores from the decoder and from other processes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Errors are raised; warnings of the graph's optimiser tell a user nothing.
        options.log_severity_level = 3
        try:
            given = model if isinstance(model, bytes) else str(model)
            self._session = onnxruntime.InferenceSession(given, options, providers=list(providers))
        # Its own classes of errors derive from RuntimeError or from Exception alone.
        except Exception as error:
            what = f"ONNX Runtime cannot load this graph ({take_first_line(error)})"
            where = MODEL if isinstance(model, bytes) else str(model)
            raise HeadwayError(what, where=where, fix="Export the run again.") from error

    @property
    def provider(self) -> str:
        """Name of the execution provider that runs the graph."""
        names: list[str] = self._session.get_providers()
        return names[0]

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        """Runs the graph; see `Session.run`. The outputs of resize.onnx are uint8."""
        outputs: NDArray[Any] = self._session.run([OUTPUT], {INPUT: np.ascontiguousarray(pixels)})[0]
        return outputs


def load_resize(folder: Path, threads: int | None = None) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    """Loads resize.onnx; the function returned turns uint8 [1, h, w, C] into uint8 [1, H, W, C]."""
    return OnnxSession(folder / RESIZE, threads).run
