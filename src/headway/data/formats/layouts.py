"""Layouts that look like class folders and are none: images beside their masks or annotations."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.core.errors import DataError

# Folders of the images of such layouts, and of what belongs to each image. `jpegimages` and `segmentationclass` are
# Pascal VOC's, `leftimg8bit` and `gtfine` those of Cityscapes.
_IMAGES = re.compile("images?|imgs?|jpegimages|photos|pictures|leftimg8bit")
_TARGETS = re.compile(
    "masks?|labels?|annotations?|annots|segmentations?|segmentation(class|object)|seg|gt|groundtruth|gt(fine|coarse)|"
    "depth|b?boxes|keypoints|targets"
)
_SUFFIX = re.compile(r"[_-]?(mask|seg|segmentation|gt|label|labels|annotation)$", re.IGNORECASE)

_PAIRED_SHARE = 0.5
"""Share of the images whose names have to occur in both folders."""

_SCOPE = "Headway learns classes, several labels or numbers of a whole image"


def check_layout(root: Path, images_by_folder: Mapping[str, Sequence[str]]) -> None:
    """Raises DataError if folders hold images and their masks or annotations, instead of classes.

    Args:
        images_by_folder: names of the images below each folder of `root`.
    """
    image_folders = [name for name in images_by_folder if _is_named(name, _IMAGES)]
    for target in (name for name in images_by_folder if _is_named(name, _TARGETS)):
        stems = set(map(_get_stem, images_by_folder[target]))
        if not stems and (image_folders or _has_annotations(root / target)):
            what = f"{target!r} holds no images: it looks like annotations, and not like a class"
            raise DataError(f"{what}. {_SCOPE}", where=str(root), fix=_write_fix(target))
        for images in image_folders:
            pairs = stems & set(map(_get_stem, images_by_folder[images]))
            if images != target and len(pairs) > _PAIRED_SHARE * len(stems):
                what = (
                    f"{images!r} and {target!r} look like images and their masks, and not like two classes: "
                    f"{len(pairs):,} names are in both"
                )
                raise DataError(f"{what}. {_SCOPE}", where=str(root), fix=_write_fix(target))


def _write_fix(target: str) -> str:
    return (
        f"If {target!r} is a class, rename its folder. Else lay the images out as CLASS/NAME.jpg, or list them in a CSV"
    )


def _is_named(name: str, pattern: re.Pattern[str]) -> bool:
    # train_masks and images-2017 count; Masks is a folder of masks too.
    words = re.findall(r"[a-z]+|\d+", name.lower())
    return any(map(pattern.fullmatch, (*words, "".join(words))))


def _get_stem(name: str) -> str:
    return _SUFFIX.sub("", os.path.splitext(os.path.basename(name))[0])


def _has_annotations(folder: Path) -> bool:
    """Returns True if the files in a folder are those of COCO (.json), Pascal VOC (.xml) or YOLO (.txt)."""
    return any(name.lower().endswith((".json", ".xml", ".txt")) for name in os.listdir(folder))
