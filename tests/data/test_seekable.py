"""Seekable JPEGs: lossless, still a JPEG to everyone, and a region of one can be cut out without the rest."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.data._jpegs import (
    OTHER_SAMPLINGS,
    SAMPLINGS,
    Pixels,
    Region,
    decode,
    find,
    jpeg,
    pillow,
    regions,
    resampled,
    unfinished,
    without,
)

from headway.core.errors import DataError
from headway.data import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")

ROOT = Path(__file__).resolve().parents[2]
PEERS_PYTHON = Path(os.environ.get("HEADWAY_PEERS_PYTHON") or ROOT / ".venv-peers/bin/python")
SIZE_RATIO = 1.01
"""What restart markers may cost over many files, after what optimised Huffman tables save."""


@pytest.fixture(scope="module")
def real(data_root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((data_root / "imagenet-250").glob("*.JPEG"))]


@pytest.fixture(scope="module")
def pool() -> Iterator[native.NativePool]:
    pool = native.NativePool(1)
    yield pool
    pool.close()


def segments(data: bytes, markers: tuple[int, ...]) -> list[bytes]:
    """The segments of some kinds before the first scan, in their order."""
    found, at = [], 2
    while data[at + 1] != 0xDA:
        end = at + 2 + struct.unpack_from(">H", data, at + 2)[0]
        if data[at + 1] in markers:
            found.append(data[at:end])
        at = end
    return found


@st.composite
def jpegs(draw: st.DrawFn, **options: object) -> tuple[bytes, int, int]:
    """A JPEG of any kind, and its width and height: 1 to 100."""
    width, height, seed = draw(st.integers(1, 100)), draw(st.integers(1, 100)), draw(st.integers(0, 99))
    options |= {"quality": draw(st.integers(30, 95))}
    kind = draw(st.sampled_from(["L", "RGB", "CMYK", *OTHER_SAMPLINGS]))
    if isinstance(kind, tuple):
        return resampled(width, height, *kind, seed, **options), width, height
    if kind != "L":
        options |= {"subsampling": draw(st.sampled_from(list(SAMPLINGS)))}
    if draw(st.booleans()):
        options |= {"progressive": True}
    return jpeg(width, height, kind, seed, **options), width, height


@settings(max_examples=300, deadline=None)
@given(jpegs())
def test_it_has_the_same_pixels_and_is_its_own_transcode(case: tuple[bytes, int, int]) -> None:
    data, width, height = case
    seekable = native.make_seekable(data).data
    np.testing.assert_array_equal(pillow(seekable), pillow(data))
    assert native.make_seekable(seekable).data == seekable
    info = native.read_jpeg_header(seekable)
    across = -(-width // info.mcu_width)
    assert (info.width, info.height, info.progressive) == (width, height, False)
    assert across % info.restart == 0
    assert info.restart == across or 56 <= info.restart * info.mcu_width <= 128


@pytest.mark.check
def test_real_files_keep_their_pixels_and_hardly_grow(real: list[bytes]) -> None:
    seekable = [native.make_seekable(data).data for data in real]
    assert sum(map(len, seekable)) <= SIZE_RATIO * sum(map(len, real))
    for data, other in list(zip(real, seekable, strict=True))[::5]:
        np.testing.assert_array_equal(pillow(other), pillow(data))
        assert native.make_seekable(other).data == other


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L"])
def test_it_keeps_every_marker_once(mode: str, progressive: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = random.Random(0).randbytes(100_000)  # of two segments
    data = jpeg(50, 40, mode, exif=exif, comment=b"a comment", icc_profile=profile, progressive=progressive)
    own = b"\xff\xec\x00\x07hello\xff\xfe\x00\x02"  # a private marker, and an empty comment
    data = data[:2] + own + data[2:]
    kept = (0xFE, *range(0xE0, 0xF0))
    seekable = native.make_seekable(data).data
    assert segments(seekable, kept) == segments(data, kept)
    assert native.read_jpeg_header(seekable).orientation == 6
    with Image.open(io.BytesIO(seekable)) as image:
        assert image.info["icc_profile"] == profile


def test_colours_without_a_marker_that_tells_them() -> None:
    for options, marker in [({"keep_rgb": True}, 0xEE), ({"mode": "CMYK"}, 0xEE), ({}, 0xE0)]:
        data = without(jpeg(40, 30, **options), marker)  # type: ignore[arg-type]
        seekable = native.make_seekable(data).data
        assert not segments(seekable, (marker,))
        np.testing.assert_array_equal(pillow(seekable), pillow(data))


def refusal(data: bytes) -> str:
    with pytest.raises(DataError) as caught:
        native.make_seekable(data)
    return str(caught.value)


def test_what_cannot_be_transcoded_is_refused_with_the_reason() -> None:
    data = jpeg(60, 50)
    assert "not a JPEG" in refusal(b"\x89PNG\r\n\x1a\n")
    assert "the file ends before the image does" in refusal(data[: len(data) // 2])
    assert "Corrupt JPEG data" in refusal(data[: len(data) // 2] + data[-2:])
    lossless = bytearray(data)
    lossless[find(data, (0xC0,)) + 1] = 0xC3
    assert "Unsupported JPEG process" in refusal(bytes(lossless))
    deep = bytearray(data)
    deep[find(data, (0xC0,)) + 4] = 12
    assert "precision 12" in refusal(bytes(deep))
    vast = bytearray(data)
    struct.pack_into(">HH", vast, find(data, (0xC0,)) + 5, 60_000, 60_000)
    assert "1024 MiB" in refusal(bytes(vast))


def test_an_unfinished_progressive_file_is_refused() -> None:
    """Decoders smooth what they show of one, which no baseline file can ask them to do."""
    assert "unfinished" in refusal(unfinished(jpeg(60, 50, progressive=True)))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[bytes, Region]:
    """A baseline JPEG with restart markers, ours or another encoder's, and a region of it."""
    data, width, height = draw(jpegs(restart_marker_blocks=draw(st.integers(1, 3))))
    info = native.read_jpeg_header(data)
    if info.progressive or -(-width // info.mcu_width) % info.restart or draw(st.booleans()):
        data = native.make_seekable(data).data
    return data, draw(regions(width, height))


def inside(pixels: Pixels, region: Region, held: Region) -> Pixels:
    x0, y0, x1, y1 = region
    return pixels[y0 - held[1] : y1 - held[1], x0 - held[0] : x1 - held[0]]


@settings(max_examples=500, deadline=None)
@given(case=cuts())
def test_what_is_cut_out_holds_the_same_pixels(pool: native.NativePool, case: tuple[bytes, Region]) -> None:
    data, region = case
    small, held = native.splice(data, region)
    expected = inside(pillow(data), region, (0, 0, 0, 0))
    np.testing.assert_array_equal(inside(pillow(small), region, held), expected)
    assert pillow(small).shape[:2] == (held[3] - held[1], held[2] - held[0])
    for source, shown in ((data, (0, 0, 0, 0)), (small, held)):
        there = (region[0] - shown[0], region[1] - shown[1], region[2] - shown[0], region[3] - shown[1])
        status, pixels = decode(source, there, pool)
        assert status == 0
        np.testing.assert_array_equal(pixels, expected)


def test_little_of_a_real_file_is_needed_for_a_part_of_it(real: list[bytes]) -> None:
    for data in real[:20]:
        seekable = native.make_seekable(data).data
        info = native.read_jpeg_header(seekable)
        part = (info.width // 3, info.height // 3, info.width // 2, info.height // 2)
        small, held = native.splice(seekable, part)
        rows = (held[3] - held[1]) / info.height
        np.testing.assert_array_equal(inside(pillow(small), part, held), inside(pillow(data), part, (0, 0, 0, 0)))
        assert rows <= (part[3] - part[1] + 4 * info.mcu_height) / info.height
        assert len(small) < len(seekable)
        assert native.splice(seekable, (0, 0, info.width, info.height)) == (seekable, (0, 0, info.width, info.height))


def test_what_cannot_be_cut_is_refused_with_the_reason() -> None:
    data = native.make_seekable(jpeg(300, 90)).data
    assert native.read_jpeg_header(data).restart < 38
    middle = (100, 40, 200, 60)

    def refused(data: bytes, region: Region = middle) -> str:
        with pytest.raises(DataError) as caught:
            native.splice(data, region)
        return str(caught.value)

    assert "no restart markers" in refused(jpeg(300, 90))
    assert "baseline" in refused(jpeg(300, 90, progressive=True, restart_marker_blocks=1))
    assert "does not divide" in refused(jpeg(300, 90, restart_marker_blocks=2, subsampling="4:2:0"))
    assert "beyond the image of 300 x 90" in refused(data, (0, 0, 301, 90))
    assert "empty" in refused(data, (5, 5, 5, 9))
    assert "header" in refused(data[:100])
    third = data.index(b"\xff\xd2")
    for damaged in (data[:third] + data[third + 2 :], data[:third] + b"\xff\xd5" + data[third + 2 :]):
        assert "restart marker is missing or misplaced" in refused(damaged)
    assert "ends before" in refused(data[: third + 9])


READER = """
import hashlib, json, sys
import cv2, numpy

digests = []
for path in json.loads(sys.argv[1]):
    pixels = cv2.imdecode(numpy.fromfile(path, numpy.uint8), cv2.IMREAD_COLOR)
    digests.append([pixels.shape, hashlib.sha256(pixels.tobytes()).hexdigest()])
print(json.dumps(digests))
"""


@pytest.mark.check
def test_pillow_reads_every_real_seekable_file_as_the_original(real: list[bytes]) -> None:
    for data in real:
        np.testing.assert_array_equal(pillow(native.make_seekable(data).data), pillow(data))


@pytest.mark.peers
def test_opencv_reads_every_real_seekable_file_as_the_original(real: list[bytes], tmp_path: Path) -> None:
    paths = []
    for number, data in enumerate(real):
        for name, content in (("original", data), ("seekable", native.make_seekable(data).data)):
            paths.append(tmp_path / f"{number}-{name}.jpg")
            paths[-1].write_bytes(content)
    command = [PEERS_PYTHON, "-c", READER, json.dumps([str(path) for path in paths])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named 'cv2'" in run.stderr:
        pytest.skip(f"no OpenCV in {PEERS_PYTHON}")
    assert run.returncode == 0, run.stderr
    digests = json.loads(run.stdout)
    assert len(digests) == 2 * len(real)
    assert digests[::2] == digests[1::2]
