"""An open data set as a source, so that a pack can be packed again."""

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
    """All samples of a data set, in its order; `remote`: it lies at an address.

    Raises DataError where it holds pixels of other than 1 or 3 channels, or some pixels and some files.
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
    """The images of a data set, each checked against its checksum."""

    def __init__(self, dataset: Dataset, remote: bool) -> None:
        raw = (dataset.flags & FLAG_RAW) > 0
        channels = dataset.description.channels
        if raw.any() and (channels not in (1, 3) or not raw.all()):
            what = f"pixels of {channels} channels cannot be packed" if raw.all() else "only some samples are raw"
            raise DataError(what, where=str(dataset.folder), fix="Save them as images of 1 or 3 channels.")
        self.mode = dataset.description.mode
        self.raw_channels = channels if raw.any() else 0
        self.gray: bool | None = channels == 1
        self._dataset, self._remote = dataset, remote
        self._fetched: dict[int, memoryview] = {}

    def measure_sizes(self) -> NDArray[np.int64]:
        return self._dataset.length.astype(np.int64)

    def prefetch(self, samples: Sequence[int]) -> DatasetImages:
        if not self._remote:
            return self
        near = copy.copy(self)
        near._fetched = dict(zip(samples, self._dataset.read(samples), strict=True))
        return near

    def read(self, sample: int) -> bytes | NDArray[np.uint8]:
        dataset = self._dataset
        near = self._fetched.get(sample)
        data = bytes(dataset.read([sample])[0] if near is None else near)
        if len(data) != dataset.length[sample] or crc32c(data) != dataset.crc32c[sample]:
            raise DataError("its checksum is another than that in the columns", where=dataset.name(sample))
        if not self.raw_channels:
            return data
        height, width = int(dataset.height[sample]), int(dataset.width[sample])
        pixels = np.frombuffer(data, np.uint8)
        if dataset.flags[sample] & FLAG_PLANAR:
            planes = pixels.reshape(self.raw_channels, height, width)
            return np.ascontiguousarray(planes.transpose(1, 2, 0))
        return pixels.reshape(height, width, self.raw_channels)
