"""Source: what is to be packed, image by image, with labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.core.files import open_regular
from headway.data.columns import COLUMNS_FILE, LabelKind

IMAGE_EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
LISTING_EXTENSIONS = (".csv", ".jsonl", ".ndjson", ".json")
SHARD_EXTENSIONS = (".rec", ".tar", ".tar.gz", ".tgz", ".lmdb", ".mdb")
EVAL_NAMES = ("eval", "val", "valid", "validation", "test")
"""Folders beside `train` that are taken for the evaluation set, the first of them that is there."""


class _SplitPaths(NamedTuple):
    train: Path
    evaluation: Path
    unused: list[str]


class ImageReader(Protocol):
    """Where the images of a source are; any thread may read."""

    mode: str
    """Mode of the pack that they lie in; `foreign` where it is none."""
    raw_channels: int
    """0: they are files. Else they are pixels of so many channels."""
    gray: bool | None
    """Whether all are; None: not known."""

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each; 0 where it cannot be read. Shape [n]."""

    def read(self, sample: int) -> bytes | NDArray[np.uint8]:
        """The bytes of an image file, or pixels, uint8 [h, w, c].

        Raises OSError where it cannot be read, and DataError where it is damaged.
        """

    def together(self, samples: Sequence[int]) -> ImageReader:
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

    def together(self, samples: Sequence[int]) -> ImageReader:
        """Returns itself, since files need nothing in common."""
        return self

    def sizes(self) -> NDArray[np.int64]:
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


def is_address(uri: str | os.PathLike[str]) -> bool:
    """Whether it is an address such as s3://bucket/photos, and no path on this machine."""
    return "://" in os.fspath(uri).removeprefix("file://")


def local_path(uri: str | os.PathLike[str], fix: str) -> Path:
    """A path on this machine. Raises UsageError, with the remedy `fix`, for an address such as s3://bucket/photos."""
    if is_address(uri):
        from headway.storage.transport import redact_address  # it imports from here

        raise UsageError("this is an address, and no path on this machine", where=redact_address(os.fspath(uri)), fix=fix)
    return Path(os.fspath(uri).removeprefix("file://"))


def open_source(src: Path) -> PackSource:
    """Lists a folder of class folders, or a CSV or JSONL file; opens anything else that `headway.open` opens.

    Raises:
        UsageError: `src` is not there, or is nothing of the kind.
        DataError: it is there, and what it holds cannot be used.
    """
    # All of these import from here.
    from headway.data import dataset
    from headway.data.formats import folder, listing
    from headway.data.formats import detect
    from headway.data.formats.dataset_source import build_pack_source

    if src.suffix.lower() in LISTING_EXTENSIONS and src.is_file():
        return listing.list_file(src)
    if src.is_dir() and not (src / COLUMNS_FILE).is_file() and detect.is_image_folder(src):
        return folder.list_folder(src)
    return build_pack_source(dataset.open(src))


def open_split(src: str | os.PathLike[str]) -> tuple[PackSource, PackSource | None]:
    """The training set and, where `src` is a folder of two parts (train/ and one of EVAL_NAMES), the evaluation set.

    The parts may be folders of images, packs or foreign data; or what `headway.open` calls parts of foreign data, such
    as the train and test of CIFAR-10. At an address lies one pack. Raises as `open_source`.
    """
    if is_address(src):
        from headway.data import dataset
        from headway.data.formats.dataset_source import build_pack_source

        return build_pack_source(dataset.open(src), remote=True), None
    src = Path(src)
    parts = _find_split_folders(src) or _find_foreign_parts(src)
    if parts is None:
        return open_source(src), None
    train, evaluation, unused = parts
    note = (f"not packed: {', '.join(unused)}",) if unused else ()
    source = open_source(train)
    return replace(source, notes=source.notes + note, root=str(train)), replace(
        open_source(evaluation), root=str(evaluation)
    )


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


def _find_split_folders(src: Path) -> _SplitPaths | None:
    """The folders of the training and the evaluation set, and the names of the other folders beside them."""
    names = {name.lower(): name for name in sorted(list_entries(str(src))[0])} if src.is_dir() else {}
    if "train" not in names or (src / COLUMNS_FILE).is_file():
        return None
    train = src / names["train"]
    if not _is_dataset_folder(train):
        return None  # a class that is called train
    named = [names[name] for name in EVAL_NAMES if name in names]
    chosen = next((name for name in named if _is_dataset_folder(src / name)), None)
    if chosen is not None:
        return _SplitPaths(train, src / chosen, [name for name in names.values() if name not in (train.name, chosen)])
    if named or len(names) == 1:
        what = f"{named[0]} has no class folders" if named else "it holds a folder train and none for evaluation"
        fix = f"Pack the training set alone and split it: headway pack {train} DST --split 0.1"
        raise UsageError(what, where=str(src), fix=fix)
    return None


def _is_dataset_folder(folder: Path) -> bool:
    """Whether a folder is a set of its own, and not a class of images."""
    folders, files = list_entries(str(folder))
    if any(name == COLUMNS_FILE or name.endswith(SHARD_EXTENSIONS) for name in files):
        return True
    return bool(folders) and not any(map(is_image, files))


def _find_foreign_parts(src: Path) -> _SplitPaths | None:
    """The parts of foreign data, such as CIFAR-10's; the query of `cifar-100-python?labels=coarse` goes to each."""
    from headway.data.formats import detect

    path, mark, query = (str(src), "", "") if src.exists() else str(src).partition("?")
    listed = os.path.isfile(path) and Path(path).suffix.lower() in LISTING_EXTENSIONS
    if not os.path.exists(path) or listed or (os.path.isdir(path) and detect.is_image_folder(Path(path))):
        return None
    names = detect.list_parts(Path(path))
    evaluation = next((name for name in EVAL_NAMES if name in names), None)
    if "train" not in names or evaluation is None:
        return None
    unused = [name for name in names if name not in ("train", evaluation)]
    train, held_out = (Path(f"{path}/{name}{mark}{query}") for name in ("train", evaluation))
    return _SplitPaths(train, held_out, unused)
