"""Report panels of an evaluation: the confusion matrix and the worst-predicted images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from headway.core.files import write_atomically
from headway.core.run_folder import RunFolder
from headway.data.dataset import Dataset
from headway.data.reference import read_image
from headway.observe.panel_images import encode_image
from headway.page import panel
from headway.page.panel import Panel
from headway.training.evaluate import Evaluation

NUM_WORST_IMAGES = 24
MAX_THUMBNAIL_PX = 128
"""Longest side of a thumbnail in pixels; smaller images keep their size."""
CONFUSION_ORDER, WORST_ORDER = 410, 420
"""Places of the panels in the report."""


def write_panels(run: RunFolder, panels: Sequence[Panel]) -> None:
    """Writes each panel to panels/NAME.json."""
    for one in panels:
        write_atomically(run.panels / f"{one.name}.json", one.to_json())


def build_evaluation_panels(dataset: Dataset, evaluation: Evaluation, weights_label: str) -> list[Panel]:
    """Builds the panel of the worst-predicted images and, if labels are classes, the confusion matrix.

    Args:
        weights_label: names the evaluated weights in the notes, for example "the best weights".
    """
    # A loss that is not a number is the worst of all.
    order = np.argsort(-np.nan_to_num(evaluation.losses, nan=np.inf), kind="stable")[:NUM_WORST_IMAGES]
    # Only these few images are decoded again.
    pictures = []
    for index in order:
        sample = int(evaluation.samples[index])
        predicted = None if evaluation.predicted is None else int(evaluation.predicted[index])
        note = f"loss {evaluation.losses[index]:.3g}, {dataset.name(sample)}"
        pictures.append((encode_thumbnail(dataset, sample), _write_caption(dataset, sample, predicted), note))
    panels = [
        panel.images(
            "worst",
            "Worst-predicted images",
            pictures,
            section="Evaluation",
            order=WORST_ORDER,
            width="full",
            note=f"Highest loss on {_format_location(dataset)} with {weights_label}; wrong labels show here.",
        )
    ]
    if evaluation.predicted is not None:
        num_classes = len(dataset.classes)
        truth = np.asarray(dataset.label[evaluation.samples])
        # One count per pair of true and predicted class, the pair coded as a single number.
        cells = np.bincount(truth * num_classes + evaluation.predicted, minlength=num_classes * num_classes)
        cells = cells.reshape(num_classes, num_classes)
        num_right = int(np.trace(cells))
        panels.append(
            panel.matrix(
                "confusion",
                "Confusion matrix",
                dataset.classes,
                cells.tolist(),
                section="Evaluation",
                order=CONFUSION_ORDER,
                width="full",
                note=f"{num_right:,} of {int(cells.sum()):,} images of {_format_location(dataset)} right with "
                f"{weights_label}; rows are the true classes.",
            )
        )
    return panels


def _format_location(dataset: Dataset) -> str:
    """Returns the last two names of a data set's path, for example `cifar10/eval`."""
    return "/".join(dataset.folder.resolve().parts[-2:])


def _write_caption(dataset: Dataset, sample: int, predicted: int | None) -> str:
    label = dataset.label[sample]
    if predicted is not None:
        truth = int(label)
        if predicted == truth:
            return f"{dataset.classes[truth]}, right"
        return f"{dataset.classes[truth]}, taken for {dataset.classes[predicted]}"
    if dataset.description.label_kind == "multi":
        return ", ".join(name for name, on in zip(dataset.classes, label, strict=True) if on > 0.5)
    return ", ".join(f"{value:.4g}" for value in np.atleast_1d(label))


def encode_thumbnail(dataset: Dataset, sample: int) -> str:
    """Returns a sample's image as a data URI for a panel, at most MAX_THUMBNAIL_PX wide and high."""
    return encode_small_image(read_image(dataset, sample))


def encode_small_image(image: Image.Image) -> str:
    """Returns an image as a data URI for a panel; one that is larger than MAX_THUMBNAIL_PX is made smaller in place."""
    if max(image.size) > MAX_THUMBNAIL_PX:
        image.thumbnail((MAX_THUMBNAIL_PX, MAX_THUMBNAIL_PX), Image.Resampling.BILINEAR)
    # JPEG artefacts would show in very small images, and PNG costs few bytes there.
    return encode_image(image) if max(image.size) <= 64 else encode_image(image, "JPEG", quality=85)
