"""Builds bench/limit.cpp and its input: the pieces that the loader's crops need of seekable JPEGs."""

from __future__ import annotations

import os
import shlex
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np

from bench._arms import ArmError
from headway.core.random_keys import make_keys
from headway.data import native
from headway.data.crops import draw_random_resized_boxes
from headway.data.dataset import Dataset
from headway.data.order import Order

SOURCE = Path(__file__).with_name("limit.cpp")


def build(folder: Path) -> Path:
    """Compiles the limit. Raises ArmError where there is no compiler, or no header of libjpeg."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        raise ArmError(f"there is no compiler {compiler[0]}")
    program = folder / "limit"
    command = [*compiler, "-O2", "-std=c++17", str(SOURCE), "-o", str(program), "-ljpeg", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ArmError(f"{SOURCE.name} does not compile: {done.stderr.strip().splitlines()[0]}")
    return program


def write_records(train: Dataset, order: Order, samples: int, side: int, path: Path) -> None:
    """Writes what the first positions of the order need: each image's smaller JPEG and the part of it to be decoded."""
    epochs, ids = order(np.arange(samples))
    boxes = draw_random_resized_boxes(make_keys(order.seed, epochs, ids), train.width[ids], train.height[ids])
    records = train.read(ids)
    with path.open("wb") as file:
        file.write(struct.pack("<I", samples))
        for place, sample in enumerate(ids):
            region = source_region(boxes[place].tolist(), int(train.width[sample]), int(train.height[sample]), side)
            data, held = native.splice(records[place], region)
            x0, y0, x1, y1 = (np.array(region) - np.array([held[0], held[1]] * 2)).tolist()
            file.write(struct.pack("<Iiiii", len(data), x0, y0, x1, y1) + data)


def source_region(box: list[float], image_width: int, image_height: int, side: int) -> tuple[int, int, int, int]:
    """(x0, y0, x1, y1) of the pixels that have a weight when a box is resized by an antialiased triangle."""
    left, top, width, height = box

    def reach(low: float, length: float, size: int) -> tuple[int, int]:
        scale = length / side
        beyond = max(scale, 1.0) - scale / 2  # the kernel's support about the centre of the first output pixel
        return max(0, int(low - beyond + 0.5)), min(size, int(low + length + beyond + 0.5))

    x0, x1 = reach(left, width, image_width)
    y0, y1 = reach(top, height, image_height)
    return x0, y0, x1, y1
