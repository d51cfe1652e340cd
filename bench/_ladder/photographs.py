"""The images of the ladder: CIFAR-10 as loose files, and photographs cut to squares of two sizes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from PIL import Image

from bench._arms import ROOT

QUALITY = 90


def cifar(folder: Path, per_class: int | None) -> Path | None:
    """CIFAR-10's training files as CLASS/NAME in a folder that is not there yet; None, and said, where there are none.

    Args:
        per_class: so many files of each class are copied; None: the folder is a link to all of them.
    """
    source = find_source()
    if source is None:
        return None
    if per_class is None:
        folder.symlink_to(source / "train")
        return folder
    for one in sorted((source / "train").iterdir()):
        (folder / one.name).mkdir(parents=True)
        for file in sorted(one.iterdir())[:per_class]:
            shutil.copyfile(file, folder / one.name / file.name)
    return folder


def find_source() -> Path | None:
    """$HEADWAY_CIFAR10, or where the tests find it."""
    named = os.environ.get("HEADWAY_CIFAR10")
    shared = Path(os.environ.get("HEADWAY_TEST_DATA") or ROOT.parent / "shared/data")
    source = Path(named) if named else shared / "cifar10"
    if not named and not source.is_dir() and (shared / "unpack").is_file():
        cache = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache/headway-data")
        subprocess.run([shared / "unpack", cache], check=True)  # returns at once where it was done before
        source = cache / "cifar10"
    if not (source / "train").is_dir():
        print(f"no CIFAR-10 in {source}: set HEADWAY_CIFAR10 to the folder that has train/CLASS/NAME")
        return None
    return source.absolute()


def squares(photographs: Path, folder: Path, sides: tuple[int, ...]) -> int:
    """Writes the centre of each photograph as a square JPEG for every side, as FOLDER/SIDE/CLASS/NAME.jpg.

    Returns:
        how many there are of a side: those whose shorter side is as long as all of them, as none is enlarged.
    """
    count = 0
    for path in sorted(photographs.rglob("*.JPEG")):
        with Image.open(path) as image:
            shorter = min(image.size)
            if shorter < max(sides):
                continue
            left, top = (image.width - shorter) // 2, (image.height - shorter) // 2
            centre = image.convert("RGB").crop((left, top, left + shorter, top + shorter))
        for side in sides:
            target = folder / str(side) / path.parent.name / f"{path.stem}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            centre.resize((side, side), Image.Resampling.LANCZOS).save(target, quality=QUALITY)
        count += 1
    return count
