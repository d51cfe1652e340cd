"""PackSource: the images to pack, and their labels; no image is opened yet."""

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
"""Extensions of image files in lower case."""
LISTING_EXTENSIONS = (".csv", ".jsonl", ".ndjson", ".json")
SHARD_EXTENSIONS = (".rec", ".tar", ".tar.gz", ".tgz", ".lmdb", ".mdb")
EVAL_NAMES = ("eval", "val", "valid", "validation", "test")
"""Folders beside `train` that count as the evaluation set; the first one present wins."""


class ImageReader(Protocol):
    """Interface of the readers of a source's images; thread-safe."""

    mode: str
    """Mode of the pack that holds the images; `foreign` if they were not packed."""
    raw_channels: int
    """Channels of raw pixels; 0 for image files."""
    gray: bool | None
    """True if all images are gray; None if unknown."""

    def measure_sizes(self) -> NDArray[np.int64]:
        """Returns the size of each image in bytes, 0 if it cannot be read; int64 [n]."""

    def read(self, sample: int) -> bytes | NDArray[np.uint8]:
        """Returns the bytes of an image file, or pixels, uint8 [h, w, c].

        Raises OSError if it cannot be read, and DataError if it is damaged.
        """

    def prefetch(self, samples: Sequence[int]) -> ImageReader:
        """Returns a reader of the same images that has fetched these remote ones with as few requests as possible.

        Raises DataError if they cannot be read.
        """


@final
class ImageFiles:
    """Images that are one file each."""

    mode = "foreign"
    raw_channels = 0
    gray: bool | None = None

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths

    def prefetch(self, samples: Sequence[int]) -> ImageReader:
        """Returns itself: files need no prefetch."""
        return self

    def measure_sizes(self) -> NDArray[np.int64]:
        """Returns the size of each file in bytes."""
        # Straight into the array, because a set may have millions of files.
        return np.fromiter(map(_measure_size, self.paths), np.int64, len(self.paths))

    def read(self, sample: int) -> bytes:
        """Reads the bytes of one image."""
        # Opening a named pipe would block.
        with open_regular(self.paths[sample]) as file:
            return file.read()


def _measure_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        # Reading the file later reports the reason and the name.
        return 0


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PackSource:
    """Images and their labels; entry i of names, images and labels is one sample."""

    names: tuple[str, ...]
    """Paths relative to `root`, as text; all different."""
    images: ImageReader
    labels: NDArray[Any]
    """Class numbers, int64 [n]; indicators of several classes, float32 [n, k]; or numbers, float32 [n] or [n, k]."""
    label_kind: LabelKind
    classes: tuple[str, ...]
    """Names of the classes, or of the columns of `labels`; empty if the label is a single number."""
    root: str
    notes: tuple[str, ...] = ()
    """Sentences for the user about files that were found and left out."""

    def __len__(self) -> int:
        return len(self.names)


def list_entries(folder: str) -> tuple[list[str], list[str]]:
    """Returns the names of the folders and of the files in a folder, without hidden ones.

    Raises DataError if the folder cannot be read.
    """
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as entries:
            # Hidden entries include the columns that a scan keeps beside the data.
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if _is_folder(entry) else files).append(entry.name)
    except OSError as error:
        raise DataError(f"the folder cannot be read ({error.strerror})", where=folder) from error
    return folders, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Returns True for a folder or a link to one; a dangling or circular link counts as a file that cannot be read."""
    try:
        # scandir knows the kind without another system call.
        return entry.is_dir()
    except OSError:
        return False


def is_image(name: str) -> bool:
    """Returns True for the name of a file with an image extension."""
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS
