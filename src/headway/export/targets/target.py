"""Target: the interface of a runtime that an export is built for, and Session: an export that is loaded in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.data.dataset import Dataset
    from headway.export.gate_run import Gate
    from headway.export.pipeline import Pipeline
    from headway.setup.train_setup import TrainSetup

Precision = Literal["fp32", "bf16", "int8"]
"""The precision in which a target computes. The gate allows `fp32` no changed answer, and the others a small drop."""
INPUT, OUTPUT = "pixels", "outputs"
"""Names of the input and the output of every graph."""


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Parts of the run that a target may use beside its pipeline.

    Attributes:
        setup: the run, for its recipe, labels and training images. Its data sets are not open.
        evaluation: the evaluation set; None if nothing is judged.
        gate: judges a session over that set; None if nothing is judged.
    """

    setup: TrainSetup
    evaluation: Dataset | None = None
    gate: Gate | None = None


class Session(ABC):
    """An export that is loaded in a runtime. Use it as a context manager, or close it after use."""

    @abstractmethod
    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Computes the outputs [b, outputs], after the activation, for uint8 images [b, H, W, C]."""

    def close(self) -> None:  # noqa: B027 - most sessions hold nothing but memory
        """Frees what the session holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Target(ABC):
    """A runtime that an export is built for.

    Attributes:
        name: the name in `--to` and in pipeline.json.
        file: the file that it loads, in the export's folder.
        files: the files that `build` writes.
        precision: the precision in which it computes.
        packages: modules that it imports to run.
        build_packages: modules that it imports to build, beside these and torch.
        extra: the extra of Headway that installs them.
        after: the target whose files it uses; it is built first.
    """

    name: ClassVar[str]
    file: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    precision: ClassVar[Precision] = "fp32"
    packages: ClassVar[tuple[str, ...]] = ()
    build_packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = "export"
    after: ClassVar[str | None] = None

    @abstractmethod
    def build(self, pipeline: Pipeline, folder: Path, context: BuildContext) -> Mapping[str, Any]:
        """Writes `files` into the folder, and returns facts for pipeline.json.

        Raises:
            HeadwayError: the network cannot be built for this target; the message names the part.
        """

    @abstractmethod
    def load(self, folder: Path, threads: int | None = None) -> Session:
        """Loads the export in a folder.

        Args:
            threads: number of threads; None: the usable cores.
        """


def check_packages(target: Target, *, builds: bool = False) -> None:
    """Raises UsageError if a package is missing that a target needs to run, or to be built; says what to install."""
    needed = (*target.packages, *(target.build_packages if builds else ()))
    if missing := [name for name in needed if find_spec(name) is None]:
        what = f"the target {target.name} needs {' and '.join(missing)}, not installed here"
        raise UsageError(what, where="--to", fix=f"Install it: pip install 'headway[{target.extra}]'.")


def take_first_line(error: BaseException | str) -> str:
    """Returns the first line of an error's text, cut at 300 characters: exporters write up to 80 lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"
