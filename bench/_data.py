"""Finds the real images for the benches, in the same place as the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench._arms import ROOT


def images(folder: Path, most: int | None = None) -> Path | None:
    """Copies 250 ImageNet files into folders of their classes. Returns None, and says it, where there are none.

    Args:
        most: the first files are enough. None: all of them.
    """
    source = Path(os.environ.get("HEADWAY_TEST_DATA") or ROOT.parent / "shared/data")
    if not (source / "imagenet-250").is_dir():
        if not (source / "unpack").is_file():
            print(f"no real images in {source}: set HEADWAY_TEST_DATA to the folder that has imagenet-250")
            return None
        target = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache/headway-data")
        subprocess.run([source / "unpack", target], check=True)  # returns at once where it was done before
        source = target
    for path in sorted((source / "imagenet-250").glob("*.JPEG"))[:most]:
        target = folder / path.name.partition("_")[0]
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name)
    return folder
