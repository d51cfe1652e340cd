"""The arms of bench.everyday that load photographs: Headway's Loader and PyTorch's DataLoader, in one process each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import PIL
import torch
from torch.utils.data import DataLoader

import headway
from bench._common import median
from bench._everyday.photos import CHEAP, JITTERED, SIDE, Photos, shift_brightness
from bench._peers.serve import argument, serve

CALLS = 200


def count(batches: Any) -> Iterator[int]:
    """Images of each batch, epoch after epoch."""
    while True:
        for _, labels in batches:
            yield len(labels)


def load_by_torch(dataset: Photos, asked: dict[str, Any]) -> Iterator[int]:
    workers = asked["workers"]
    return count(DataLoader(dataset, asked["batch"], shuffle=True, num_workers=workers, persistent_workers=True))


def load_by_headway(dataset: Photos, asked: dict[str, Any]) -> Iterator[int]:
    return count(headway.Loader(dataset, batch=asked["batch"], seed=1, workers=asked["workers"]))


def decode_by_headway(asked: dict[str, Any]) -> Iterator[int]:
    how: dict[str, Any] = {"size": SIDE, "crop": "random", "flip": True, "stop": math.inf}
    threads, workers = asked["workers"], asked["workers"]
    return count(
        headway.Loader(
            asked["pack"],
            batch=asked["batch"],
            seed=1,
            threads=threads,
            workers=workers,
            transform=shift_brightness,
            **how,
        )
    )


def time_transform() -> dict[str, float | str]:
    """Milliseconds of the cheap transform, on one image."""
    pixels, taken = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8), []
    for _ in range(CALLS):
        begun = perf_counter()
        shift_brightness(pixels)
        taken.append(1e3 * (perf_counter() - begun))
    return {"ms a transform": median(taken)[0]}


def main() -> None:
    asked = argument()
    paths = sorted(Path(asked["images"]).rglob("*.JPEG"))
    arms: dict[str, Callable[[], Iterator[int]]] = {
        "own": lambda: load_by_headway(Photos(paths, JITTERED), asked),
        "own, torch": lambda: load_by_torch(Photos(paths, JITTERED), asked),
        "native": lambda: decode_by_headway(asked),
        "cheap, torch": lambda: load_by_torch(Photos(paths, CHEAP), asked),
    }
    serve(
        arms[asked["arm"]](),
        version=f"headway {headway.__version__}, torch {torch.__version__}, Pillow {PIL.__version__}",
        kernel="Pillow's antialiased bilinear",
        facts=time_transform if asked["arm"] == "native" else dict,
    )


if __name__ == "__main__":
    main()
