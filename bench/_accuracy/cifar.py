"""CIFAR-10 for the accuracy benches: packed once as pixels, and as tensors in memory."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import torch

import headway
from headway.data.pack import pack


def packed(side: int = 32) -> Path:
    """The folder with train/ and eval/ of CIFAR-10 as raw pixels, by default of its own size; packed at the first
    call."""
    target = _cache() / f"cifar10-pixels{'' if side == 32 else f'-{side}'}.packed"
    if not target.exists():
        source = find_source()
        print(f"packing {source} into {target}, once", file=sys.stderr)
        pack(source, target, mode="raw" if side == 32 else f"raw,resize={side}")
    return target


def part(folder: Path, per_class: int, held_out: int, mode: str = "raw") -> Path:
    """The same of the first images of each class, in a folder that is not there yet.

    Args:
        mode: `keep` leaves them JPEG files.
    """
    source, links = find_source(), folder / "images"
    for which, count in (("train", per_class), ("test", held_out)):
        for one in sorted((source / which).iterdir()):
            (links / which / one.name).mkdir(parents=True)
            for file in sorted(one.iterdir())[:count]:
                (links / which / one.name / file.name).symlink_to(file)
    pack(links, folder / "part.packed", mode=mode)
    return folder / "part.packed"


def _cache() -> Path:
    return Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache/headway-data")


def find_source() -> Path:
    """$HEADWAY_CIFAR10, or cifar10 in the cache folder: train/CLASS/NAME and test/CLASS/NAME."""
    source = Path(os.environ.get("HEADWAY_CIFAR10") or _cache() / "cifar10").absolute()
    if not (source / "train").is_dir() or not (source / "test").is_dir():
        sys.exit(f"CIFAR-10 is not in {source}: set HEADWAY_CIFAR10 to the folder that has train/ and test/")
    return source


def tensors(folder: Path, samples: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 [n, 32, 32, 3] and labels int64 [n] of a packed set, or of its first samples."""
    with closing(headway.open(folder)) as dataset:
        loader = headway.Loader(dataset, batch=1000, stop=samples)
        parts = [(batch.images.clone(), batch.labels.clone()) for batch in loader]
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)
