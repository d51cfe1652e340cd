"""Shared by the lab scripts: data sets, a small network, and counts of right answers."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import headway
from headway.core.errors import HeadwayError, UsageError

DIGITS = Path("digits-idx")
"""Folder of scikit-learn's digits, which is written where no other folder is given."""
HELD_OUT = ("test", "eval", "val")
"""Names of a held-out set. `test` is also that of the files t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte."""


def open_sets(folder: Path | None) -> tuple[headway.Dataset, headway.Dataset]:
    """Opens the training set and the held-out set of a folder; without a folder, those of scikit-learn's digits.

    The folder holds IDX files as Fashion-MNIST has them, CIFAR-10, or two packs. What cannot be read ends the script
    with a sentence.
    """
    folder = write_digits(DIGITS) if folder is None else folder
    try:
        train, held_out = headway.open(folder / "train"), open_held_out(folder)
    except UsageError as error:
        fix = f"The lab needs a training set and a held-out set. To split one set: headway pack {folder} lab.packed"
        raise SystemExit(f"{error}\n{fix} --split 0.2, and then name lab.packed.") from None
    except HeadwayError as error:
        raise SystemExit(str(error)) from None
    # A label is the number of a class in the list of its own set.
    if not train.classes or train.classes != held_out.classes:
        what = f"the training set has the classes [{', '.join(train.classes)}], and the held-out set"
        raise SystemExit(f"{folder}: {what} [{', '.join(held_out.classes)}]. The lab needs the same classes in both.")
    return train, held_out


def open_held_out(folder: Path) -> headway.Dataset:
    """Opens the first held-out set that the folder has. Raises UsageError if it has none."""
    for name in HELD_OUT[:-1]:
        try:
            return headway.open(folder / name)
        except UsageError:
            continue
    return headway.open(folder / HELD_OUT[-1])


def write_digits(folder: Path) -> Path:
    """Writes scikit-learn's digits into a new folder as IDX files, a fifth of them held out. Returns the folder."""
    if folder.exists():
        return folder
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    # Several processes may come here at once: each writes a folder of its own, and the first one names it.
    own = folder.with_name(f"{folder.name}.{os.getpid()}")
    own.mkdir()
    for name, part in (("t10k", order[: len(order) // 5]), ("train", order[len(order) // 5 :])):
        write_idx(own / f"{name}-images-idx3-ubyte", images[part])
        write_idx(own / f"{name}-labels-idx1-ubyte", digits.target[part].astype(np.uint8))
    try:
        own.rename(folder)
    except OSError:
        shutil.rmtree(own)
    return folder


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Writes an array as IDX: two zeros, the type, the number of sizes, the sizes, the values."""
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(head + values.tobytes())


def build_network(data: headway.Dataset, layers: Sequence[tuple[int, int]]) -> nn.Module:
    """Builds convolutions with batch norm and a linear layer, for the images and classes of a data set.

    Args:
        layers: channels and stride of each convolution.
    """
    modules: list[nn.Module] = []
    channels = data.description.channels
    for width, stride in layers:
        modules += [nn.Conv2d(channels, width, 3, stride, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    # Images of any size end as 4 x 4 means.
    modules += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, len(data.classes))]
    return nn.Sequential(*modules)


def prepare(images: torch.Tensor) -> torch.Tensor:
    """Makes floats between 0 and 1, [b, C, H, W], of a batch of bytes, [b, H, W, C]."""
    return images.permute(0, 3, 1, 2) / 255


def count_right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Counts the right answers of a batch, and all of them: int64 [2]."""
    return torch.stack([(outputs.argmax(dim=1) == labels).sum(), torch.tensor(len(labels))])


@torch.no_grad()
def evaluate(model: nn.Module, loader: headway.Loader) -> torch.Tensor:
    """Counts the right answers on a data set, and all of them: int64 [2]. Leaves the network in training mode."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64)
    for images, labels in loader:
        counts += count_right(model(prepare(images)), labels)
    model.train()
    return counts
