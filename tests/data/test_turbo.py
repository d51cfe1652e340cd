"""What our own decoder declines, libjpeg-turbo decodes: to Pillow's pixels, and it refuses what Pillow refuses."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.data._jpegs import SAMPLINGS, Region, decode, find, jpeg, pillow, regions, resampled, unfinished, without

from headway.data import native
from headway.data.decode_request import DecodeRequest
from headway.data.records import Records
from headway.data.reference import DecodeStatus

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")

FOREIGN = 3
"""The core's status of what only the reference reads."""

# 20 x 19 pixels each, made with libjpeg-turbo, since Pillow does not write them.
SPECIAL = {
    "arithmetic coding": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&KWMT47pHU`k"
        "O^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPf!2J01*fP695zg0U`hb5"
        "di}c0sqVZ3IGrg1pyEd1^?Or3<CiG0ucid06zf#0B?afk0fXYktPvgw5iKKlBu}5ma#S>Q<uEZr<i}(m%6*pSy13IRNFopf|YVjH!&Zj0&v3"
        "KE9Z(&)VU0hCYLaYN>{aA-rIid?Dc?;89x)%2$}3&0QLP0(j<DejyumMsQS`AuN$;)7QJ(dV20%8Ko47|4EX8S!ix-QE`#g~2vj~zAph9"
    ),
    "a scan for each component": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&KWMT47pHU`k"
        "O^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPf!2A01*fP695zg0U`hb5"
        "di}c0sq7R7ytnP0|5X40000000000000F50t5#C!~i1@00IF60|WyA00000000000RjL61Q8M;F$EJ8G9p2d|Jncu0RaF2KLF$GYzjVIbc}L"
        "#iPEqpxL~<ljsBv^XqtIn*%HWAP_)KKIf>g@1*h91=Zs=&PM1?pq^D0s?s|?Qbdh|Ku;fM&7f-04|HJ?m0RaI400000000000000000jXA|H"
        "J?z5dZ-K0t)~D0000000000009631W^M86ColbQ*x2P(f`^22mt~S06zefu?zylI|#fPnM<{p*Kt}$f{1y^vwx{#SO3HS76AbP0RR9100000"
        "00000000I72mizX8xa5k0s{d60000000000000010t5vSF%tjU00;pC5dc2`nCtvvh}@34X888~2;$z4|Je"
    ),
    "more chroma than luma": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&KWMT47pHU`k"
        "O^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPf!2A01*fP695zg0TBQKA"
        "prvt0sq7R6#xMN000000000000000000FB|HJ?x5C8!K0tW#A0000000000009631ri|x5fdUKGEtHL!~huq00IL600000000000000000jd"
        "C1_%Gd04EUu0RsXB0tWy9000000000100I#NAp->x6ftqZBPBCIQIVnl+5ij#0RRFK0}%i}05(1ZWE)P=aD6^0cMPRE>D{dH0`~c`tBFv|M{"
        "XYIe>#2Sa3h<?>baNHUQ$fE9>6Bs4~a<NKNM#>s-H;x6fS_=V+mVon;fNM+B8{V*(}PBj(T?rty%LC)xDMnFLBg`M%Ic&f_P2Pv~6*OFaOy"
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[native.NativePool]:
    pool = native.NativePool(1)
    yield pool
    pool.close()


@st.composite
def crops(draw: st.DrawFn) -> tuple[bytes, Region]:
    """A JPEG that our own decoder declines, and a region of it."""
    width, height, seed = draw(st.integers(1, 70)), draw(st.integers(1, 70)), draw(st.integers(0, 99))
    quality = draw(st.integers(30, 95))
    kind = draw(st.sampled_from(["progressive", "CMYK", "RGB", "gray", "4x1", "1x4"]))
    if kind in ("4x1", "1x4"):
        data = resampled(width, height, int(kind[0]), int(kind[2]), seed, quality=quality)
    elif kind == "gray":
        data = jpeg(width, height, "L", seed, quality=quality, progressive=True)
    elif kind == "RGB":
        data = jpeg(width, height, "RGB", seed, quality=quality, keep_rgb=True)
    else:
        mode, subsampling = "CMYK" if kind == "CMYK" else "RGB", draw(st.sampled_from(list(SAMPLINGS)))
        progressive = kind == "progressive" or draw(st.booleans())
        data = jpeg(width, height, mode, seed, quality=quality, subsampling=subsampling, progressive=progressive)
    return data, draw(regions(width, height))


@settings(max_examples=300, deadline=None)
@given(crops())
def test_a_region_is_bit_equal_to_full_decode(pool: native.NativePool, case: tuple[bytes, Region]) -> None:
    data, region = case
    status, pixels = decode(data, region, pool)
    x0, y0, x1, y1 = region
    assert status == DecodeStatus.OK
    np.testing.assert_array_equal(pixels, pillow(data)[y0:y1, x0:x1])


