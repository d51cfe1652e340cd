"""What the tests of the store share: tiny different images, folders of them, and stores."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headway.lifecycle.store.records import Change
from headway.lifecycle.store.store import Store


@cache
def draw(number: int) -> bytes:
    """The bytes of a PNG of noise; no two numbers give near copies."""
    out = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (9, 8), np.uint8)
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


@cache
def draw_colour(number: int) -> bytes:
    out = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (9, 8, 3), np.uint8)
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


def write(folder: Path, files: dict[str, int]) -> Path:
    """Writes images by name."""
    for name, number in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw(number))
    return folder


def classes(folder: Path, per_class: int = 6, first: int = 0) -> Path:
    """A folder of two classes, cat and dog."""
    files = {}
    for number, name in enumerate(("cat", "dog")):
        files |= {f"{name}/{k}.png": first + number * per_class + k for k in range(per_class)}
    return write(folder, files)


def state(store: Store, address: str) -> dict[str, tuple[str | None, str, str]]:
    """By name: label, split and ID of each sample of a version."""
    return {one.name: (one.label, one.split, one.sample) for one in store.list_samples(address)}


def addition(folder: Path, name: str, number: int, label: str | None = "cat", **more: Any) -> Change:
    """The addition of one image."""
    path = folder / f"{number}.png"
    if not path.exists():
        path.write_bytes(draw(number))
    return Change(operation="add", name=name, label=label, file=path, **more)
