"""Our own decoder of baseline JPEG: any region, bit for bit what libjpeg-turbo's full decode has there."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.data._isas import each_isa
from tests.data._jpegs import SAMPLINGS, Pixels, Region, jpeg, pillow, regions, resampled

from headway.data import native
from headway.data.decode import NativeDecoder
from headway.data.decode_request import DecodeRequest
from headway.data.records import Records
from headway.data.reference import DecodeStatus

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")


@pytest.fixture(scope="module")
def isas() -> Iterator[list[NativeDecoder]]:
    with each_isa() as found:
        yield [one for one in found if isinstance(one, NativeDecoder)]


def cut(data: bytes, region: Region, by: NativeDecoder, scaled: int = 1) -> tuple[int, Pixels, int]:
    """Status, pixels at 1/scaled, and how many images our own decoder did."""
    x0, y0, x1, y1 = region
    out = np.full((1, (y1 - y0) // scaled, (x1 - x0) // scaled, 3), 7, np.uint8)
    box, stats = np.array([[x0, y0, x1 - x0, y1 - y0]], np.float32), native.NativeStats()
    status = by._pool.decode(DecodeRequest(Records.from_buffers([data]), box, out, scaled=scaled > 1), stats)
    return int(status[0]), out[0], stats.direct


@st.composite
def crops(draw: st.DrawFn) -> tuple[bytes, Region]:
    """A baseline JPEG, without restart markers or with an interval of any length, and a region of it."""
    width, height, seed = draw(st.integers(5, 110)), draw(st.integers(1, 110)), draw(st.integers(0, 99))
    quality, optimize = draw(st.integers(20, 100)), draw(st.booleans())
    kind = draw(st.sampled_from([*SAMPLINGS, "4:4:0", "gray"]))
    options = {"quality": quality, "optimize": optimize}
    options |= draw(
        st.sampled_from([{}, {"restart_marker_blocks": 1}, {"restart_marker_blocks": 3}, {"restart_marker_rows": 1}])
    )
    if kind == "gray":
        data = jpeg(width, height, "L", seed, **options)
    elif kind == "4:4:0":
        data = resampled(width, height, 1, 2, seed, **options)
    else:
        data = jpeg(width, height, "RGB", seed, subsampling=kind, **options)
    if draw(st.booleans()) and kind != "4:4:0":
        data = native.make_seekable(data).data
    return data, draw(regions(width, height))


@settings(max_examples=400, deadline=None)
@given(crops())
def test_a_region_is_bit_equal_to_full_decode(isas: list[NativeDecoder], case: tuple[bytes, Region]) -> None:
    data, region = case
    x0, y0, x1, y1 = region
    expected = pillow(data)[y0:y1, x0:x1]
    for one in isas:
        status, pixels, direct = cut(data, region, one)
        assert (status, direct) == (DecodeStatus.OK, 1)
        np.testing.assert_array_equal(pixels, expected)


def test_every_place_of_a_crop_in_small_images(isas: list[NativeDecoder]) -> None:
    """All widths and heights of a few pixels around one MCU, and all corners of a crop."""
    for subsampling in SAMPLINGS:
        for side in (15, 16, 17, 23, 33):
            data = native.make_seekable(jpeg(side, side, seed=side, subsampling=subsampling, quality=85)).data
            expected = pillow(data)
            for x0 in range(0, side - 4, 3):
                for y0 in range(0, side - 4, 3):
                    region = (x0, y0, x0 + 5, y0 + 5)
                    status, pixels, _ = cut(data, region, isas[-1])
                    assert status == DecodeStatus.OK
                    np.testing.assert_array_equal(pixels, expected[y0 : y0 + 5, x0 : x0 + 5])


# At 1/8 libjpeg repeats chroma that is halved one way only, and we interpolate it.
@pytest.mark.parametrize(
    ("subsampling", "scaled"), [(name, n) for name in SAMPLINGS for n in (2, 4, 8) if (name, n) != ("4:2:2", 8)]
)
def test_a_smaller_decode_is_near_libjpegs(isas: list[NativeDecoder], subsampling: str, scaled: int) -> None:
    coarse = np.random.default_rng(scaled).integers(0, 256, (12, 16, 3), np.uint8)
    smooth, file = Image.fromarray(coarse).resize((256, 192), Image.Resampling.BICUBIC), io.BytesIO()
    smooth.save(file, "JPEG", subsampling=subsampling, quality=95)
    data = native.make_seekable(file.getvalue()).data
    found = [cut(data, (64, 32, 192, 160), one, scaled) for one in isas]
    with Image.open(io.BytesIO(data)) as image:
        image.draft(None, (256 // scaled, 192 // scaled))
        smaller = np.asarray(image)[32 // scaled : 160 // scaled, 64 // scaled : 192 // scaled]
    for status, pixels, direct in found:
        assert (status, direct) == (DecodeStatus.OK, 1)
        np.testing.assert_array_equal(pixels, found[0][1])
        assert np.abs(pixels - smaller.astype(int)).mean() < 3


@pytest.mark.parametrize("kind", ["plain", "seekable"])
def test_a_file_without_its_end_is_refused_whatever_the_region(isas: list[NativeDecoder], kind: str) -> None:
    """Pillow refuses it; and whether a sample is good must not depend on the crop."""
    whole = jpeg(96, 80, seed=2, quality=80)
    data = native.make_seekable(whole).data if kind == "seekable" else whole
    for one in isas:
        assert cut(data, (0, 0, 20, 9), one)[0] == DecodeStatus.OK
        for short in (data[: len(data) * 2 // 3], data[:-2]):
            assert cut(short, (0, 0, 20, 9), one)[0] == DecodeStatus.UNDECODABLE


def test_coefficients_that_no_encoder_makes_are_libjpegs(isas: list[NativeDecoder]) -> None:
    """DC that grows in every block, until 16 bits overflow."""

    def segment(marker: int, data: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data

    side, one_code = 32, bytes([1] + [0] * 15)
    blocks = (side // 8) ** 2
    bits = ("0" + "1" * 11 + "0") * blocks  # a difference of 2047, and the end of the block
    bits += "1" * (-len(bits) % 8)
    data = b"\xff\xd8" + segment(0xDB, b"\0" + b"\1" * 64)
    data += segment(0xC0, struct.pack(">BHHB", 8, side, side, 1) + bytes([1, 0x11, 0]))
    data += segment(0xC4, b"\0" + one_code + b"\x0b") + segment(0xC4, b"\x10" + one_code + b"\0")
    data += segment(0xDA, bytes([1, 1, 0, 0, 63, 0]))
    data += int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0") + b"\xff\xd9"
    for one in isas:
        status, pixels, direct = cut(data, (0, 0, side, side), one)
        assert (status, direct) == (DecodeStatus.OK, 0)
        np.testing.assert_array_equal(pixels, pillow(data))


def broken_intervals(data: bytes) -> bytes:
    """The file with one restart marker numbered wrongly, in the middle of its scan."""
    markers = [at for at in range(len(data) - 1) if data[at] == 0xFF and 0xD0 <= data[at + 1] <= 0xD7]
    out, at = bytearray(data), markers[len(markers) // 2]
    out[at + 1] = 0xD0 + (out[at + 1] + 4 - 0xD0) % 8
    return bytes(out)


def impossible_code(data: bytes) -> bytes:
    """The file with ones, which no code is, in the last third of its scan."""
    out, at = bytearray(data), len(data) * 2 // 3
    out[at : at + 24] = b"\xff\0" * 12
    return bytes(out)


@pytest.mark.parametrize("damage", [broken_intervals, impossible_code])
def test_what_is_not_in_order_is_libjpegs_and_changes_no_neighbour(isas: list[NativeDecoder], damage: object) -> None:
    whole = jpeg(96, 80, seed=1, quality=80)
    assert callable(damage)
    bad = damage(native.make_seekable(whole).data)
    region = (3, 5, 90, 77)
    for one in isas:
        before = cut(whole, region, one)
        _, _, direct = cut(bad, region, one)
        assert direct == 0
        after = cut(whole, region, one)
        assert after[0] == before[0] == DecodeStatus.OK
        np.testing.assert_array_equal(after[1], before[1])
