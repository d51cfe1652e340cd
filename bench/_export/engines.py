"""Opens a pipeline of a bench in several engines, all in this process with one thread, and times them in turns."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.doctor.environment_builds import find_version
from headway.doctor.environment_host import HostFiles
from headway.export.pipeline import Pipeline
from headway.export.table_engines import Engine, TorchSession
from headway.export.targets import onnx_graph
from headway.export.targets.int8 import FILE, needs_reduced_range, quantise
from headway.export.targets.onnx import MODEL, OnnxSession
from headway.export.targets.openvino import OpenVinoSession
from headway.export.targets.target import Session

EAGER, LAST, RUNTIME, VINO, INT8 = "eager", "eager, channels last", "ONNX Runtime", "OpenVINO f32", "ONNX Runtime int8"
CALIBRATION = 64


def write_model(pipeline: Pipeline, folder: Path) -> Path:
    """Writes model.onnx of a pipeline into a folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx_graph.write_model(pipeline, folder / MODEL)
    return folder / MODEL


def write_int8(model: Path, pixels: NDArray[np.uint8]) -> Path:
    """Writes int8.onnx beside a model with all of its layers in int8, whatever that does to the answers.

    Args:
        pixels: images for calibration.
    """
    out, reduce_range = model.with_name(FILE), needs_reduced_range(read_flags(), platform.machine())
    quantise(model, out, pixels[:CALIBRATION], kind="class", check=None, reduce_range=reduce_range)
    return out


def read_flags() -> frozenset[str]:
    """Returns the flags of the processor, as /proc/cpuinfo has them."""
    return HostFiles(Path("/"), os.environ).flags


def open_torch(pipeline: Pipeline, *, channels_last: bool = False, onednn: bool = True, threads: int = 1) -> Session:
    """Opens a pipeline in PyTorch; it is changed in place, so each session needs its own."""
    return TorchSession(pipeline, Engine(name="", channels_last=channels_last, onednn=onednn), threads)


class Arms:
    """Sessions by name that take turns. A context: its end closes them."""

    def __init__(self, sessions: Mapping[str, Session]) -> None:
        self.sessions = dict(sessions)
        self._stack = ExitStack()

    def __enter__(self) -> Arms:
        for session in self.sessions.values():
            self._stack.enter_context(session)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take_turns(self, images: NDArray[np.uint8], rounds: int, turn_s: float) -> dict[str, list[float]]:
        """Returns CPU seconds of a call, all threads, by arm and round; each round begins with another arm.

        Args:
            images: the batch.
            rounds: number of rounds.
            turn_s: seconds of one turn; a call that takes longer is made once.
        """
        names, found = list(self.sessions), {name: list[float]() for name in self.sessions}
        for session in self.sessions.values():
            session.run(images)
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(_time_turn(self.sessions[name], images, turn_s))
        return found


def _time_turn(session: Session, images: NDArray[np.uint8], turn_s: float) -> float:
    """Returns the median CPU seconds of the calls of one turn."""
    taken, ends = list[float](), time.perf_counter() + turn_s
    while not taken or time.perf_counter() < ends:
        began = time.process_time()
        session.run(images)
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def run_all(session: Session, pixels: NDArray[np.uint8], batch: int) -> NDArray[np.float32]:
    """Returns the outputs of all images, some at a time."""
    return np.concatenate([session.run(pixels[low : low + batch]) for low in range(0, len(pixels), batch)])


def open_onnx(model: Path, threads: int = 1) -> Session:
    """Opens a file in ONNX Runtime, without threads that spin."""
    return OnnxSession(model, threads)


def open_openvino(model: Path, threads: int = 1) -> Session:
    """Opens a file in OpenVINO, in float32."""
    return OpenVinoSession(model, threads)


def list_versions() -> Sequence[str]:
    """Returns the versions of the engines."""
    return [f"{name} {find_version(name)}" for name in ("torch", "onnxruntime", "openvino")]
