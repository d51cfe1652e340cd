"""Decodes one batch: the Pillow reference, which defines what every other backend does.

A box (left, top, width, height) of an image is resized to the output with Pillow's antialiased bilinear kernel. A bad
image fills zeros and sets its status; it never touches its neighbours.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway.core.errors import UsageError

BACKEND = "pillow"
"""Name of what decodes here; part of a run's fingerprint, since backends may differ by 1 in a pixel."""


FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF")
"""Nothing else is opened, whatever a file is called: some of Pillow's formats start programs (EPS)."""
GRAY_MODES = frozenset({"1", "L", "LA", "La", "F", "I", "I;16", "I;16L", "I;16B", "I;16N"})


class Status(IntEnum):
    """What became of one image."""

    OK = 0
    CHECKSUM = 1
    UNDECODABLE = 2


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def center_boxes(width: NDArray[np.uint32], height: NDArray[np.uint32], out_hw: tuple[int, int]) -> NDArray[np.float32]:
    """The largest centred box with the output's aspect ratio; float32 [n, 4] (left, top, width, height)."""
    w, h = width.astype(np.float64), height.astype(np.float64)
    ratio = out_hw[1] / out_hw[0]
    box_w, box_h = np.minimum(w, h * ratio), np.minimum(h, w / ratio)
    return np.stack([(w - box_w) / 2, (h - box_h) / 2, box_w, box_h], axis=1).astype(np.float32)


def to_pixels(data: bytes | memoryview, channels: int) -> Image.Image:
    """A decoded image of mode L (1 channel) or RGB (3). Raises whatever Pillow raises of a bad one."""
    image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    mode = "L" if channels == 1 else "RGB"
    if image.mode.startswith("I"):  # 16-bit gray: Pillow's own conversion clips at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def decode_one(data: bytes | memoryview, out: NDArray[np.uint8], box: NDArray[np.float32]) -> Status:
    """Decodes one image into `out` (uint8 [H, W, C])."""
    try:
        image = to_pixels(data, out.shape[2])
        image.load()
        left, top, width, height = (float(side) for side in box)
        size = (out.shape[1], out.shape[0])
        if (left, top, width, height) != (0.0, 0.0, *size) or image.size != size:
            image = image.resize(size, Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
        out[:] = np.asarray(image).reshape(out.shape)
    except Exception:  # Pillow's plugins raise anything from OSError to struct.error on damaged bytes
        out[:] = 0
        return Status.UNDECODABLE
    return Status.OK


class Decoder:
    """Decodes batches on its own threads; Pillow lets go of the interpreter's lock while it decodes.

    Args:
        threads: how many; None: one fewer than the usable cores, at least one, so that the training loop keeps a core.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"{threads} decoding threads", fix="Set 1 or more, or leave it out.")
        self.threads = threads or max(1, usable_cores() - 1)
        self._pool = ThreadPoolExecutor(self.threads, "headway-decode") if self.threads > 1 else None

    def __call__(
        self, buffers: Sequence[bytes | memoryview], boxes: NDArray[np.float32], out: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Decodes n images into `out` (uint8 [n, H, W, C]); boxes float32 [n, 4]. Returns `Status`, uint8 [n]."""
        status = np.zeros(len(buffers), np.uint8)

        def work(low: int, high: int) -> None:
            for place in range(low, high):
                status[place] = decode_one(buffers[place], out[place], boxes[place])

        if self._pool is None:
            work(0, len(buffers))
        else:
            cuts = np.linspace(0, len(buffers), self.threads + 1).astype(int)
            for part in [self._pool.submit(work, low, high) for low, high in pairwise(cuts)]:
                part.result()
        return status

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
