from __future__ import annotations

import io
import os
import re
import shutil
import site
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from numpy.typing import NDArray
from PIL import Image
from tests.conftest import absent

import headway
from headway.core.errors import DataError, UsageError
from headway.core.native import LIBRARY
from headway.data import native
from headway.data.decode_request import DecodeRequest, GatherRequest
from headway.data.records import Records
from headway.data.reference import DecodeStatus


@pytest.fixture(autouse=True)
def core() -> None:
    if not native.is_available():
        absent("the native core is not built")


def jpeg(width: int = 60, height: int = 44, seed: int = 0, mode: str = "RGB", **options: object) -> bytes:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (2 + height // 6, 2 + width // 6, 3), np.uint8)
    image = Image.fromarray(coarse).resize((width, height)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def batch(count: int = 40) -> tuple[Records, NDArray[np.float32]]:
    """Images of every kind that the core knows, with boxes inside them."""
    kinds: list[dict[str, object]] = [
        {"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}, {"restart_marker_blocks": 2},
    ]  # fmt: skip
    buffers = [
        jpeg(30 + 7 * number, 90 + 5 * number, number, "L" if number % 6 == 5 else "RGB", **kinds[number % 5])
        for number in range(count)
    ]
    boxes = np.array([[number / 3, 1.25, 28 + number, 70] for number in range(count)], np.float32)
    return Records.from_buffers(buffers), boxes


@pytest.fixture
def pool() -> Iterator[native.NativePool]:
    found = native.NativePool(2)
    yield found
    found.close()


def own_threads() -> list[Path]:
    """Those of the core in this process, which Python does not know."""
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text() == "headway-decode\n"]


def blocked(task: Path) -> int:
    """The signals that a thread blocks; it begins with all of them blocked, the C library's own 32 too."""
    while True:
        (line,) = (line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
        mask = int(line.split()[1], 16)
        if not mask & 1 << 31:
            return mask
        time.sleep(0.001)


# Threads


def test_threads_have_a_name_take_no_signals_and_end() -> None:
    before = own_threads()
    found = native.NativePool(4)
    mine = [task for task in own_threads() if task not in before]
    assert len(mine) == 3  # the caller is the fourth
    masks = [blocked(task) for task in mine]
    assert all(mask & 1 << signal - 1 for mask in masks for signal in (1, 2, 10, 15, 17))
    found.close()
    found.close()
    assert own_threads() == before


def test_pinned_threads_keep_to_their_cpus() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    before = own_threads()
    found = native.NativePool(len(cpus) + 2, cpus)
    mine = [int(task.name) for task in own_threads() if task not in before]
    assert sorted(sorted(os.sched_getaffinity(task)) for task in mine) == sorted(
        [cpus[i % len(cpus)]] for i in range(len(mine))
    )
    found.close()
    assert sorted(os.sched_getaffinity(0)) == cpus


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_impossible_numbers_of_threads_are_refused(threads: int) -> None:
    with pytest.raises(UsageError, match=f"{threads} decoding threads cannot be had"):
        native.NativePool(threads)


@pytest.mark.parametrize("shared", [True, False])
def test_several_threads_of_python_may_decode_at_once(shared: bool) -> None:
    records, boxes = batch()
    pools = [native.NativePool(3)] * 4 if shared else [native.NativePool(1 + number) for number in range(4)]
    out = np.zeros((4, len(records), 20, 30, 3), np.uint8)
    failed: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            out[number] = 0
            failed.append(int(pools[number].decode(DecodeRequest(records, boxes, out[number])).any()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in set(pools):
        found.close()
    assert failed == [0] * 40
    assert out[0].any()
    assert (out == out[0]).all()


# Instruction sets

DIGEST = """
import hashlib, sys
import numpy as np
from headway.data import native
from headway.data.decode_request import DecodeRequest, GatherRequest
from headway.data.records import Records

stored = np.load(sys.argv[1])
data, length = stored["data"], stored["length"]
buffers = [bytes(part) for part in np.split(data, np.cumsum(length)[:-1])]
pool, digest = native.NativePool(2), hashlib.sha256()
for size, scaled in (((20, 30, 3), False), ((90, 70, 1), False), ((9, 8, 3), True)):
    out = np.zeros((len(buffers), *size), np.uint8)
    request = DecodeRequest(Records.from_buffers(buffers), stored["boxes"], out, flips=stored["flips"], scaled=scaled)
    assert not pool.decode(request).any()
    digest.update(out.tobytes())
raw = np.arange(5 * 40 * 36 * 3, dtype=np.uint8)
for planar in (False, True):
    out = np.zeros((5, 40, 36, 3), np.uint8)
    shift = np.array([[3, -2]] * 5, np.int16)
    records = Records.from_buffers(np.split(raw, 5))
    assert not pool.gather(GatherRequest(records, out, planar=planar, shifts=shift)).any()
    digest.update(out.tobytes())
pool.close()
print(native.describe_features().split(",")[0], digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bytes(tmp_path: Path) -> None:
    records, boxes = batch()
    data = np.concatenate([np.frombuffer(record, np.uint8) for record in records])
    np.savez(tmp_path / "batch.npz", data=data, length=records.length.astype(int), boxes=boxes, flips=boxes[:, 0] > 5)
    found = {}
    for name in ("portable", "avx2", "avx512"):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST, str(tmp_path / "batch.npz")],
            env=os.environ | {"HEADWAY_ISA": name},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        isa, digest = done.stdout.split()
        found[isa] = digest
    assert "portable" in found
    assert native.describe_features().partition(",")[0] in {*found, "portable"}
    assert len(set(found.values())) == 1, found


# Raw images


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("planar", [False, True])
def test_raw_images_are_mirrored_and_moved(planar: bool, channels: int, pool: native.NativePool) -> None:
    rng = np.random.default_rng(channels)
    images = rng.integers(0, 256, (70, 12, 17, channels), np.uint8)
    stored = np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if planar else images
    records = Records.from_buffers([bytes(image) for image in stored])
    shift, flips = rng.integers(-4, 5, (70, 2)).astype(np.int16), rng.integers(0, 2, 70) == 1
    crc = np.array([crc32c(record) for record in records], np.uint32)
    crc[[7, 9]] ^= 1
    check = np.arange(70) != 9
    out = np.full(images.shape, 7, np.uint8)
    status = pool.gather(GatherRequest(records, out, planar=planar, shifts=shift, flips=flips, crc=crc, check=check))
    assert np.flatnonzero(status).tolist() == [7]
    assert not out[7].any()
    for place in range(70):
        mirrored = images[place, :, ::-1] if flips[place] else images[place]
        wide = np.pad(mirrored, ((4, 4), (4, 4), (0, 0)), mode="reflect")
        down, right = shift[place] + 4
        assert place == 7 or (out[place] == wide[down : down + 12, right : right + 17]).all()
    plain = np.zeros_like(images)
    assert not pool.gather(GatherRequest(records, plain, planar=planar)).any()
    assert (plain == images).all()
    larger = np.ones((70, 13, 17, channels), np.uint8)  # every record is too short for it
    assert (pool.gather(GatherRequest(records, larger, planar=planar)) == DecodeStatus.UNDECODABLE).all()
    assert not larger.any()


# Arguments


def test_arguments_of_the_wrong_kind_are_refused(pool: native.NativePool) -> None:
    records, boxes = batch(4)
    out = np.zeros((4, 8, 8, 3), np.uint8)
    for wrong in (boxes.astype(float), boxes[:3], boxes[:, :3], np.asfortranarray(boxes)):
        with pytest.raises(ValueError, match="instead of contiguous float32"):
            pool.decode(DecodeRequest(records, wrong, out))
    for wrong_out in (out.astype(float), out[0], out[:, :, ::2], out[:3], out[:, :, :, :2].copy(), out[:, :0]):
        with pytest.raises(ValueError):
            pool.decode(DecodeRequest(records, boxes, wrong_out))
    fixed = out.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        pool.decode(DecodeRequest(records, boxes, fixed))
    with pytest.raises(ValueError, match="beyond"):
        pool.decode(DecodeRequest(records, boxes, out, kinds=np.full(4, 1, np.uint8)))  # raw without shapes
    with pytest.raises(ValueError, match="beyond"):
        pool.decode(DecodeRequest(records, boxes, out, kinds=np.full(4, 9, np.uint8)))
    assert not out.any()


def test_an_output_with_gaps_is_filled_between_them(pool: native.NativePool) -> None:
    records, boxes = batch(6)
    whole, gaps = np.zeros((6, 8, 8, 3), np.uint8), np.full((6, 2, 8, 8, 3), 7, np.uint8)
    assert not pool.decode(DecodeRequest(records, boxes, whole)).any()
    assert not pool.decode(DecodeRequest(records, boxes, gaps[:, 0])).any()
    assert (gaps[:, 0] == whole).all()
    assert (gaps[:, 1] == 7).all()


def test_a_box_beyond_the_image_is_refused(pool: native.NativePool) -> None:
    records = Records.from_buffers([jpeg(60, 44)] * 8)
    boxes = np.array(
        [[0, 0, 60, 44], [0, 0, 60.5, 44], [1, 0, 60, 44], [0, 1, 60, 44], [-1, 0, 9, 9], [3, 3, 0, 5],
         [3, 3, 5, np.nan], [1e30, 3, 5, 5]], np.float32
    )  # fmt: skip
    out = np.full((8, 5, 5, 3), 7, np.uint8)
    assert pool.decode(DecodeRequest(records, boxes, out)).tolist() == [0] + [2] * 7
    assert out[0].any()
    assert not out[1:].any()


# Bytes


def test_a_header_is_read() -> None:
    info = native.read_jpeg_header(jpeg(61, 45, subsampling=2, restart_marker_blocks=3))
    assert (info.width, info.height, info.components, info.progressive, info.restart) == (61, 45, 3, False, 3)
    assert (info.mcu_width, info.mcu_height, info.orientation) == (16, 16, 1)
    assert native.read_jpeg_header(jpeg(mode="L", progressive=True)).progressive
    turned = Image.Exif()
    turned[0x0112] = 6
    assert native.read_jpeg_header(jpeg(exif=turned.tobytes())).orientation == 6
    for bad in (b"", b"\xff\xd8", b"no image", jpeg()[:100]):
        with pytest.raises(DataError, match="are not a JPEG"):
            native.read_jpeg_header(bad)


def test_a_seekable_jpeg_has_the_same_pixels_and_can_be_cut() -> None:
    for data in (jpeg(300, 200, progressive=True), jpeg(300, 200, mode="L"), jpeg(300, 200, subsampling=2)):
        whole = np.asarray(Image.open(io.BytesIO(data)))
        seekable = native.make_seekable(data).data
        assert native.read_jpeg_header(seekable).restart > 0
        assert not native.read_jpeg_header(seekable).progressive
        assert (np.asarray(Image.open(io.BytesIO(seekable))) == whole).all()
        small, (x0, y0, x1, y1) = native.splice(seekable, (100, 50, 180, 90))
        assert len(small) < len(seekable)
        assert x0 <= 100 < 180 <= x1
        assert y0 <= 50 < 90 <= y1
        cut = np.asarray(Image.open(io.BytesIO(small)))
        assert (cut[50 - y0 : 90 - y0, 100 - x0 : 180 - x0] == whole[50:90, 100:180]).all()


def test_what_cannot_be_rewritten_says_why() -> None:
    with pytest.raises(DataError) as refusal:
        native.make_seekable(b"no image")
    assert len(str(refusal.value)) > 10
    with pytest.raises(DataError) as refusal:
        native.splice(jpeg(), (0, 0, 8, 8))  # no restart markers
    assert len(str(refusal.value)) > 10


# The library


def test_nothing_but_the_header_is_seen_from_outside() -> None:
    if not shutil.which("nm"):
        pytest.skip("no nm here")
    command = ["nm", "-D", "--defined-only", str(LIBRARY)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    header = Path(__file__).resolve().parents[2] / "native/headway.h"
    assert {line.split()[-1] for line in lines} == set(re.findall(r"(hw_\w+)\(", header.read_text()))


SIDE_BY_SIDE = """
import ctypes, io, os, sys
import numpy as np

data, order, shared = open(sys.argv[1], "rb").read(), sys.argv[2].split(), sys.argv[3] == "shared"
if shared:  # as programs do that want extension modules to see each other
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
for name in order:
    if name == "native":
        from headway.data import native
        assert native.is_available()
    else:
        __import__({"pillow": "PIL._imaging", "opencv": "cv2"}[name])

def pillow():
    from PIL import Image
    return np.asarray(Image.open(io.BytesIO(data)))

def opencv():
    import cv2
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]

def native():
    from headway.data import native
    from headway.data.decode_request import DecodeRequest
    from headway.data.records import Records
    pool, out = native.NativePool(2), np.zeros((6, 44, 60, 3), np.uint8)
    boxes = np.array([[0, 0, 60, 44]] * 6, np.float32)
    assert not pool.decode(DecodeRequest(Records.from_buffers([data] * 6), boxes, out)).any()
    pool.close()
    return out[3]

pixels = {name: globals()[name]() for name in order * 2}
for name in order:
    assert np.abs(pixels[name].astype(int) - pixels["pillow"]).max() <= (3 if name == "opencv" else 0), name
"""


PEERS = os.environ.get("HEADWAY_PEERS_PYTHON") or Path(headway.__file__).parents[2] / ".venv-peers/bin/python"


@pytest.mark.parametrize("shared", ["shared", "apart"])
@pytest.mark.parametrize(
    ("python", "order"),
    [
        (sys.executable, "native pillow"),
        (sys.executable, "pillow native"),
        pytest.param(PEERS, "opencv pillow native", marks=pytest.mark.peers),
        pytest.param(PEERS, "native pillow opencv", marks=pytest.mark.peers),
    ],
)
def test_other_copies_of_libjpeg_do_not_get_in_the_way(python: str, order: str, shared: str, tmp_path: Path) -> None:
    (tmp_path / "image.jpg").write_bytes(jpeg(60, 44, subsampling=2, progressive=True))  # so that libjpeg is asked
    command = [python, "-c", SIDE_BY_SIDE, str(tmp_path / "image.jpg"), order, shared]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(Path(headway.__file__).parents[1])}, check=True)


WITHOUT = """
import sys
sys.path[:0], sys.path[len(sys.path):] = [sys.argv[1]], sys.argv[2:]
import headway
from headway.data import decode, native
decode.build_decoder(1).close()
decode.build_decoder(2).close()
print(headway.__file__, native.is_available())
"""


@pytest.mark.parametrize(("library", "why"), [(None, "is not built"), (b"no library", "cannot be used (")])
def test_without_the_library_one_sentence_says_what_is_lost(library: bytes | None, why: str, tmp_path: Path) -> None:
    source = Path(headway.__file__).parent
    shutil.copytree(source, tmp_path / "headway", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if library is not None:
        (tmp_path / "headway/data/libheadway.so").write_bytes(library)
    # -S: an editable install would put the source tree before every path
    command = [sys.executable, "-S", "-c", WITHOUT, str(tmp_path), *site.getsitepackages()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}/headway/__init__.py False\n"
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"The native core {why}")
    assert "Pillow decodes images, which takes about six times as long" in sentence
    assert "g++ cmake libjpeg62-turbo-dev" in sentence
