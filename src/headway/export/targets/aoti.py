"""AOTInductor: `model.pt2`, native code that torch compiles from the pipeline for this processor."""

from __future__ import annotations

import logging
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import HeadwayError, UsageError
from headway.core.files import write_and_sync
from headway.doctor.environment_builds import find_compiler
from headway.export.pipeline import Pipeline
from headway.export.targets.target import BuildContext, Session, Target, take_first_line
from headway.export.trace import trace_pipeline

MODEL = "model.pt2"


@final
class AotiTarget(Target):
    """The pipeline as native code. Building takes a minute or more, and needs a C++ compiler; running needs torch."""

    name, file, files = "aoti", MODEL, (MODEL,)

    def build(self, pipeline: Pipeline, folder: Path, context: BuildContext) -> Mapping[str, Any]:
        """Writes model.pt2; see `Target.build`. Raises UsageError if there is no compiler."""
        if find_compiler() is None:
            what = "the target aoti needs a C++ compiler, and there is none"
            raise UsageError(what, where="--to", fix="Install one (on Debian: apt install g++), or leave aoti out.")
        program = trace_pipeline(pipeline)
        with torch.no_grad(), _use_own_cache(folder) as scratch, warnings.catch_warnings():
            # They tell of deprecations inside torch, and of nothing that a user could change.
            warnings.simplefilter("ignore")
            try:
                torch._inductor.aoti_compile_and_package(
                    program,
                    package_path=str(scratch / MODEL),
                    # Otherwise it runs with as many threads as this process has, whatever runs it.
                    inductor_configs={"cpp.dynamic_threads": True},
                )
            # The compiler wraps any error, also those of the user's own network.
            except Exception as error:
                what = f"the network cannot be compiled ahead of time: {take_first_line(error)}"
                fix = "Write that part of the network with other operations, or leave aoti out of --to."
                raise HeadwayError(what, where=MODEL, fix=fix) from error
            write_and_sync(folder / MODEL, (scratch / MODEL).read_bytes())
        # The code has the instructions of the processor that compiled it.
        return {"torch": str(torch.__version__), "instructions": torch.backends.cpu.get_cpu_capability()}

    def load(self, folder: Path, threads: int | None = None) -> Session:
        """Loads model.pt2, whose code then runs in this process; see `Target.load`."""
        return AotiSession(folder / MODEL, threads)


@final
class AotiSession(Session):
    """Compiled code in this process.

    Args:
        path: the file.
        threads: number of threads; None: the usable cores. They are those of torch in the calling thread, until the
            session is closed.

    Raises:
        HeadwayError: the code cannot be loaded here.
    """

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self._threads, self._caller = threads or count_usable_cores(), 0
        self._threads_before = torch.get_num_threads()
        log = logging.getLogger("torch._inductor.package.package")
        level = log.level
        # Of any failure, torch first says that the file is old.
        log.setLevel(logging.CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._model: Any = torch._inductor.aoti_load_package(str(path))
        except Exception as error:
            what = f"this compiled network cannot be loaded ({take_first_line(error)})"
            fix = "Export the run again on this machine, with this version of torch."
            raise HeadwayError(what, where=str(path), fix=fix) from error
        finally:
            log.setLevel(level)

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Runs the code; see `Session.run`."""
        # OpenMP keeps the number for each calling thread.
        if self._caller != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._caller = threading.get_ident()
        with torch.inference_mode():
            outputs: NDArray[np.float32] = self._model(torch.from_numpy(np.ascontiguousarray(pixels))).numpy()
        return outputs

    def close(self) -> None:
        """Unloads the code, and puts back the number of threads."""
        self._model = None
        if self._caller:
            torch.set_num_threads(self._threads_before)
            self._caller = 0


@contextmanager
def _use_own_cache(folder: Path) -> Iterator[Path]:
    """Keeps the compiler's files in a folder that is removed afterwards, and its work in this process.

    Yields that folder.
    """
    import torch._inductor.config
    from torch._inductor.utils import fresh_cache

    # Torch's own cache would keep hundreds of megabytes in /tmp, and its pool of compiling processes would stay.
    with (
        tempfile.TemporaryDirectory(prefix=".aoti-", dir=folder) as scratch,
        fresh_cache(dir=scratch, delete=False),
        torch._inductor.config.patch(compile_threads=1),
    ):
        yield Path(scratch)
