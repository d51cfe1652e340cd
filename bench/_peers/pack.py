"""Packs a folder again and again with the Headway of one source tree: this one's, or that of an older commit."""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from bench._peers.serve import argument, serve


def packs(source: str, target: Path) -> Iterator[int]:
    """The number of images of each pack, then 0 once it is removed, so that the clock sees the pack alone."""
    while True:
        yield headway.pack(source, target, mode="seekable").samples
        shutil.rmtree(target)
        yield 0


if __name__ == "__main__":
    asked = argument()
    # Before the finder of an editable install, which knows one tree only.
    sys.meta_path.insert(0, importlib.machinery.PathFinder)
    sys.path.insert(0, asked["tree"])
    import headway

    if not Path(headway.__file__).is_relative_to(asked["tree"]):
        sys.exit(f"headway was found in {headway.__file__}")
    target = Path(asked["target"])
    serve(packs(asked["source"], target), version=asked["version"], kernel="libjpeg-turbo, our own", drain=1)
