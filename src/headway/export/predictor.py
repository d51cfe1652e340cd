"""One door to all that predicts: a run, an ensemble of runs, or an export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, final

from headway.core.errors import UsageError
from headway.core.run_folder import RunFolder
from headway.data.image_files import ImageSource, OnBadImage, raise_error
from headway.export.manifest import is_export
from headway.export.targets.onnx import MODEL

if TYPE_CHECKING:
    from headway.setup.train_setup import TrainSetup


class Predictor(Protocol):
    """Predicts image files, and is evaluated on packed folders. `open_predictor` makes one."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None:
        """Releases the network."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, or of the labels or numbers."""

    def check_top(self, top: int | None) -> None:
        """Raises UsageError if so many best classes cannot be named."""

    def predict(
        self,
        images: Sequence[ImageSource],
        batch: int = 64,
        *,
        top: int | None = None,
        on_bad: OnBadImage = raise_error,
    ) -> Iterator[dict[str, Any]]:
        """Yields one row per image: `path` (of a file, else `image N`) and the columns of `headway predict`.

        Args:
            top: number of best classes, each with its probability, in place of the task's columns.
            on_bad: called with the error of an image that cannot be read, which then has no row.

        Raises:
            DataError: an image cannot be read; or none of them can.
        """

    def evaluate(self, data: str | None = None) -> dict[str, float]:
        """Returns the metrics over the evaluation set, or over another packed folder, and `samples`."""


GiveNetwork = Callable[[], AbstractContextManager[None]]
"""Makes the network that a program gave to a run known to its recipe, inside the block."""


@final
class TrainedPredictor:
    """A run or an ensemble. Args: give_network: see `GiveNetwork`."""

    def __init__(self, run: RunFolder, give_network: GiveNetwork = nullcontext) -> None:
        self.run, self._give_network = run, give_network

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @cached_property
    def setup(self) -> TrainSetup:
        """The setup with the best weights, in evaluation mode."""
        from headway.training.runs import load_trained

        with self._give_network():
            setup = load_trained(self.run)
        setup.model.eval()
        return setup

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.run.read_provenance(target=dict)["target"]["classes"])

    def check_top(self, top: int | None) -> None:
        from headway.training.predict import check_top

        check_top(self.setup, top)

    def predict(
        self,
        images: Sequence[ImageSource],
        batch: int = 64,
        *,
        top: int | None = None,
        on_bad: OnBadImage = raise_error,
    ) -> Iterator[dict[str, Any]]:
        from headway.training.predict import predict

        return predict(self.setup, images, batch, top=top, on_bad=on_bad)

    def evaluate(self, data: str | None = None) -> dict[str, float]:
        from headway.training.runs import evaluate

        # It builds the network anew, so the factory must be found here too.
        with self._give_network():
            return evaluate(self.run.folder, data)


def open_predictor(folder: Path, give_network: GiveNetwork = nullcontext, *, target: str | None = None) -> Predictor:
    """Opens a run, an ensemble or an export, whichever the folder is.

    Args:
        target: the target of an export that answers; see `open_export`.

    Raises:
        UsageError: it is none of these, or has no such target. HeadwayError: a file of the export is not the one that
            was written.
    """
    # A folder with a graph and neither manifest nor recipe is an export that was copied in part, which is refused.
    if is_export(folder) or ((folder / MODEL).is_file() and not (folder / "recipe.yaml").exists()):
        from headway.export.exported import open_export

        return open_export(folder, target)
    if not folder.exists() and (folder.parent / "recipe.yaml").is_file():
        fix = f"Write an export of the run first: headway export {folder.parent}."
        raise UsageError("there is no such export", where=str(folder), fix=fix)
    run = RunFolder.open_trained(folder)
    if target is not None:
        what, fix = f"a run has no target {target!r}", "Name an export of it, or leave --target out."
        raise UsageError(what, where=str(folder), fix=fix)
    return TrainedPredictor(run, give_network)
