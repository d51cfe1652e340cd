"""Writes scikit-learn's handwritten digits (1,797 real images, 8 x 8, grey) as an image folder: DEST/CLASS/NNNN.png.

The values 0 to 16 become 0 to 255. PNG loses nothing, so the files hold what scikit-learn holds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("The digits come with scikit-learn: python -m pip install -c constraints.txt '.[demo]'") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path, metavar="DEST", help="the folder to write: new, or empty")
    dest: Path = parser.parse_args().dest
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        parser.error(f"{dest} exists and is not an empty folder. Name another one, or remove it.")
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    for number, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
        folder = dest / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:04d}.png")
    print(f"{len(pixels)} images in {dest}")


if __name__ == "__main__":
    main()
