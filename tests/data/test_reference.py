from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from headway.data.crops import compute_center_boxes
from headway.data.decode_request import DecodeRequest
from headway.data.records import Records
from headway.data.reference import DecodeStats, DecodeStatus, RecordKind, decode_image, decode_one, decode_record

Boxes = NDArray[np.float32]
sides = st.integers(1, 80)
SMOOTH = np.add.outer(np.arange(60) * 3, np.arange(80) * 2)[..., None] + np.arange(3) * 20


def picture(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def boxes_of(*images: Image.Image, out_hw: tuple[int, int]) -> Boxes:
    width, height = (np.array(side, np.uint32) for side in zip(*(image.size for image in images), strict=True))
    return compute_center_boxes(width, height, out_hw)


def decoded(data: bytes, size: tuple[int, int], channels: int, out_hw: tuple[int, int]) -> NDArray[np.uint8]:
    out = np.full((*out_hw, channels), 7, np.uint8)
    box = compute_center_boxes(np.array([size[0]], np.uint32), np.array([size[1]], np.uint32), out_hw)[0]
    assert decode_one(data, out, box) is DecodeStatus.OK
    return out


# Boxes


@given(width=st.integers(1, 2**20), height=st.integers(1, 2**20), out=st.tuples(sides, sides))
def test_a_box_is_the_largest_of_its_shape_in_the_middle(width: int, height: int, out: tuple[int, int]) -> None:
    boxes = compute_center_boxes(np.array([width], np.uint32), np.array([height], np.uint32), out)
    assert boxes.dtype == np.float32
    left, top, wide, high = boxes[0].astype(np.float64)
    assert wide / high == pytest.approx(out[1] / out[0], rel=1e-5)
    assert min(width - wide, height - high) == pytest.approx(0, abs=1e-6 * max(width, height))
    assert left == pytest.approx((width - wide) / 2, abs=1e-6 * width)
    assert top == pytest.approx((height - high) / 2, abs=1e-6 * height)
    assert left >= 0
    assert top >= 0


def test_boxes_of_simple_shapes() -> None:
    sizes = np.array([[64, 32], [32, 64], [32, 32], [10, 20]], np.uint32)
    assert compute_center_boxes(sizes[:, 0], sizes[:, 1], (32, 32)).tolist() == [
        [16, 0, 32, 32], [0, 16, 32, 32], [0, 0, 32, 32], [0, 5, 10, 10]
    ]  # fmt: skip
    assert compute_center_boxes(sizes[:1, 0], sizes[:1, 1], (16, 32)).tolist() == [[0, 0, 64, 32]]
    assert compute_center_boxes(sizes[:1, 0], sizes[:1, 1], (32, 16)).tolist() == [[24, 0, 16, 32]]


@settings(deadline=None, max_examples=200)
@given(width=sides, height=sides, out=st.tuples(sides, sides))
def test_pillow_takes_every_box(width: int, height: int, out: tuple[int, int]) -> None:
    """No rounding puts a box beyond its image, which Pillow would refuse."""
    image = picture("L", width, height)
    pixels = np.zeros((*out, 1), np.uint8)
    assert decode_one(encoded(image, "PPM"), pixels, boxes_of(image, out_hw=out)[0]) is DecodeStatus.OK


# Pixels


@settings(deadline=None, max_examples=60)
@given(width=sides, height=sides, out=st.tuples(sides, sides), mode=st.sampled_from(["L", "RGB"]))
def test_a_resized_image_is_what_pillow_makes_of_its_centre(
    width: int, height: int, out: tuple[int, int], mode: str
) -> None:
    image = picture(mode, width, height)
    ratio = out[1] / out[0]
    wide, high = min(width, height * ratio), min(height, width / ratio)
    left, top = (width - wide) / 2, (height - high) / 2
    expected = image.resize((out[1], out[0]), Image.Resampling.BILINEAR, box=(left, top, left + wide, top + high))
    found = decoded(encoded(image), image.size, len(mode), out)
    assert np.abs(found.squeeze().astype(int) - np.asarray(expected).squeeze()).max() <= 1  # boxes are float32


def test_an_image_of_the_right_size_keeps_its_pixels() -> None:
    image = picture("RGB", 24, 16)
    assert (decoded(encoded(image), image.size, 3, (16, 24)) == np.asarray(image)).all()
    jpeg = encoded(image, "JPEG")
    assert (decoded(jpeg, image.size, 3, (16, 24)) == np.asarray(Image.open(io.BytesIO(jpeg)))).all()


def test_any_box_of_an_image_can_be_cut_out() -> None:
    image = picture("RGB", 24, 16)
    out = np.zeros((8, 6, 3), np.uint8)
    assert decode_one(encoded(image), out, np.array([10, 5, 6, 8], np.float32)) is DecodeStatus.OK
    assert (out == np.asarray(image)[5:13, 10:16]).all()
    assert decode_one(encoded(image), out, np.array([20, 5, 6, 8], np.float32)) is DecodeStatus.UNDECODABLE


SIXTEEN = (np.arange(64, dtype=np.uint32).reshape(8, 8) * 1040).astype(np.uint16)
PALETTE = picture("RGB", 8, 8).quantize(16)
MODES = {
    "gray": (picture("L", 8, 8), "PNG"),
    "gray with alpha": (picture("LA", 8, 8), "PNG"),
    "black and white": (picture("L", 8, 8).convert("1"), "PNG"),
    "colour": (picture("RGB", 8, 8), "PNG"),
    "colour with alpha": (picture("RGBA", 8, 8), "PNG"),
    "palette": (PALETTE, "PNG"),
    "four inks": (picture("CMYK", 8, 8), "TIFF"),
    "16 bit": (Image.fromarray(SIXTEEN), "PNG"),
    "16 bit of a TIFF": (Image.fromarray(SIXTEEN), "TIFF"),
    "gray JPEG": (picture("L", 8, 8), "JPEG"),
    "four inks JPEG": (picture("CMYK", 8, 8), "JPEG"),
    "float": (Image.fromarray(np.linspace(0, 255, 64, dtype=np.float32).reshape(8, 8)), "TIFF"),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", MODES)
def test_images_of_every_mode_become_gray_or_colour(kind: str, channels: int) -> None:
    image, form = MODES[kind]
    data = encoded(image, form)
    stored = Image.open(io.BytesIO(data))
    found = decoded(data, stored.size, channels, (8, 8))
    mode = "RGB" if channels == 3 else "L"
    expected = (SIXTEEN >> 8).astype(np.uint8) if kind.startswith("16 bit") else np.asarray(stored.convert(mode))
    assert (found == (expected if expected.ndim == 3 else expected[..., None])).all()


def test_16_bits_keep_their_range() -> None:
    found = decoded(encoded(Image.fromarray(SIXTEEN)), (8, 8), 1, (8, 8)).reshape(-1).astype(int)
    assert found.tolist() == [value * 1040 >> 8 for value in range(64)]
    assert found.max() == 255


def test_transparent_palettes_are_read_without_a_warning() -> None:
    image = PALETTE.copy()
    image.info["transparency"] = bytes(range(16))
    data = encoded(image, "PNG", transparency=bytes(range(16)))
    assert "transparency" in Image.open(io.BytesIO(data)).info
    assert (decoded(data, (8, 8), 3, (8, 8)) == np.asarray(PALETTE.convert("RGB"))).all()
    assert decoded(data, (8, 8), 1, (8, 8)).shape == (8, 8, 1)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (1, 2000)])
