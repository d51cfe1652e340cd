"""What the tests of local sets share: sets of 40 images of one size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.decode import build_decoder
from headway.data.decode_request import DecodeRequest
from headway.data.tiers.tier import MappedTier, Tier

N = 40
WIDTH, HEIGHT = 40, 30


def mapped(data: Dataset) -> Tier:
    return MappedTier(data, "")


def pixels_of(data: Dataset) -> NDArray[np.uint8]:
    """Every image, decoded by the reference on its own."""
    out = np.empty((len(data), HEIGHT, WIDTH, data.description.channels), np.uint8)
    reference = build_decoder(1, "pillow")
    kinds = np.where(data.flags & FLAG_RAW, 1, 0).astype(np.uint8)
    shapes = np.tile(np.array([HEIGHT, WIDTH, data.description.channels], np.uint32), (len(data), 1))
    boxes = np.tile(np.array([0, 0, WIDTH, HEIGHT], np.float32), (len(data), 1))
    reference.decode(DecodeRequest(data.read(range(len(data))), boxes, out, kinds=kinds, shapes=shapes))
    reference.close()
    return out


def images(tier: Tier, ids: NDArray[np.int64], channels: int = 3) -> NDArray[np.uint8]:
    records = [np.frombuffer(record, np.uint8) for record in tier.read(ids)]
    return np.array(records).reshape(len(ids), HEIGHT, WIDTH, channels)


SOME = np.array([3, 0, 39, 3, 17])
