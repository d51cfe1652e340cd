"""The native resampler against Pillow's: raw images, so that no decoder has a part in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.data._isas import each_isa

from headway.data import native
from headway.data.decode import Decoder, build_decoder
from headway.data.decode_request import DecodeRequest
from headway.data.records import Records
from headway.data.reference import DecodeStatus, RecordKind

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")

Pixels = NDArray[np.uint8]
Box = tuple[float, float, float, float]
channels = st.sampled_from([1, 3])
outputs = st.tuples(st.integers(1, 70), st.integers(1, 70), channels)


@pytest.fixture(scope="module")
def isas() -> Iterator[list[Decoder]]:
    with each_isa() as found:
        yield found


@pytest.fixture(scope="module")
def reference() -> Iterator[Decoder]:
    found = build_decoder(1, "pillow")
    yield found
    found.close()


def picture(height: int, width: int, depth: int, seed: int) -> Pixels:
    """Noise; of two values where the seed is odd, as errors of weights show most there."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        return rng.choice(np.array([0, 255], np.uint8), (height, width, depth))
    return rng.integers(0, 256, (height, width, depth), np.uint8)


def whole(image: Pixels) -> Box:
    return (0, 0, image.shape[1], image.shape[0])


def resized(
    by: Decoder,
    image: Pixels,
    box: Box,
    shape: tuple[int, int, int],
    *,
    flip: bool = False,
    vertical_flip: bool = False,
    planar: bool = False,
) -> Pixels:
    """What becomes of one raw image; the memory around it stays as it was."""
    data = image.transpose(2, 0, 1) if planar else image
    out = np.full((3, *shape), 7, np.uint8)
    request = DecodeRequest(
        Records.from_buffers([data.tobytes()]), np.array([box], np.float32), out[1:2],
        flips=np.array([flip]), vertical_flips=np.array([vertical_flip]),
        kinds=np.array([RecordKind.PLANAR if planar else RecordKind.RAW], np.uint8),
        shapes=np.array([image.shape], np.uint32),
    )  # fmt: skip
    status = by.decode(request)
    assert status[0] == DecodeStatus.OK
    assert (out[[0, 2]] == 7).all()
    return out[1]


def check(isas: list[Decoder], reference: Decoder, image: Pixels, box: Box, shape: tuple[int, int, int]) -> Pixels:
    """Every instruction set gives the same bytes, and they differ from the reference's by 1 at most."""
    expected = resized(reference, image, box, shape)
    first, *others = (resized(by, image, box, shape) for by in isas)
    for other in others:
        np.testing.assert_array_equal(other, first)
    assert np.abs(first.astype(int) - expected).max() <= 1
    return first


@st.composite
def boxes(draw: st.DrawFn, width: int, height: int) -> Box:
    """Anywhere inside an image, down to a hundredth of a pixel."""
    sides = []
    for size in (width, height):
        side = st.floats(0, size, width=32)
        low, high = sorted((draw(side), draw(side)))
        length = float(np.float32(high - low))
        assume(length >= 0.01 and np.float32(low + length) <= size)
        sides.append((low, length))
    return (sides[0][0], sides[1][0], sides[0][1], sides[1][1])


@st.composite
def crops(draw: st.DrawFn, most: int = 120) -> tuple[Pixels, Box]:
    """An image and a box of it."""
    height, width = draw(st.integers(1, most)), draw(st.integers(1, most))
    image = picture(height, width, draw(channels), draw(st.integers(0, 2**32 - 1)))
    return image, draw(boxes(width, height))


@settings(max_examples=250, deadline=None)
@given(crop=crops(), out=outputs)
def test_any_box_is_resized_as_pillow_does(
    isas: list[Decoder], reference: Decoder, crop: tuple[Pixels, Box], out: tuple[int, int, int]
) -> None:
    check(isas, reference, *crop, out)


@pytest.mark.parametrize("box", [(20.3, 17.6, 290.2, 280.4), (0, 0, 500, 375), (180.5, 90, 100, 100)])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_crops_of_training_are_resized_as_pillow_does(
    isas: list[Decoder], reference: Decoder, box: Box, depth: int
) -> None:
    check(isas, reference, picture(375, 500, depth, 1), box, (224, 224, 3))


@pytest.mark.parametrize("long", [1000, 3001, 7777, 32767])
@pytest.mark.parametrize("short", [1, 5, 224])
@pytest.mark.parametrize("seed", [2, 3])
def test_long_sides_are_resized_as_pillow_does(
    isas: list[Decoder], reference: Decoder, long: int, short: int, seed: int
) -> None:
    """Sums of up to 65,534 rows or columns."""
    image = picture(3, long, 3, seed)
    check(isas, reference, image, whole(image), (2, short, 3))
    upright = np.ascontiguousarray(image.transpose(1, 0, 2))
    check(isas, reference, upright, whole(upright), (short, 2, 3))


