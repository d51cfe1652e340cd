"""Samples of an evaluation set from their files: decoded by Pillow, resized by an export, beside the run's pixels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.dataset import Dataset
from headway.data.reference import convert_mode, read_image
from headway.export.targets.target import take_first_line
from headway.setup.train_setup import TrainSetup

Pixels = NDArray[np.uint8]

FILE_SAMPLES = 1000
"""Samples that are read from their files: each is decoded whole and resized alone, some 20 ms for a photograph."""
MAX_FILE_BYTES = 512 << 20
"""Most bytes of resized pixels, as all targets are judged on the same ones: 1,000 images of 423 x 423."""
LOADER_BATCH = 64
MAX_MEAN_DIFFERENCE = 0.5
"""Largest mean difference from the run's pixels, in levels from 0 to 255.

Other roundings differ by 1 in a few per cent of the values, and Pillow's own resize, which rounds twice, in up to a
quarter. A network that is not sure of anything gives the same answers for pixels that lie elsewhere, so answers alone
do not tell.
"""
MAX_PIXEL_DIFFERENCE = 2
"""Largest difference of a value, likewise: a border that is treated in another way moves the mean by less than 0.5.

JPEG, PNG and the other formats differ by 1 at most, as Headway's decoder gives Pillow's pixels.
"""


@dataclass(frozen=True, kw_only=True)
class ResizedFiles:
    """Pixels that an export has made of files.

    Attributes:
        samples: index of each in the data set, int64 [n].
        pixels: uint8 [n, H, W, C]; None if the resize does not do its work.
        mean_difference: of the values of all pixels from those of the run, in levels from 0 to 255.
        largest_difference: likewise.
        faults: reasons to refuse the export.
    """

    samples: NDArray[np.int64]
    pixels: Pixels | None
    mean_difference: float = math.nan
    largest_difference: float = math.nan
    faults: tuple[str, ...] = ()


def resize_files(
    setup: TrainSetup,
    dataset: Dataset,
    resize: Callable[[Pixels], Pixels],
    answered: NDArray[np.int64],
    show: Callable[[int, int], None],
) -> ResizedFiles:
    """Resizes the first samples of Headway's Order with the seed of the run, and compares their pixels with the run's.

    Args:
        resize: the export's resize, from uint8 [1, h, w, C] to [1, H, W, C].
        answered: the samples that are not damaged.
        show: called with (samples done, samples).
    """
    shape = (*setup.size, setup.channels)
    count = min(len(dataset), FILE_SAMPLES, max(1, MAX_FILE_BYTES // math.prod(shape)))
    pixels, samples, means, largest = np.empty((count, *shape), np.uint8), list[int](), list[float](), list[int]()
    batch_size = min(LOADER_BATCH, count)
    loader = setup.inputs.build_sample_loader(setup.recipe, dataset, count, batch_size, setup.recipe.seed)
    for batch in loader:
        # The last batch is full, and its end belongs to no sample.
        good = np.isin(batch.served, answered) & (batch.positions < count)
        own = batch.images[torch.from_numpy(good).to(batch.images.device)].cpu().numpy()
        for sample, expected in zip(batch.served[good].tolist(), own, strict=True):
            fault = ""
            try:
                found = resize(_read_file(setup, dataset, sample))
            # A runtime raises anything; whatever it is, the export does not do its work.
            except Exception as error:
                fault = f"Its resize fails on sample {sample}: {type(error).__name__}: {take_first_line(error)}."
            else:
                if found.shape != (1, *shape):
                    fault = f"Its resize gives the shape {list(found.shape)} and not {[1, *shape]} for sample {sample}."
            if fault:
                return ResizedFiles(samples=np.array(samples, np.int64), pixels=None, faults=(fault,))
            pixels[len(samples)] = found[0]
            difference = np.abs(found[0].astype(np.int16) - expected)
            samples.append(sample)
            means.append(float(difference.mean()))
            largest.append(int(difference.max()))
            show(len(samples), count)
    mean, faults = float(np.mean(means)), list[str]()
    if mean > MAX_MEAN_DIFFERENCE:
        faults.append(f"Its pixels differ by {mean:.2f} levels on average, more than {MAX_MEAN_DIFFERENCE:g}.")
    if max(largest) > MAX_PIXEL_DIFFERENCE:
        worst = samples[int(np.argmax(largest))]
        what = f"A pixel of sample {worst} differs by {max(largest)} levels, more than {MAX_PIXEL_DIFFERENCE}."
        faults.append(what)
    return ResizedFiles(
        samples=np.array(samples, np.int64),
        pixels=pixels[: len(samples)],
        mean_difference=mean,
        largest_difference=float(max(largest)),
        faults=tuple(faults),
    )


def _read_file(setup: TrainSetup, dataset: Dataset, sample: int) -> Pixels:
    """Returns a whole image, uint8 [1, h, w, C]."""
    # A copy: Pillow's own memory cannot be written to, which torch warns of.
    pixels = np.array(convert_mode(read_image(dataset, sample), setup.channels))
    return pixels.reshape(1, *pixels.shape[:2], setup.channels)
