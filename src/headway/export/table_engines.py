"""The ways to run an exported network that an inference table compares: PyTorch's, and those of the export's files."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from headway.export.targets.target import Session

if TYPE_CHECKING:
    import torch

    from headway.export.pipeline import Pipeline

Runtime = Literal["torch", "aoti", "onnxruntime", "openvino"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to run the network.

    Attributes:
        name: of its row.
        runtime: what runs it; `torch` runs the pipeline of the run, the others a file of the export.
        file: that file.
        precision: fp32, bf16 or int8.
        channels_last: memory format of weights and images, in torch.
        compiled: whether torch.compile compiles the pipeline.
        onednn: whether torch calls oneDNN.
    """

    name: str
    runtime: Runtime = "torch"
    file: str = ""
    precision: str = "fp32"
    channels_last: bool = False
    compiled: bool = False
    onednn: bool = True


EAGER, NO_ONEDNN = "eager", "eager, no oneDNN"
ENGINES = (
    Engine(name=EAGER),
    Engine(name=NO_ONEDNN, onednn=False),
    Engine(name="eager, channels last", channels_last=True),
    Engine(name="torch.compile, channels last", channels_last=True, compiled=True),
    Engine(name="AOTInductor", runtime="aoti", file="model.pt2"),
    Engine(name="ONNX Runtime", runtime="onnxruntime", file="model.onnx"),
    Engine(name="OpenVINO f32", runtime="openvino", file="model.onnx"),
    Engine(name="OpenVINO bf16", runtime="openvino", file="model.onnx", precision="bf16"),
    Engine(name="ONNX Runtime int8", runtime="onnxruntime", file="int8.onnx", precision="int8"),
    Engine(name="OpenVINO int8", runtime="openvino", file="int8.onnx", precision="int8"),
)
"""All rows. Eager PyTorch is the first one: the others are compared with it."""


@dataclass(frozen=True)
class PipelineSource:
    """A function that builds the pipeline in a row's process: its import path, and its arguments."""

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Pipeline:
        """Calls the function."""
        module, name = self.function.split(":")
        built: Pipeline = getattr(importlib.import_module(module), name)(**self.arguments)
        return built

    def to_json(self) -> str:
        """Returns it as one argument of a command line."""
        return json.dumps({"function": self.function, "arguments": dict(self.arguments)})


def load_run_pipeline(run: str) -> Pipeline:
    """Builds the pipeline of a run folder."""
    from headway.core.run_folder import RunFolder
    from headway.export.pipeline import build_pipeline
    from headway.training.runs import load_trained

    return build_pipeline(load_trained(RunFolder.open_trained(Path(run)), wide=True))


def open_session(engine: Engine, folder: Path, source: PipelineSource, threads: int) -> Session:
    """Opens a row of the table in this process.

    Raises:
        HeadwayError: it cannot run here.
    """
    # Imported here: a row of ONNX Runtime or OpenVINO needs no memory for torch.
    path = folder / engine.file
    if engine.runtime == "onnxruntime":
        from headway.export.targets.onnx import OnnxSession

        return OnnxSession(path, threads)
    if engine.runtime == "openvino":
        from headway.export.targets.openvino import OpenVinoSession, expect_bf16

        if engine.precision == "bf16":
            expect_bf16()
        return OpenVinoSession(path, threads, "bf16" if engine.precision == "bf16" else "f32")
    if engine.runtime == "aoti":
        from headway.export.targets.aoti import AotiSession

        return AotiSession(path, threads)
    return TorchSession(source.build(), engine, threads)


@final
class TorchSession(Session):
    """The pipeline in PyTorch. Until it is closed, it changes the threads and the use of oneDNN of this process."""

    def __init__(self, pipeline: Pipeline, engine: Engine, threads: int) -> None:
        import torch

        self._stack = ExitStack()
        self._stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        layout = torch.channels_last if engine.channels_last else torch.contiguous_format
        set_layout(pipeline, layout)
        self._forward: Callable[[torch.Tensor], torch.Tensor] = pipeline
        if engine.compiled:
            # One process compiles: a pool of them would count as memory of this row.
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
            self._stack.enter_context(warnings.catch_warnings())
            # torch deprecates parts of itself that it uses.
            warnings.simplefilter("ignore")
            self._forward = torch.compile(pipeline)
        if not engine.onednn:
            self._stack.enter_context(turn_onednn_off())

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Computes the outputs [b, outputs] of images [b, H, W, C]."""
        import torch

        with torch.inference_mode():
            outputs: NDArray[np.float32] = self._forward(torch.from_numpy(pixels)).numpy()
        return outputs

    def close(self) -> None:
        """Frees the network, and puts back what it has changed."""
        self._stack.close()
        self._forward = _refuse_closed


def _refuse_closed(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("the session is closed")


@contextmanager
def turn_onednn_off() -> Iterator[None]:
    """Keeps PyTorch from oneDNN for the duration of the block: its own convolutions, with products by MKL."""
    import torch

    with warnings.catch_warnings():
        # torch sets an option for Intel's GPUs along with it, and warns that there are none.
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN", UserWarning)
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def set_layout(pipeline: Pipeline, layout: torch.memory_format) -> None:
    """Sets the memory format of weights and of the images that each network gets, in place."""

    # A copy in any case: tensors of one channel, or of one pixel, have both formats at once, and PyTorch takes their
    # strides for channels last.
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=layout)

    def convert(_: torch.nn.Module, images: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # Pixels come with channels last; the network computes in the format of its input.
        return (copy(images[0]), *images[1:])

    for member in pipeline.members:
        network: Any = member.network
        for parameter in network.parameters():
            if parameter.ndim == 4:
                parameter.data = copy(parameter)
        network.register_forward_pre_hook(convert)
