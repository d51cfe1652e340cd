"""Source: what is to be packed, as a list of image files with their labels."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.data.dataset import LabelKind

IMAGE_ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
LISTING_ENDINGS = (".csv", ".jsonl", ".ndjson", ".json")
EVAL_NAMES = ("eval", "val", "valid", "validation", "test")
"""Folders beside `train` that are taken for the evaluation set, the first of them that is there."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Image files and their labels, not opened yet; entry i of names, paths and labels is one sample."""

    names: tuple[str, ...]
    """Paths relative to `root`, as text; no two are the same."""
    paths: tuple[str, ...]
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


def open_source(src: Path) -> Source:
    """Lists a folder of class folders, or a CSV or JSONL file.

    Raises:
        UsageError: `src` is not there, or is nothing of the kind.
        DataError: it is there, and what it holds cannot be used.
    """
    # Both import Source from here.
    from headway.data.formats.folder import list_folder
    from headway.data.formats.listing import list_file

    if src.is_dir():
        return list_folder(src)
    fix = "Name a folder laid out as CLASS/NAME.jpg, or a .csv or .jsonl file of paths and labels."
    if not src.exists():
        raise UsageError("there is no such file or folder", where=str(src), fix=fix)
    if src.suffix.lower() not in LISTING_ENDINGS:
        raise UsageError("this is neither a folder nor a list of images", where=str(src), fix=fix)
    return list_file(src)


def open_split(src: Path) -> tuple[Source, Source | None]:
    """The training set and, where `src` is a folder of two parts (train/ and one of EVAL_NAMES), the evaluation set.

    Raises: as `open_source`.
    """
    parts = _parts(src)
    if parts is None:
        return open_source(src), None
    train, evaluation, unused = parts
    note = (f"not packed: {', '.join(unused)}",) if unused else ()
    source = open_source(train)
    return replace(source, notes=source.notes + note), open_source(evaluation)


def entries(folder: str) -> tuple[list[str], list[str]]:
    """Names of the folders and of the files in a folder, hidden ones left out. Raises DataError if it is unreadable."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if not entry.name.startswith("."):
                    (folders if entry.is_dir() else files).append(entry.name)
    except OSError as error:
        raise DataError(f"the folder cannot be read ({error.strerror})", where=folder) from error
    return folders, files


def is_image(name: str) -> bool:
    """Whether a file is an image by its ending."""
    return os.path.splitext(name)[1].lower() in IMAGE_ENDINGS


def _parts(src: Path) -> tuple[Path, Path, list[str]] | None:
    """The folders of the training and the evaluation set, and the names of the other folders beside them."""
    names = {name.lower(): name for name in sorted(entries(str(src))[0])} if src.is_dir() else {}
    if "train" not in names:
        return None
    train = src / names["train"]
    folders, files = entries(str(train))
    if not folders or any(map(is_image, files)):
        return None  # a class that is called train
    named = [names[name] for name in EVAL_NAMES if name in names]
    chosen = next((name for name in named if entries(str(src / name))[0]), None)
    if chosen is not None:
        return train, src / chosen, [name for name in names.values() if name not in (train.name, chosen)]
    if named or len(names) == 1:
        what = f"{named[0]} has no class folders" if named else "it holds a folder train and none for evaluation"
        fix = f"Pack the training set alone and split it: headway pack {train} DST --split 0.1"
        raise UsageError(what, where=str(src), fix=fix)
    return None
