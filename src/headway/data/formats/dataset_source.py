"""An open data set as the source of a pack, so that a pack can be packed again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.columns import FLAG_PLANAR, FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.formats.pack_source import PackSource


def build_pack_source(dataset: Dataset, *, remote: bool = False) -> PackSource:
    """Returns all samples of a data set, in its order.

    Args:
        remote: the data set is at a URL, so records are fetched ahead; see `ImageReader.prefetch`.

    Raises:
        DataError: the pixels have neither 1 nor 3 channels, or pixels and image files are mixed.
    """
    return PackSource(
        names=tuple(dataset.name(sample) for sample in range(len(dataset))),
        images=DatasetImages(dataset, remote),
        labels=np.array(dataset.label),
        label_kind=dataset.description.label_kind,
        classes=dataset.classes,
        root=str(dataset.folder),
    )


@final
class DatasetImages:
    """The images of a data set; each read compares the checksum. An `ImageReader`."""

    def __init__(self, dataset: Dataset, remote: bool) -> None:
        is_raw = (dataset.flags & FLAG_RAW) > 0
        channels = dataset.description.channels
        if is_raw.any() and (channels not in (1, 3) or not is_raw.all()):
            what = f"pixels of {channels} channels cannot be packed" if is_raw.all() else "only some samples are raw"
            raise DataError(what, where=str(dataset.folder), fix="Save them as images of 1 or 3 channels.")
        self.mode = dataset.description.mode
        self.raw_channels = channels if is_raw.any() else 0
        self.gray: bool | None = channels == 1
        self._dataset = dataset
        self._remote = remote
        # Records fetched by `prefetch`, by sample.
        self._fetched: dict[int, memoryview] = {}

    def measure_sizes(self) -> NDArray[np.int64]:
        """Returns the size of each record in bytes; int64 [n]."""
        return self._dataset.length.astype(np.int64)

    def prefetch(self, samples: Sequence[int]) -> DatasetImages:
        """Returns a reader of the same images that has read these remote records in one call."""
        if not self._remote:
            return self
        # A copy for each task, as threads must not share fetched records.
        reader = copy.copy(self)
        reader._fetched = dict(zip(samples, self._dataset.read(samples), strict=True))
        return reader

    def read(self, sample: int) -> bytes | NDArray[np.uint8]:
        """Returns an image file's bytes, or pixels, uint8 [h, w, c]. Raises DataError if it is damaged."""
        dataset = self._dataset
        record = self._fetched.get(sample)
        # Checked at each read: a copy of a damaged record would get a valid checksum.
        data = bytes(dataset.read([sample])[0] if record is None else record)
        if len(data) != dataset.length[sample] or crc32c(data) != dataset.crc32c[sample]:
            raise DataError("its checksum does not match the columns", where=dataset.name(sample))
        if not self.raw_channels:
            return data
        height, width = int(dataset.height[sample]), int(dataset.width[sample])
        pixels = np.frombuffer(data, np.uint8)
        if dataset.flags[sample] & FLAG_PLANAR:
            # Packs hold channels last.
            planes = pixels.reshape(self.raw_channels, height, width)
            return np.ascontiguousarray(planes.transpose(1, 2, 0))
        return pixels.reshape(height, width, self.raw_channels)