@pytest.mark.parametrize("name", SPECIAL)
def test_what_pillow_reads_but_does_not_write(pool: native.NativePool, name: str) -> None:
    data = base64.b85decode(SPECIAL[name])
    expected = pillow(data)
    for region in [(0, 0, 20, 19), (7, 9, 8, 10), (5, 3, 20, 17), (0, 18, 20, 19)]:
        x0, y0, x1, y1 = region
        status, pixels = decode(data, region, pool)
        assert status == DecodeStatus.OK
        np.testing.assert_array_equal(pixels, expected[y0:y1, x0:x1])


def test_one_channel_of_gray_and_of_cmyk(pool: native.NativePool) -> None:
    gray, cmyk = jpeg(30, 20, "L", progressive=True), jpeg(30, 20, "CMYK")
    for data in (gray, cmyk):
        status, pixels = decode(data, (3, 2, 29, 20), pool, channels=1)
        assert status == DecodeStatus.OK
        np.testing.assert_array_equal(pixels, pillow(data, "L")[2:20, 3:29])


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L"])
def test_scaled_decoding_is_pillows_draft(pool: native.NativePool, scale: int, mode: str) -> None:
    data = jpeg(160, 96, mode, quality=90, progressive=True)
    out = np.empty((1, 96 // scale, 160 // scale, 3), np.uint8)
    box = np.array([[0, 0, 160, 96]], np.float32)
    assert pool.decode(DecodeRequest(Records.from_buffers([data]), box, out, scaled=True))[0] == DecodeStatus.OK
    with Image.open(io.BytesIO(data)) as image:
        image.draft(mode, (160 // scale, 96 // scale))
        np.testing.assert_array_equal(out[0], np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("options", [{"mode": "RGB", "progressive": True}, {"mode": "CMYK"}, {"keep_rgb": True}])
def test_a_truncated_file_is_refused_where_pillow_does_whatever_the_region(
    pool: native.NativePool, options: dict[str, object]
) -> None:
    data = jpeg(40, 60, **options)  # type: ignore[arg-type]
    cuts = [data[:size] for size in range(0, len(data), 13)] + [data[:size] for size in range(len(data) - 6, len(data))]
    for cut in [*cuts, data, data[:-2] + bytes(300), data + b"behind", data[:-40] + data[-2:]]:
        try:
            pillow(cut)
            expected = DecodeStatus.OK
        except (OSError, SyntaxError):
            expected = DecodeStatus.UNDECODABLE
        for region in [(0, 0, 40, 60), (0, 0, 16, 8), (20, 40, 21, 41)]:
            status, pixels = decode(cut, region, pool)
            assert (status == DecodeStatus.OK) == (expected == DecodeStatus.OK), (len(cut), region)
            assert status == DecodeStatus.OK or not pixels.any()


def test_a_file_without_tables_does_not_get_its_neighbours(pool: native.NativePool) -> None:
    """A progressive file has to bring its Huffman tables, and any file its quantisation tables."""
    good = jpeg(40, 24, progressive=True, quality=30)
    for data in (without(good, 0xC4), without(good, 0xDB)):
        with pytest.raises(OSError, match="broken data stream"):
            pillow(data)
        batch = [good, data, good, data, good]
        out = np.empty((5, 24, 40, 3), np.uint8)
        boxes = np.tile(np.array([0, 0, 40, 24], np.float32), (5, 1))
        status = pool.decode(DecodeRequest(Records.from_buffers(batch), boxes, out))
        assert status.tolist() == [DecodeStatus.OK, DecodeStatus.UNDECODABLE] * 2 + [DecodeStatus.OK]
        for place in (0, 2, 4):
            np.testing.assert_array_equal(out[place], pillow(good))


def test_a_file_of_endless_scans_is_refused(pool: native.NativePool) -> None:
    data = jpeg(32, 32, progressive=True)
    last = data.rfind(b"\xff\xda")
    for repeats, expected in ((3, DecodeStatus.OK), (native.MAX_SCANS, DecodeStatus.UNDECODABLE)):
        bomb = data[:-2] + data[last:-2] * repeats + data[-2:]
        assert decode(bomb, (0, 0, 32, 32), pool)[0] == expected


def test_what_libjpegs_disagree_about_is_for_the_reference(pool: native.NativePool) -> None:
    """Lossless files, which newer ones decode, and unfinished progressive ones, which each smooths in its own way."""
    lossless = bytearray(jpeg(40, 30))
    lossless[find(lossless, (0xC0,)) + 1] = 0xC3
    for data in (bytes(lossless), unfinished(jpeg(40, 30, progressive=True))):
        status, pixels = decode(data, (0, 0, 40, 30), pool)
        assert status == FOREIGN
        assert not pixels.any()
