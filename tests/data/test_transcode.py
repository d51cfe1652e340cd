"""The quick way to a seekable JPEG: what it writes is what libjpeg would, and what it calls sound decodes."""

from __future__ import annotations

import random
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageFile
from tests.data._jpegs import decode, find, jpeg, pillow, unfinished

from headway.core.errors import DataError
from headway.data import native
from headway.data.pack_mode import ImageEncoder, PackMode
from headway.data.pack_set import use_strict_pillow

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")


def build_encoder(kind: str) -> ImageEncoder:
    return ImageEncoder(
        mode=PackMode(kind=kind),  # type: ignore[arg-type]
        channels=3,
        make_seekable=native.make_seekable,
        transform=None,
        orient=False,
    )


@st.composite
def baselines(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A baseline JPEG, and a progressive one of the same coefficients and markers."""
    width, height = draw(st.integers(1, 150)), draw(st.integers(1, 70))
    kind = draw(st.sampled_from(["L", "4:4:4", "4:2:2", "4:2:0"]))
    options: dict[str, Any] = {"quality": draw(st.integers(1, 100)), "seed": draw(st.integers(0, 99))}
    options |= {"mode": "L"} if kind == "L" else {"subsampling": kind}
    own = {"optimize": draw(st.booleans()), "restart_marker_blocks": draw(st.sampled_from([0, 1, 3, 7]))}
    return jpeg(width, height, **options, **own), jpeg(width, height, **options, progressive=True)


@settings(max_examples=300, deadline=None)
@given(baselines())
def test_it_writes_the_bytes_that_libjpeg_writes(case: tuple[bytes, bytes]) -> None:
    """Progressive files take the way of libjpeg, with the same blocks at the edges of the image."""
    baseline, progressive = map(native.make_seekable, case)
    assert baseline.data == progressive.data
    assert not progressive.is_sound
    # Chroma of at most 2 samples is upsampled in another way, so files that narrow are left to libjpeg.
    assert baseline.is_sound or pillow(case[0]).shape[1] <= 4


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_all_instruction_sets_write_the_same_bytes(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = native.make_seekable(jpeg(300, 200, subsampling="4:2:0"))
    monkeypatch.setenv("HEADWAY_ISA", isa)
    # A new thread makes a transcoder of its own.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(native.make_seekable, jpeg(300, 200, subsampling="4:2:0")).result() == expected


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A JPEG with some bytes changed, removed or put in."""
    changes = random.Random(draw(st.integers(0, 1 << 30)))
    options: dict[str, Any] = {"quality": 85}
    if changes.random() < 0.3:
        options["restart_marker_blocks"] = 2
    kind = changes.choice(["L", "RGB", "RGB", "CMYK"])
    data = bytearray(jpeg(changes.randint(20, 60), changes.randint(20, 60), kind, changes.randrange(20), **options))
    for _ in range(changes.randint(1, 3)):
        # Half of the changes are in the header.
        at = changes.randrange(2, len(data) if changes.random() < 0.5 else find(bytes(data), (0xDA,)) + 12)
        match changes.randrange(4):
            case 0:
                del data[at : at + changes.randint(1, 3)]
            case 1:
                data[at:at] = changes.randbytes(changes.randint(1, 3))
            case 2:
                data[at] = changes.choice([0, 0xFF, 0xD9])
            case _:
                data[at] ^= 1 << changes.randrange(8)
        if find_scan(data) is None:
            break
    return bytes(data)


def find_scan(data: bytearray) -> int | None:
    try:
        return find(bytes(data), (0xDA,))
    except (IndexError, struct.error):
        return None


@settings(max_examples=1500, deadline=None)
@given(damaged())
def test_the_same_files_are_bad_whether_they_are_decoded_or_not(data: bytes) -> None:
    with use_strict_pillow():
        seekable, keep = (build_encoder(kind)(data, 0, "a.jpg") for kind in ("seekable", "keep"))
    assert (seekable.reason, seekable.width, seekable.height) == (keep.reason, keep.width, keep.height)
    assert seekable.gray == keep.gray
    if not keep.reason and isinstance(seekable.data, bytes) and seekable.data != data:
        np.testing.assert_array_equal(pillow(seekable.data), pillow(data))


def rebuild(data: bytes, marker: int, change: dict[int, int]) -> bytes:
    """The file with bytes of the first segment of a kind changed; offsets count from its marker."""
    out = bytearray(data)
    for offset, value in change.items():
        out[find(data, (marker,)) + offset] = value
    return bytes(out)


def test_what_is_out_of_the_ordinary_is_left_to_libjpeg() -> None:
    plain = jpeg(60, 50, restart_marker_blocks=2)
    assert native.make_seekable(plain).is_sound
    assert native.make_seekable(plain + b"more").is_sound
    for other in (jpeg(60, 50, "CMYK"), jpeg(60, 50, progressive=True), jpeg(60, 50, keep_rgb=True)):
        assert not native.make_seekable(other).is_sound
    # A restart marker out of its turn, bytes after the codes, and a JFIF version that libjpeg warns of are refused.
    first = plain.index(b"\xff\xd0", find(plain, (0xDA,)))
    for bad, sentence in (
        (plain[:-2], "the file ends before the image does"),
        (plain[:first] + b"\xff\xd3" + plain[first + 2 :], "found marker"),
        (plain[:-2] + bytes(9) + plain[-2:], "extraneous bytes"),
        (rebuild(plain, 0xE0, {9: 2}), "JFIF"),
    ):
        with pytest.raises(DataError, match=sentence):
            native.make_seekable(bad)
    with pytest.raises(DataError, match="unfinished"):
        native.make_seekable(unfinished(jpeg(60, 50, progressive=True)))


def test_filling_among_the_codes_is_left_to_libjpeg() -> None:
    """libjpeg-turbo shows such a block in its own way, which copy and decoder have to show too."""
    plain = jpeg(200, 150, quality=95)
    stuffed = [at for at in range(find(plain, (0xDA,)) + 14, len(plain)) if plain[at : at + 2] == b"\xff\0"]
    pool = native.NativePool(1)
    for at in stuffed[:: len(stuffed) // 20]:
        filled = plain[:at] + b"\xff" + plain[at:]
        written = native.make_seekable(filled)
        assert not written.is_sound
        np.testing.assert_array_equal(pillow(written.data), pillow(filled))
        status, pixels = decode(filled, (0, 0, 200, 150), pool)
        assert status == 0
        np.testing.assert_array_equal(pixels, pillow(filled))
    pool.close()
    assert native.make_seekable(plain[:-2] + b"\xff\xff" + plain[-2:]).is_sound


def test_a_gray_file_keeps_its_sampling() -> None:
    """It has no meaning there, and is not 1 x 1 in files of some cameras."""
    odd = rebuild(jpeg(60, 50, "L"), 0xC0, {11: 0x22})
    written = native.make_seekable(odd)
    assert written.is_sound
    assert written.data[find(written.data, (0xC0,)) + 11] == 0x22
    np.testing.assert_array_equal(pillow(written.data, "L"), pillow(odd, "L"))


def test_sound_files_of_a_pack_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str | None] = []
    load = ImageFile.ImageFile.load

    def load_and_note(image: ImageFile.ImageFile) -> object:
        decoded.append(image.format)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", load_and_note)
    for data, is_decoded in ((jpeg(60, 50), False), (jpeg(60, 50, progressive=True), True)):
        decoded.clear()
        assert not build_encoder("seekable")(data, 0, "a").reason
        assert bool(decoded) == is_decoded
