"""Small photographs for the export bench: scikit-learn's digits in colour, in sizes that a resize must handle."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

import headway

Labels = Literal["class", "multi", "value"]
SIZE = 12
"""Side of the images that a network gets. They are stored with sides of 19 to 45 pixels, so that each is shrunk."""


def pack_pictures(folder: Path, labels: Labels = "class", count: int | None = None) -> Path:
    """Packs the digits into folder/LABELS.packed/train and /eval, and returns that folder.

    Each digit is enlarged to a size of its own, tinted, and saved as JPEG or PNG. Pixels matter: a network that sees
    them in another order of the channels, another range, or a pixel to the side, answers otherwise.

    Args:
        labels: the digit; its parity and whether it is large (several labels); or its number and brightness.
        count: the first digits only.
    """
    # Here: the import takes a second, also of each process that collects the tests.
    from sklearn.datasets import load_digits

    digits, source = load_digits(), folder / labels
    source.mkdir(parents=True)
    random, rows = np.random.default_rng(7), []
    for number, (image, digit) in enumerate(zip(digits.images[:count], digits.target[:count], strict=True)):
        width, height = random.integers(19, 46, 2).tolist()
        tint = random.uniform(0.3, 1, 3)
        enlarged = Image.fromarray((image * (255 / 16)).astype(np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        pixels = np.asarray(enlarged)[..., None] * tint + random.normal(0, 12, (height, width, 3))
        name = f"{number:04d}.{'jpg' if number % 3 else 'png'}"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(source / name, quality=92)
        groups = [group for group, applies in (("odd", digit % 2), ("large", digit > 4)) if applies]
        row: dict[str, Any] = {"path": name}
        if labels == "class":
            row["label"] = f"digit {digit}"
        elif labels == "multi":
            row["labels"] = ";".join(groups)
        else:
            row["value"] = float(digit)
        rows.append(row)
    with (source / "labels.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    packed = folder / f"{labels}.packed"
    headway.pack(source / "labels.csv", packed, mode="keep", split=0.3, threads=1)
    return packed


def train_network(packed: Path, run: Path, **changes: Any) -> Path:
    """Trains a recipe on packed pictures into the folder `run`. Args: changes: parts of the recipe, merged."""
    tree: dict[str, Any] = {
        "data": {"train": str(packed / "train"), "eval": str(packed / "eval"), "threads": 1, "size": SIZE},
        "model": {"factory": "headway.model:small_net", "args": {"width": 8}},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "schedule": "cosine",
        "batch": 64,
        "epochs": 3,
        "precision": "fp32",
        "evaluate": {"batch": 128},
    }
    for key, part in changes.items():
        tree[key] = {**tree.get(key, {}), **part} if isinstance(part, dict) else part
    headway.train(tree, run=run, progress=False)
    return run