def test_the_smallest_images_fill_any_size(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (200, 100, 50))
    for out in ((1, 1), (5, 3), (32, 32)):
        assert (decoded(encoded(image), size, 3, out) == (200, 100, 50)).all()


def test_to_pixels_gives_the_mode_of_the_channels() -> None:
    data = encoded(picture("RGB", 5, 4))
    assert (decode_image(data, 1).mode, decode_image(data, 3).mode) == ("L", "RGB")
    assert decode_image(memoryview(data), 3).size == (5, 4)


# Flips, raw pixels, smaller decodes


def test_a_flip_mirrors_what_is_decoded() -> None:
    image = picture("RGB", 24, 16)
    box = boxes_of(image, out_hw=(8, 8))[0]
    plain, mirrored = np.zeros((2, 8, 8, 3), np.uint8)
    assert decode_one(encoded(image), plain, box) is DecodeStatus.OK
    assert decode_one(encoded(image), mirrored, box, flip=True) is DecodeStatus.OK
    assert (mirrored == plain[:, ::-1]).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("stored", [1, 3])
@pytest.mark.parametrize("kind", [RecordKind.RAW, RecordKind.PLANAR])
def test_raw_pixels_become_what_their_image_becomes(kind: RecordKind, stored: int, channels: int) -> None:
    image = picture("RGB" if stored == 3 else "L", 24, 16)
    pixels = np.asarray(image).reshape(16, 24, stored)
    data = (pixels.transpose(2, 0, 1) if kind is RecordKind.PLANAR else pixels).tobytes()
    shapes, kinds = np.array([[16, 24, stored]], np.uint32), np.array([kind], np.uint8)
    expected, found = np.zeros((2, 1, 8, 6, channels), np.uint8)
    boxes = np.array([[3, 2, 12.5, 9]], np.float32)
    assert decode_one(encoded(image), expected[0], boxes[0]) is DecodeStatus.OK
    request = DecodeRequest(Records.from_buffers([data]), boxes, found, kinds=kinds, shapes=shapes)
    assert decode_record(request, 0, DecodeStats()) is DecodeStatus.OK
    assert (found == expected).all()
    short = replace(request, records=Records.from_buffers([data[:-1]]))
    assert decode_record(short, 0, DecodeStats()) is DecodeStatus.UNDECODABLE
    assert not found.any()


@pytest.mark.parametrize("size", [(64, 48), (63, 47), (9, 65)])
def test_a_smaller_decode_looks_the_same(size: tuple[int, int]) -> None:
    image = Image.fromarray((SMOOTH[: size[1] % 60, : size[0]] % 256).astype(np.uint8)).resize(size)
    data = encoded(image, "JPEG", quality=95)
    box, out = np.array([0, 0, *size], np.float32), np.zeros((2, 6, 4, 3), np.uint8)
    for scaled in (False, True):
        assert decode_one(data, out[int(scaled)], box, scaled=scaled) is DecodeStatus.OK
    assert np.abs(out[0].astype(int) - out[1]).max() <= 12
    assert decode_one(encoded(image), out[1], box, scaled=True) is DecodeStatus.OK  # a PNG has no smaller decode
    assert np.abs(out[0].astype(int) - out[1]).max() <= 12


def test_an_empty_box_is_refused() -> None:
    out = np.full((4, 4, 3), 7, np.uint8)
    for box in ([2, 2, 0, 3], [2, 2, 3, 0], [2, 2, -1, 3], [np.nan, 0, 3, 3]):
        assert decode_one(encoded(picture("RGB", 8, 8)), out, np.array(box, np.float32)) is DecodeStatus.UNDECODABLE
        assert not out.any()
