from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.conftest import absent

from headway.core.cpu_count import choose_thread_count, count_usable_cores, read_local_ranks
from headway.core.errors import UsageError
from headway.data import native
from headway.data.crops import compute_center_boxes
from headway.data.decode import BATCHES_PER_TIMING, Backend, Decoder, build_decoder, resolve_backend
from headway.data.decode_request import DecodeRequest
from headway.data.records import Records
from headway.data.reference import DecodeStatus, RecordKind, decode_one

Boxes = NDArray[np.float32]
SMOOTH = np.add.outer(np.arange(60) * 3, np.arange(80) * 2)[..., None] + np.arange(3) * 20
SUBSAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}
both = pytest.mark.parametrize("backend", ["pillow", "native"])


def picture(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def encoded(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def boxes_of(*images: Image.Image, out_hw: tuple[int, int]) -> Boxes:
    width, height = (np.array(side, np.uint32) for side in zip(*(image.size for image in images), strict=True))
    return compute_center_boxes(width, height, out_hw)


@contextmanager
def made(backend: Backend, threads: int = 2) -> Iterator[Decoder]:
    if backend == "native" and not native.is_available():
        absent("the native core is not built")
    found = build_decoder(threads, backend)
    try:
        yield found
    finally:
        found.close()


GOOD = [Image.fromarray((SMOOTH[:h, :w] % 256).astype(np.uint8)) for w, h in ((40, 30), (24, 60), (80, 17), (16, 16))]
BAD = {
    "empty": b"",
    "no image": b"this is not an image at all",
    "a byte": b"\xff",
    "a marker": b"\xff\xd8\xff",
    "cut": encoded(GOOD[0])[:300],
    "cut PNG": encoded(GOOD[0], "PNG")[:-40],
    "zeros": bytes(1000),
}


@both
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_bad_image_is_zeros_with_a_status_and_leaves_its_neighbours_alone(backend: Backend, threads: int) -> None:
    good = [encoded(image) for image in GOOD]
    buffers: list[bytes | memoryview] = []
    boxes = []
    for number, data in enumerate(BAD.values()):
        image = number % len(good)
        buffers += [good[image], data]
        boxes += [boxes_of(GOOD[image], out_hw=(16, 16))[0], np.array([0, 0, 40, 30], np.float32)]
    out = np.full((len(buffers), 16, 16, 3), 7, np.uint8)
    with made(backend, threads) as decoder:
        status = decoder.decode(DecodeRequest(Records.from_buffers(buffers), np.stack(boxes), out))
    assert status.dtype == np.uint8
    assert status.tolist() == [DecodeStatus.OK, DecodeStatus.UNDECODABLE] * len(BAD)
    assert (out[1::2] == 0).all()
    expected = np.zeros((16, 16, 3), np.uint8)
    for place in range(0, len(buffers), 2):
        assert decode_one(buffers[place], expected, boxes[place]) is DecodeStatus.OK
        assert np.abs(out[place].astype(int) - expected).max() <= 1


@both
@pytest.mark.parametrize("count", [0, 1, 2, 7, 33, 400])
@pytest.mark.thin(4)
def test_a_batch_is_the_same_on_any_number_of_threads(backend: Backend, count: int) -> None:
    images = [picture("RGB", 9 + number % 50, 40 - number % 37, seed=number) for number in range(count)]
    records = Records.from_buffers(
        [encoded(image, "PNG" if number % 5 == 3 else "JPEG") for number, image in enumerate(images)]
    )
    boxes = boxes_of(*images, out_hw=(12, 10)) if images else np.empty((0, 4), np.float32)
    out = np.full((4, count, 12, 10, 3), 7, np.uint8)
    before = threading.active_count()
    for pixels, threads in zip(out, (1, 2, 8, 19), strict=True):
        with made(backend, threads) as decoder:
            for _ in range(2):
                assert not decoder.decode(DecodeRequest(records, boxes, pixels)).any()
    assert threading.active_count() == before
    assert (out == out[0]).all()
    expected = np.zeros((12, 10, 3), np.uint8)
    for data, box, pixels in zip(records, boxes, out[0], strict=True):
        assert decode_one(data, expected, box) is DecodeStatus.OK
        assert np.abs(pixels.astype(int) - expected).max() <= 1


@settings(deadline=None, max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_native_and_reference_differ_by_one_at_most(data: st.DataObject, seed: int) -> None:
    """Over samplings, progressive files, odd sizes, fractional boxes, outputs, flips and channels."""
    rng, side = np.random.default_rng(seed), st.integers(1, 90)
    out_hw, channels = data.draw(st.tuples(st.integers(1, 70), st.integers(1, 70))), data.draw(st.sampled_from([1, 3]))
    buffers, boxes = [], []
    for number in range(8):
        w, h = data.draw(side), data.draw(side)
        coarse = picture("RGB", 1 + w // 4, 1 + h // 4, seed=int(rng.integers(2**32))).resize((w, h))
        mode = data.draw(st.sampled_from(["RGB", "RGB", "RGB", "L", "CMYK"]))
        options = {"subsampling": data.draw(st.sampled_from([0, 1, 2])), "quality": data.draw(st.integers(20, 100))}
        options |= {"progressive": data.draw(st.booleans()), "optimize": data.draw(st.booleans())}
        buffers.append(encoded(coarse.convert(mode), "JPEG", **options))
        low, high = np.sort(rng.uniform(0, (w, h), (2, 2)), axis=0)
        box = (0, 0, w, h) if number == 0 else (*low, *(high - low))
        boxes.append(np.rint(box) if data.draw(st.booleans()) else box)
    flips, vertical_flips = rng.integers(0, 2, (2, 8)) == 1
    mirrors = {"flips": flips, "vertical_flips": vertical_flips}
    out = np.zeros((2, 8, *out_hw, channels), np.uint8)
    arguments = (Records.from_buffers(buffers), np.array(boxes, np.float32))
    with made("pillow", 1) as reference, made("native", 2) as core:
        expected = reference.decode(DecodeRequest(*arguments, out[0], **mirrors))
        assert core.decode(DecodeRequest(*arguments, out[1], **mirrors)).tolist() == expected.tolist()
    assert np.abs(out[0].astype(int) - out[1]).max() <= 1


def test_native_and_reference_agree_on_real_images(data_root: Path) -> None:
    files = sorted((data_root / "imagenet-250").rglob("*.JPEG"))[::5]
    records = Records.from_buffers([file.read_bytes() for file in files])
    sizes = np.array([Image.open(io.BytesIO(data)).size for data in records], np.float64)
    rng = np.random.default_rng(1)
    sides = sizes * rng.uniform(0.1, 1, sizes.shape)
    corners = (sizes - sides) * rng.uniform(0, 1, sizes.shape)
    boxes = np.floor(np.concatenate([corners, sides], axis=1)).astype(np.float32)
    out = np.zeros((2, len(files), 112, 112, 3), np.uint8)
    with made("pillow") as reference, made("native") as core:
        assert not reference.decode(DecodeRequest(records, boxes, out[0])).any()
        assert not core.decode(DecodeRequest(records, boxes, out[1])).any()
    assert np.abs(out[0].astype(int) - out[1]).max() <= 1


@both
@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_record_in_one_batch(backend: Backend, channels: int) -> None:
    image = picture("RGB", 30, 20)
    pixels = np.asarray(image)
    buffers = [encoded(image, "PNG"), pixels.tobytes(), pixels.transpose(2, 0, 1).tobytes(), encoded(image, "PNG")]
    kinds = np.array(
        [RecordKind.OTHER, RecordKind.RAW, RecordKind.PLANAR, RecordKind.JPEG], np.uint8
    )  # the last one says it is what it is not
    shapes = np.array([[0, 0, 0], [20, 30, 3], [20, 30, 3], [0, 0, 0]], np.uint32)
    boxes = np.array([[1, 2, 25.5, 17]] * 4, np.float32)
    flips, vertical_flips = np.array([False, True, False, True]), np.array([False, False, True, True])
    out = np.zeros((4, 9, 11, channels), np.uint8)
    with made(backend) as decoder:
        status = decoder.decode(
            DecodeRequest(Records.from_buffers(buffers), boxes, out, flips, vertical_flips, kinds=kinds, shapes=shapes)
        )
    assert not status.any()
    out[1::2] = out[1::2, :, ::-1]
    out[2:] = out[2:, ::-1]
    assert np.abs(out.astype(int) - out[0]).max() <= 1
    assert (out[0] == out[3]).all()


@both
def test_checksums_are_compared_where_they_are_asked_for(backend: Backend) -> None:
    buffers = [encoded(image, "PNG" if number % 2 else "JPEG") for number, image in enumerate(GOOD * 2)]
    crc = np.array([crc32c(data) for data in buffers], np.uint32)
    wrong = crc ^ np.array([0, 0, 0, 0, 1, 1, 1, 1], np.uint32)
    check = np.array([True, True, False, False] * 2)
    out = np.zeros((8, 16, 16, 3), np.uint8)
    arguments = (Records.from_buffers(buffers), boxes_of(*GOOD * 2, out_hw=(16, 16)), out)
    with made(backend) as decoder:
        assert not decoder.decode(DecodeRequest(*arguments, crc=crc)).any()
        assert (
            decoder.decode(DecodeRequest(*arguments, crc=wrong)).tolist()
            == [DecodeStatus.OK] * 4 + [DecodeStatus.CHECKSUM] * 4
        )
        assert not out[4:].any()
        assert out[:4].reshape(4, -1).any(axis=1).all()
        assert decoder.decode(DecodeRequest(*arguments, crc=wrong, check=check)).tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
        assert not out[4:6].any()
        assert out[6:].reshape(2, -1).any(axis=1).all()


@pytest.mark.parametrize("sampling", SUBSAMPLINGS)
def test_a_smaller_decode_looks_the_same_to_both_backends(sampling: str) -> None:
    image = Image.fromarray((SMOOTH % 256).astype(np.uint8)).resize((333, 217), Image.Resampling.BICUBIC)
    data = encoded(image, "JPEG", subsampling=SUBSAMPLINGS[sampling], quality=90)
    records = Records.from_buffers([data] * 5)
    boxes = np.array(
        [[0, 0, 333, 217], [10, 20, 300, 190], [0, 0, 40, 30], [1.5, 0, 160, 99], [0, 0, 80, 80]], np.float32
    )
    out = np.zeros((3, 5, 20, 30, 3), np.uint8)
    with made("pillow") as reference, made("native") as core:
        assert not reference.decode(DecodeRequest(records, boxes, out[0], scaled=True)).any()
        assert not core.decode(DecodeRequest(records, boxes, out[1], scaled=True)).any()
        assert not core.decode(DecodeRequest(records, boxes, out[2])).any()
    # Where chroma is halved, libjpeg decodes it at full size and the core's own decoder does not.
    difference = np.abs(out[0].astype(int) - out[1])
    assert difference.max() <= 1 if sampling == "4:4:4" else difference.mean() <= 2
    assert (out[1] != out[2]).any()
    assert np.abs(out[1].astype(int) - out[2]).mean() < 4


@both
def test_bytes_beyond_the_batch_stay_as_they_are(backend: Backend) -> None:
    ring = np.full((4, 8, 8, 3), 7, np.uint8)
    with made(backend, 1) as decoder:
        decoder.decode(
            DecodeRequest(
                Records.from_buffers([encoded(GOOD[0])] * 2), boxes_of(GOOD[0], GOOD[0], out_hw=(8, 8)), ring[1:3]
            )
        )
    assert (ring[[0, 3]] == 7).all()
    assert (ring[1] == ring[2]).all()
    assert (ring[1] != 7).any()


@both
def test_one_batch_of_sixteen_is_timed(backend: Backend) -> None:
    records = Records.from_buffers([encoded(GOOD[0]), encoded(GOOD[0], "PNG"), encoded(GOOD[0])])
    crc, out = np.array([crc32c(data) for data in records], np.uint32), np.zeros((3, 8, 8, 3), np.uint8)
    with made(backend) as decoder:
        for _ in range(BATCHES_PER_TIMING + 1):
            assert not decoder.decode(
                DecodeRequest(records, boxes_of(*GOOD[:1] * 3, out_hw=(8, 8)), out, crc=crc)
            ).any()
        stats = decoder.stats
    assert stats.images == 6
    assert stats.record_bytes == 2 * int(records.length.sum())
    assert stats.used_bytes <= stats.record_bytes
    assert stats.pixels >= 6 * 30 * 30
    assert min(stats.check_s, stats.decode_s, stats.resample_s) > 0
    assert stats.direct == (4 if backend == "native" else 0)


FORKED = """
import os, sys, threading
import numpy as np
from headway.data.decode import build_decoder
from headway.data.decode_request import DecodeRequest
from headway.data.records import Records

data = open(sys.argv[2], "rb").read()
records, boxes = Records.from_buffers([data] * 12), np.array([[0, 0, 200, 150]] * 12, np.float32)
decoder, first = build_decoder(3, sys.argv[1]), np.zeros((12, 64, 64, 3), np.uint8)
assert not decoder.decode(DecodeRequest(records, boxes, first)).any()
stop = False

def loop():
    out = np.zeros_like(first)
    while not stop:
        assert not decoder.decode(DecodeRequest(records, boxes, out)).any()

busy = threading.Thread(target=loop)
busy.start()
failed = 0
for turn in range(20):
    child = os.fork()
    if not child:
        try:
            out = np.zeros_like(first)
            good = not decoder.decode(DecodeRequest(records, boxes, out)).any() and (out == first).all()
            decoder.close()
        finally:
            os._exit(0 if good else 1)
    failed += os.waitpid(child, 0)[1] != 0
stop = True
busy.join()
decoder.close()
sys.exit(failed)
"""


@both
@pytest.mark.thin(1)
def test_a_fork_in_the_middle_of_a_decode_works(backend: Backend, tmp_path: Path) -> None:
    if backend == "native" and not native.is_available():
        absent("the native core is not built")
    picture("RGB", 50, 38).resize((200, 150)).save(tmp_path / "image.jpg")
    command = [sys.executable, "-c", FORKED, backend, str(tmp_path / "image.jpg")]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_training_loop_keeps_a_core() -> None:
    found = build_decoder()
    found.close()
    assert found.threads == choose_thread_count() == max(1, count_usable_cores() // (read_local_ranks() or 1) - 1)
    assert found.backend == resolve_backend() == ("native" if native.is_available() else "pillow")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="0 decoding threads"):
        build_decoder(0)
    with pytest.raises(UsageError, match="Pillow's threads cannot be pinned"):
        build_decoder(2, "pillow", pin=True)


def test_an_environment_without_the_core_runs_on_the_reference() -> None:
    script = (
        "from headway.data.decode import build_decoder as build, resolve_backend; "
        "print(resolve_backend(), build(1).backend); build(1, 'native')"
    )
    environment = os.environ | {"HEADWAY_NATIVE": "0"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.stdout == "pillow pillow\n"
    assert "UsageError: the native core is not available. Leave HEADWAY_NATIVE unset" in done.stderr
