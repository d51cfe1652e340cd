"""The two requests that a `Decoder` answers: decode a batch of records, or copy a batch of raw images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.data.records import Records

Pixels = NDArray[np.uint8]


@final
@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """k records to decode, and the output array of their pixels.

    Attributes:
        records: the bytes to decode.
        boxes: part of each image that is resized to the output, (left, top, width, height) in pixels; float32 [k, 4].
        out: uint8 [k, H, W, C], with C 1 or 3; written to.
        flips: bool [k], images to mirror left to right; None: none.
        vertical_flips: bool [k], images to mirror top to bottom; None: none.
        kinds: uint8 [k], `RecordKind` of each record; None: all are image files.
        shapes: uint32 [k, 3], height, width and channels of each raw record.
        crc: uint32 [k], expected crc32c of each record; None: no checksum is compared.
        check: bool [k], records whose checksum is compared; None: all.
        scaled: decode a JPEG at 1/2, 1/4 or 1/8 if its box is that much larger than the output: faster, inexact.
    """

    records: Records
    boxes: NDArray[np.float32]
    out: Pixels
    flips: NDArray[np.bool_] | None = None
    vertical_flips: NDArray[np.bool_] | None = None
    kinds: NDArray[np.uint8] | None = None
    shapes: NDArray[np.uint32] | None = None
    crc: NDArray[np.uint32] | None = None
    check: NDArray[np.bool_] | None = None
    scaled: bool = False


@final
@dataclass(frozen=True, slots=True)
class GatherRequest:
    """k raw images of the output's size to copy; the result equals `headway.flip_and_translate`.

    Attributes:
        records: the raw pixels.
        out: uint8 [k, H, W, C]; written to.
        planar: the records are [C, H, W] instead of [H, W, C].
        shifts: int [k, 2], pixels (down, right) that each image moves after the flips, with reflection padding. None:
            no image moves.
        flips: bool [k], images to mirror left to right; None: none.
        vertical_flips: bool [k], images to mirror top to bottom; None: none.
        crc, check: as in `DecodeRequest`.
    """

    records: Records
    out: Pixels
    planar: bool = False
    shifts: NDArray[np.integer] | None = None
    flips: NDArray[np.bool_] | None = None
    vertical_flips: NDArray[np.bool_] | None = None
    crc: NDArray[np.uint32] | None = None
    check: NDArray[np.bool_] | None = None
