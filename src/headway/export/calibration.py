"""Calibration images of int8: drawn from the training set, and never from what the gate sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.data.dataset import Dataset
from headway.setup.train_setup import TrainSetup

CALIBRATION_SAMPLES = 256
"""16 and 256 images gave the same answers on digits; rare large activations are seen by more of them."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Training images over which the ranges of activations are measured.

    Attributes:
        images: uint8 [n, H, W, C], as an evaluation sees them.
        samples: their indices in the training set.
        seed: of the Order that they were drawn by.
        fingerprint: of the training set.
    """

    images: NDArray[np.uint8]
    samples: tuple[int, ...]
    seed: int
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """Returns all but the pixels, by name."""
        return {"fingerprint": self.fingerprint, "seed": self.seed, "samples": list(self.samples)}


def draw_calibration(
    setup: TrainSetup, train: Dataset, evaluation: Dataset | None, count: int = CALIBRATION_SAMPLES
) -> Calibration:
    """Draws calibration images from a training set by Headway's Order with the seed of the run.

    Images whose bytes are also in the evaluation set are left out. An int8 file that was fitted to images of the gate
    would pass it too easily.

    Args:
        evaluation: the set that the gate sees; None: nothing is judged.

    Raises:
        UsageError: the training set is the evaluation set, or all images drawn are in it.
    """
    if evaluation is not None and train.fingerprint == evaluation.fingerprint:
        fix = "Name another set as --data, or leave int8 out."
        what = "the training set is the evaluation set, so that int8 would be calibrated on the images that judge it"
        raise UsageError(what, where=str(train.folder), fix=fix)
    count, seed = min(count, len(train)), setup.recipe.seed
    judged = np.empty(0, np.uint64) if evaluation is None else _identify(evaluation, np.arange(len(evaluation)))
    images, samples = [], list[int]()
    for batch in setup.inputs.build_sample_loader(setup.recipe, train, count, min(64, count), seed):
        # The last batch is full, and its end belongs to no sample. Masked samples are served as -1.
        rows = np.flatnonzero((batch.served >= 0) & (batch.positions < count))
        rows = rows[~np.isin(_identify(train, batch.served[rows]), judged)]
        images.append(batch.images.cpu().numpy()[rows])
        samples += batch.served[rows].tolist()
    if not samples:
        what = f"all {count} training images drawn for calibration are in the evaluation set too"
        raise UsageError(what, where=str(train.folder), fix="Name another set as --data, or leave int8 out.")
    return Calibration(images=np.concatenate(images), samples=tuple(samples), seed=seed, fingerprint=train.fingerprint)


def _identify(dataset: Dataset, samples: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns a number of each record that equal bytes share: length and checksum; uint64 [k]."""
    length, checksum = dataset.length[samples].astype(np.uint64), dataset.crc32c[samples].astype(np.uint64)
    return (length << np.uint64(32)) | checksum
