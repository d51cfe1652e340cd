"""Crop and resize on a device: the native core's bytes, whatever the box and the size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests._waits import waits_refused

from headway.data import native
from headway.data.crops import MOST_DEVICE_SCALE
from headway.data.decode import Decoder, build_decoder
from headway.data.decode_request import DecodeRequest
from headway.data.ops import resize
from headway.data.ops.resize import crop_and_resize, plan_resize
from headway.data.records import Records
from headway.data.reference import RecordKind

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    found = build_decoder(1, "native")
    yield found
    found.close()


def decode(by: Decoder, images: NDArray[np.uint8], boxes: NDArray[np.float32], size: tuple[int, int]) -> torch.Tensor:
    b, height, width, channels = images.shape
    out = np.empty((b, *size, channels), np.uint8)
    shapes = np.tile(np.array([height, width, channels], np.uint32), (b, 1))
    kinds = np.full(b, RecordKind.RAW, np.uint8)
    assert not by.decode(DecodeRequest(Records.from_rows(images), boxes, out, kinds=kinds, shapes=shapes)).any()
    return torch.from_numpy(out)


def resized(images: NDArray[np.uint8], boxes: NDArray[np.float32], size: tuple[int, int]) -> torch.Tensor:
    plan = plan_resize(boxes, (images.shape[1], images.shape[2]), size)
    return crop_and_resize(torch.from_numpy(images), plan)


def draw_boxes(
    random: np.random.Generator, b: int, sides: tuple[int, int], size: tuple[int, int], whole: bool
) -> NDArray[np.float32]:
    """Boxes inside the images, at most MOST_DEVICE_SCALE times the output; of whole pixels or not."""
    columns = []
    for side, out in zip(sides, size, strict=True):
        most = min(side, MOST_DEVICE_SCALE * out)
        length = random.uniform(0.5, most, b).astype(np.float32)
        if whole:
            length = np.clip(np.rint(length), 1, np.floor(most)).astype(np.float32)
        low = random.uniform(0, side - length).astype(np.float32)
        columns += [np.floor(low) if whole else low, length]
    top, height, left, width = columns
    return np.stack([left, top, width, height], axis=1).astype(np.float32)


@given(
    st.tuples(st.integers(1, 70), st.integers(1, 70)), st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from([1, 3]), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_it_gives_the_native_cores_bytes(
    decoder: Decoder, sides: tuple[int, int], size: tuple[int, int], channels: int, whole: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    # Of two values, errors of weights show most.
    images = random.choice(np.array([0, 255] if seed % 2 else range(256), np.uint8), (5, *sides, channels))
    boxes = draw_boxes(random, 5, sides, size, whole)
    found = resized(images, boxes, size)
    assert torch.equal(found, decode(decoder, images, boxes, size))


def test_blocks_and_exact_boxes_change_nothing(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    images = random.integers(0, 256, (9, 32, 40, 3), np.uint8)
    # A part that is not resized at all is copied there.
    boxes = np.tile(np.array([3, 5, 24, 16], np.float32), (9, 1))
    found = resized(images, boxes, (16, 24))
    assert torch.equal(found, torch.from_numpy(images[:, 5:21, 3:27]))
    boxes = draw_boxes(random, 9, (32, 40), (16, 24), True)
    found = resized(images, boxes, (16, 24))
    monkeypatch.setattr(resize, "CPU_BLOCK_VALUES", 1)
    assert torch.equal(resized(images, boxes, (16, 24)), found)
    assert torch.equal(found, decode(decoder, images, boxes, (16, 24)))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bytes_without_a_wait() -> None:
    random = np.random.default_rng(5)
    images = random.integers(0, 256, (16, 96, 130, 3), np.uint8)
    boxes = draw_boxes(random, 16, (96, 130), (64, 48), True)
    plan, there = plan_resize(boxes, (96, 130), (64, 48)), torch.from_numpy(images).cuda()
    with waits_refused():
        found = crop_and_resize(there, plan)
    assert torch.equal(found.cpu(), crop_and_resize(torch.from_numpy(images), plan))