@settings(deadline=None)
@given(out=outputs, colour=st.tuples(*[st.integers(0, 255)] * 3))
def test_one_pixel_fills_the_output(
    isas: list[Decoder], reference: Decoder, out: tuple[int, int, int], colour: tuple[int, int, int]
) -> None:
    image = np.array(colour, np.uint8).reshape(1, 1, 3)
    result = check(isas, reference, image, whole(image), out)
    assert (result == (image if out[2] == 3 else result[0, 0])).all()


@settings(deadline=None)
@given(data=st.data(), long=st.integers(1, 900), short=st.integers(1, 40), upright=st.booleans(), out=outputs)
def test_an_even_image_stays_even(
    isas: list[Decoder], data: st.DataObject, long: int, short: int, upright: bool, out: tuple[int, int, int]
) -> None:
    width, height = (short, long) if upright else (long, short)
    value = data.draw(st.integers(0, 255))
    image, box = np.full((height, width, out[2]), value, np.uint8), data.draw(boxes(width, height))
    for by in isas:
        assert (resized(by, image, box, out) == value).all()


@settings(deadline=None)
@given(data=st.data(), height=st.integers(1, 60), width=st.integers(1, 60), depth=channels, flip=st.booleans())
def test_a_box_of_the_outputs_size_on_whole_pixels_is_copied(
    isas: list[Decoder], data: st.DataObject, height: int, width: int, depth: int, flip: bool
) -> None:
    image = picture(height, width, depth, 4)
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    bottom, right = data.draw(st.integers(top + 1, height)), data.draw(st.integers(left + 1, width))
    box, expected = (left, top, right - left, bottom - top), image[top:bottom, left:right]
    for by in isas:
        result = resized(by, image, box, (bottom - top, right - left, depth), flip=flip)
        np.testing.assert_array_equal(result, expected[:, ::-1] if flip else expected)
        upside_down = resized(by, image, box, result.shape, flip=flip, vertical_flip=True)
        np.testing.assert_array_equal(upside_down, result[::-1])


@settings(deadline=None)
@given(crop=crops(), out=outputs)
def test_identities(isas: list[Decoder], crop: tuple[Pixels, Box], out: tuple[int, int, int]) -> None:
    """Mirrored is mirrored at the end, planar is interleaved, and gray is three equal colours."""
    image, box = crop
    for by in isas:
        result = resized(by, image, box, out)
        np.testing.assert_array_equal(resized(by, image, box, out, flip=True), result[:, ::-1])
        np.testing.assert_array_equal(resized(by, image, box, out, vertical_flip=True), result[::-1])
        both = resized(by, image, box, out, flip=True, vertical_flip=True)
        np.testing.assert_array_equal(both, result[::-1, ::-1])
        np.testing.assert_array_equal(resized(by, image, box, out, planar=True), result)
        if image.shape[2] == 1:
            colours = resized(by, np.repeat(image, 3, axis=2), box, (*out[:2], 3))
            np.testing.assert_array_equal(colours, np.broadcast_to(result[..., :1], colours.shape))


def test_colours_become_gray_exactly_as_pillows(isas: list[Decoder]) -> None:
    image = picture(400, 400, 3, 8)
    expected = np.asarray(Image.fromarray(image).convert("L"))
    for by in isas:
        np.testing.assert_array_equal(resized(by, image, whole(image), (400, 400, 1))[..., 0], expected)


@pytest.mark.parametrize("scale", [0.7, 1.4, 2.6, 3.9, 4.2, 9.0])
def test_rounding_favours_neither_side(isas: list[Decoder], reference: Decoder, scale: float) -> None:
    """Over 150,000 values of noise the mean difference to Pillow is below 0.003; products that are cut off and not
    made up for would show as 0.004 for each row of a sum."""
    size = round(224 * scale)
    image = np.random.default_rng(6).integers(0, 256, (size, size, 3), np.uint8)
    box = (0.3, 0.4, size - 0.7, size - 0.9)
    result = check(isas, reference, image, box, (224, 224, 3)).astype(int)
    assert abs(np.mean(result - resized(reference, image, box, (224, 224, 3)))) < 0.003


@pytest.mark.parametrize(
    "box",
    [(0, 0, 0, 8), (4, 4, -2, 2), (9, 0, 4, 4), (8, 8, 1, 1), (-1, 0, 4, 4), (0, 0, np.nan, 8), (np.nan, 0, 4, 4),
     (0, 0, np.inf, 8), (0, -np.inf, 4, 4), (0, 0, 8.5, 8), (3e38, 0, 3e38, 4), (7, 0, 1e-30, 4)],
)  # fmt: skip
def test_a_box_that_is_none_fills_zeros(isas: list[Decoder], reference: Decoder, box: Box) -> None:
    image = picture(8, 8, 3, 0)
    for by in [reference, *isas]:
        out = np.full((1, 5, 5, 3), 7, np.uint8)
        request = DecodeRequest(
            Records.from_buffers([image.tobytes()]), np.array([box], np.float32), out,
            kinds=np.array([RecordKind.RAW], np.uint8), shapes=np.array([image.shape], np.uint32),
        )  # fmt: skip
        status = by.decode(request)
        assert status[0] == DecodeStatus.UNDECODABLE, by.backend
        assert not out.any()
