"""`headway predict`: puts image files through a trained network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.decode import build_decoder
from headway.data.host_transform import HostTransform
from headway.data.image_files import ImageSource, OnBadImage, raise_error
from headway.setup.prediction_columns import make_class_columns
from headway.setup.train_setup import TrainSetup
from headway.training.evaluate import predict_outputs
from headway.training.prediction_rows import Rows, expect_ranking, predict_files


def predict(
    setup: TrainSetup,
    files: Sequence[ImageSource],
    batch: int = 64,
    *,
    top: int | None = None,
    on_bad: OnBadImage = raise_error,
) -> Iterator[dict[str, Any]]:
    """Yields one row per image: `path` (of a file, else `image N`) and the task's columns.

    Args:
        top: number of best classes, each with its probability, in place of the task's columns.
        on_bad: called with the error of a file that cannot be read, which then has no row. By default it is raised.

    Raises:
        DataError: a file is not an image; or none of them is.
    """
    # Never switched back: a network that predicts is not trained.
    setup.model.eval()

    def compute(pixels: NDArray[np.uint8]) -> Rows:
        with torch.no_grad():
            outputs = predict_outputs(setup, torch.from_numpy(pixels).to(setup.device))
        if top is None:
            return setup.task.predict(outputs)
        return make_class_columns(outputs.softmax(dim=1).numpy(force=True), setup.target.classes, top)

    options, transform = setup.recipe.data, build_evaluation_transform(setup)
    with closing(build_decoder(options.threads, options.decoder)) as decoder:
        yield from predict_files(files, compute, transform=transform, decoder=decoder, batch=batch, on_bad=on_bad)


def build_evaluation_transform(setup: TrainSetup) -> HostTransform:
    """Returns the crop and resize of an evaluation, which predictions share so that they agree with its metrics."""
    data = setup.recipe.data
    return HostTransform(size=setup.size, channels=setup.channels, crop=data.crop.to_center(), scaled=data.scaled)


def check_top(setup: TrainSetup, top: int | None) -> None:
    """Raises UsageError if a run cannot rank so many classes."""
    classes = len(setup.target.classes)
    expect_ranking(classes if setup.target.kind == "class" and setup.task.outputs == classes else None, top)
