"""Source: what is to be packed, image by image, with labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.files import open_regular
from headway.data.columns import LabelKind

IMAGE_EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
LISTING_EXTENSIONS = (".csv", ".jsonl", ".ndjson", ".json")
SHARD_EXTENSIONS = (".rec", ".tar", ".tar.gz", ".tgz", ".lmdb", ".mdb")
EVAL_NAMES = ("eval", "val", "valid", "validation", "test")
"""Folders beside `train` that are taken for the evaluation set, the first of them that is there."""


class ImageReader(Protocol):
    """Where the images of a source are; any thread may read."""

    mode: str
    """Mode of the pack that they lie in; `foreign` where it is none."""
    raw_channels: int
    """0: they are files. Else they are pixels of so many channels."""
    gray: bool | None
    """Whether all are; None: not known."""

    def measure_sizes(self) -> NDArray[np.int64]:
        """Bytes of each; 0 where it cannot be read. Shape [n]."""

    def read(self, sample: int) -> bytes | NDArray[np.uint8]:
        """The bytes of an image file, or pixels, uint8 [h, w, c].

        Raises OSError where it cannot be read, and DataError where it is damaged.
        """

    def prefetch(self, samples: Sequence[int]) -> ImageReader:
        """The same images, of which these are about to be read: what lies far away is fetched at once.

        Raises DataError where it cannot be reached.
        """


@final
class ImageFiles:
    """Images that are files of their own."""

    mode, raw_channels = "foreign", 0
    gray: bool | None = None

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths

    def prefetch(self, samples: Sequence[int]) -> ImageReader:
        """Returns itself, since files need nothing in common."""
        return self

    def measure_sizes(self) -> NDArray[np.int64]:
        """Returns the size of each file in bytes."""
        return np.fromiter(map(_measure_size, self.paths), np.int64, len(self.paths))

    def read(self, sample: int) -> bytes:
        """Reads the bytes of one image."""
        with open_regular(self.paths[sample]) as file:
            return file.read()


def _measure_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # the reading of it will say by name what is wrong
        return 0


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PackSource:
    """Images and their labels, not opened yet; entry i of names, images and labels is one sample."""

    names: tuple[str, ...]
    """Paths relative to `root`, as text; no two are the same."""
    images: ImageReader
    labels: NDArray[Any]
    """int64 [n]: class numbers; float32 [n, k]: 1 where a class applies, else 0; float32 [n] or [n, k]: numbers."""
    label_kind: LabelKind
    classes: tuple[str, ...]
    """Names of the classes, or of the columns of `labels`; empty where the label is a single number."""
    root: str
    notes: tuple[str, ...] = ()
    """What was found and left out, in sentences for the user."""

    def __len__(self) -> int:
        return len(self.names)


def list_entries(folder: str) -> tuple[list[str], list[str]]:
    """Names of the folders and of the files in a folder, hidden ones left out. Raises DataError if it is unreadable."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if not entry.name.startswith("."):
                    (folders if _is_folder(entry) else files).append(entry.name)
    except OSError as error:
        raise DataError(f"the folder cannot be read ({error.strerror})", where=folder) from error
    return folders, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Links are followed; one that leads nowhere, or in a circle, is taken for a file that cannot be read."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_image(name: str) -> bool:
    """Whether a file is an image by its ending."""
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS
