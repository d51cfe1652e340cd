"""headway.Run: the results of a run folder, for Python programs and notebooks."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from headway.core.errors import UsageError
from headway.core.interface import use_python_names
from headway.core.run_folder import RunFolder
from headway.core.user_code import GIVEN, give_objects
from headway.data.image_files import ImageSource, list_image_files
from headway.export.predictor import Predictor, TrainedPredictor, open_predictor


@final
class Run:
    """A run folder: what `headway.train` returns, or `headway.Run("runs/photos")` opens.

    An ensemble and an export predict and are evaluated as a run. They have no recipe, network and series of their own.

    Args:
        folder: the run folder, or the folder of an ensemble or an export.
        model: the network, if the run was given one by a Python program; its weights are replaced by the best ones.

    Attributes:
        folder: the run folder.

    Raises:
        UsageError: there is no such run.
        HeadwayError: a file of an export is not the one that was written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, model: torch.nn.Module | None = None) -> None:
        self.folder = Path(folder)
        self._run = RunFolder(self.folder)
        self._predictor: Predictor = open_predictor(self.folder, partial(_give_network, self._run, model))

    def __repr__(self) -> str:
        best = self.summary.get("best") or {}
        numbers = "".join(f", {name} {value:.4f}" for name, value in best.items() if name not in ("step", "epoch"))
        return f"Run({str(self.folder)!r}: {self._describe_state()}{numbers})"

    def _repr_html_(self) -> str:
        """Returns a table for notebooks."""
        # Null in the summary of a run that ended before its first evaluation.
        best = self.summary.get("best") or {}
        rows = {"state": self._describe_state(), **{f"best {name}": f"{value:.4g}" for name, value in best.items()}}
        # The names of metrics and of the folder are the user's, and may hold < and &.
        cells = (f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in rows.items())
        return f"<table><caption>{html.escape(str(self.folder))}</caption>{''.join(cells)}</table>"

    def _describe_state(self) -> str:
        summary = self.summary
        if not isinstance(self._predictor, TrainedPredictor):
            return "export"
        if not summary:
            return self._run.describe_origin() or "not ended yet"
        state = "finished" if summary.get("finished") else "stopped"
        return f"{state} at step {summary['step']:,} of {summary['steps']:,}"

    @property
    def summary(self) -> dict[str, Any]:
        """Results of the run: metrics, best, seconds, images/s; empty while it has not ended."""
        return self._run.read_summary()

    @property
    def finished(self) -> bool:
        """True if the run is at its end."""
        return bool(self.summary.get("finished"))

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, as a tree."""
        self._expect_single()
        return self._run.read_recipe_tree()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, or of the labels or numbers."""
        return self._predictor.classes

    @property
    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """Series of the evaluations: `step`, `epoch`, `loss` and each metric, float64 [evaluations]."""
        return self._read_series("evaluate")

    @property
    def training(self) -> dict[str, NDArray[np.float64]]:
        """Series of the logging steps: `step`, `epoch`, `loss`, `lr`, `images_s` and others, float64 [records]."""
        return self._read_series("train")

    def _read_series(self, kind: str) -> dict[str, NDArray[np.float64]]:
        records = [record for record in self._run.read_metrics() if record.get("kind") == kind]
        # A dictionary without values, not a set: it keeps the order of the records.
        names = {name: None for record in records for name, value in record.items() if isinstance(value, int | float)}
        # A value that a record lacks is NaN, so that all series of a kind have one length.
        return {name: np.array([record.get(name, np.nan) for record in records], np.float64) for name in names}

    def _expect_single(self) -> TrainedPredictor:
        """Returns the predictor of the run. Raises UsageError if this is an ensemble or an export."""
        if not isinstance(self._predictor, TrainedPredictor):
            what, fix = "an export has no recipe and no network of PyTorch", "Open the run that it was made of."
            raise UsageError(what, where=str(self.folder), fix=fix)
        if self._run.ensemble_path.exists():
            what, fix = "an ensemble has several networks and recipes", "Open one of its members: headway.Run(MEMBER)."
            raise UsageError(what, where=str(self.folder), fix=fix)
        return self._predictor

    def load_model(self) -> torch.nn.Module:
        """Returns the network with the best weights, in evaluation mode, on the run's device.

        It takes float images [b, C, H, W] as `normalise` gives them.

        Raises:
            UsageError: the run has no weights yet, or is an ensemble. RecipeError: it was given its network, and `Run`
                was not.
        """
        return self._expect_single().setup.model

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Normalises uint8 images [b, H, W, C] as in training; returns float [b, C, H, W] on the run's device."""
        setup = self._expect_single().setup
        return setup.augment.normalise(images.to(setup.device))

    @use_python_names()
    def predict(self, images: Any, *, batch: int = 64, top: int | None = None) -> list[dict[str, Any]]:
        """Predicts images with the best weights; returns one row an image, with the columns of `headway predict`.

        Args:
            images: one image or several: paths of files or folders, the bytes of a file, PIL images, or uint8 arrays or
                tensors [H, W, C] or [H, W]. Any size: they are resized and cropped as in an evaluation.
            top: number of best classes, each with its probability, in place of the task's columns.

        Raises:
            DataError: an image cannot be read. UsageError: it is none of these, or there are fewer classes than `top`.
        """
        self._predictor.check_top(top)
        return list(self._predictor.predict(list(_list_sources(images)), batch, top=top))

    @use_python_names()
    def evaluate(self, data: str | os.PathLike[str] | None = None) -> dict[str, float]:
        """Evaluates the best weights on the run's evaluation set, or on another packed folder; returns the metrics."""
        return self._predictor.evaluate(None if data is None else str(data))

    def report(self) -> Path:
        """Writes report.html into the run folder, and returns its path."""
        # Imported here, because most programs write no report.
        from headway.report.run_report import write_report

        return write_report(self.folder)


def _give_network(run: RunFolder, model: torch.nn.Module | None) -> AbstractContextManager[None]:
    """Lets the factory of a run return the network that a program gave it, inside the block."""
    if model is None or run.ensemble_path.exists():
        return nullcontext()
    # Its recipe names the network by a path that only this block can resolve.
    factory = str(run.read_recipe_tree()["model"]["factory"])
    return give_objects({factory: lambda: model} if factory.startswith(GIVEN) else {})


def _list_sources(images: Any) -> Iterable[ImageSource]:
    """Yields the single images of an argument of `Run.predict`."""
    # First, because a text is a sequence of its letters.
    if isinstance(images, str | os.PathLike):
        yield from list_image_files([Path(images)])
    # Four dimensions are a batch. Fewer are one image, however many channels it has.
    elif isinstance(images, Image.Image | bytes) or (isinstance(images, np.ndarray | torch.Tensor) and images.ndim < 4):
        yield images
    elif isinstance(images, np.ndarray | torch.Tensor | Sequence):
        for image in images:
            yield from _list_sources(image)
    else:
        yield images
