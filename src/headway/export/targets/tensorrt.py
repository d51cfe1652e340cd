"""TensorRT: runs `model.onnx` on an NVIDIA GPU, through ONNX Runtime's provider."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from headway.core.errors import UsageError
from headway.export.targets.onnx import MODEL, OnnxSession
from headway.export.targets.target import BuildContext, Session, Target

if TYPE_CHECKING:
    from headway.export.pipeline import Pipeline

PROVIDER = "TensorrtExecutionProvider"


@final
class TensorRtTarget(Target):
    """The graph of the target `onnx` in TensorRT.

    TensorRT multiplies float32 in TF32, with 10 bits of the mantissa, so the gate takes it for a smaller precision.
    """

    name, file, files, precision = "tensorrt", MODEL, (), "bf16"
    packages, after = ("onnxruntime",), "onnx"

    def build(self, pipeline: Pipeline, folder: Path, context: BuildContext) -> Mapping[str, Any]:
        """Writes nothing, as it runs model.onnx; see `Target.build`."""
        expect_provider()
        return {"inference_precision": "tf32"}

    def load(self, folder: Path, threads: int | None = None) -> Session:
        """Loads model.onnx, and builds an engine of it, which takes a minute or more; see `Target.load`.

        Raises:
            UsageError: there is no TensorRT, or no GPU for it.
        """
        expect_provider()
        session = OnnxSession(folder / MODEL, threads, (PROVIDER, "CUDAExecutionProvider", "CPUExecutionProvider"))
        # Without its libraries or a GPU, ONNX Runtime takes the next provider and says nothing.
        if session.provider != PROVIDER:
            session.close()
            what = f"ONNX Runtime could not start TensorRT and took {session.provider}"
            fix = "Install TensorRT of the version that your onnxruntime-gpu was built with, and check nvidia-smi."
            raise UsageError(what, where=str(folder), fix=fix)
        return session


def expect_provider() -> None:
    """Raises UsageError if this ONNX Runtime was built without TensorRT."""
    import onnxruntime

    if PROVIDER not in onnxruntime.get_available_providers():
        what = "the target tensorrt needs an NVIDIA GPU and an ONNX Runtime with TensorRT"
        fix = "Install onnxruntime-gpu in place of onnxruntime, and TensorRT beside it."
        raise UsageError(what, where="--to", fix=fix)
