"""DALI, another reader of RecordIO, gets from our shards the bytes and labels that were packed."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headway.data.formats import recordio
from headway.data.pack import pack

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("HEADWAY_PEERS_PYTHON", ROOT / ".venv-peers/bin/python"))
MAGIC = struct.pack("<I", recordio.MAGIC)

READER = """
import base64, json, sys
from nvidia.dali import fn, pipeline_def

@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def reader(index, shards):
    image, label = fn.readers.mxnet(path=shards, index_path=[index])
    return image, label

records = []
for count, index, *shards in json.loads(sys.argv[1]):
    pipeline = reader(index, shards)
    pipeline.build()
    for _ in range(count):
        image, label = pipeline.run()
        records.append((base64.b64encode(image.at(0).tobytes()).decode(), label.at(0).tolist()))
print(json.dumps(records))
"""

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no peers: {PYTHON} is missing (set HEADWAY_PEERS_PYTHON)"),
]


def read_by_dali(*sets: tuple[Path, list[Path]]) -> list[tuple[bytes, list[float]]]:
    """All records of several sets of (index, shards), as (image, labels)."""
    argument = json.dumps(
        [[len(index.read_text().splitlines()), str(index), *map(str, shards)] for index, shards in sets]
    )
    run = subprocess.run([PYTHON, "-c", READER, argument], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return [(base64.b64decode(image), label) for image, label in json.loads(run.stdout.splitlines()[-1])]


def test_records_plain_and_split_with_scalar_and_vector_labels(tmp_path: Path) -> None:
    images = [
        b"plain",
        b"four",
        b"abc" + MAGIC + b"unaligned",
        b"abcd" + MAGIC + b"aligned",
        MAGIC + b"at the start",
        b"at the end, aligned." + MAGIC,
        b"twice..." + MAGIC + b"...." + MAGIC + b"x",
        b"in a row" + MAGIC * 3 + b"xy",
        b"the last",
    ]
    vectors = np.random.default_rng(0).normal(size=(len(images), 3)).astype(np.float32)
    wanted: list[tuple[bytes, list[float]]] = []
    sets = []
    for name in ("scalar", "vector"):
        writer = recordio.RecordioWriter(tmp_path / f"{name}.rec", tmp_path / f"{name}.idx", pack_id=7)
        for number, image in enumerate(images):
            writer.append(image, vectors[number] if name == "vector" else float(number), number)
            wanted.append((image, vectors[number].tolist() if name == "vector" else [float(number)]))
        writer.close()
        sets.append((tmp_path / f"{name}.idx", [tmp_path / f"{name}.rec"]))
    assert read_by_dali(*sets) == wanted


def test_a_packed_folder_of_several_shards(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    files: dict[bytes, float] = {}
    for label, name in enumerate(("cat", "dog", "eel")):
        (tmp_path / "src" / name).mkdir(parents=True)
        for number in range(8):
            buffer = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (9, 11, 3), np.uint8)).save(buffer, "JPEG")
            (tmp_path / "src" / name / f"{number}.jpg").write_bytes(buffer.getvalue())
            files[buffer.getvalue()] = float(label)
    packed = pack(tmp_path / "src", tmp_path / "dst", mode="keep", shard_bytes=4000)
    shards = sorted(packed.folders[0].glob("*.rec"))
    assert len(shards) > 2
    assert {image: label for image, (label,) in read_by_dali(*((s.with_suffix(".idx"), [s]) for s in shards))} == files

    # DALI takes several shards at once with one index, whose offsets run through all of them.
    lines, begin = [], 0
    for shard in shards:
        for line in shard.with_suffix(".idx").read_text().splitlines():
            number, offset = map(int, line.split())
            lines.append(f"{number}\t{begin + offset}\n")
        begin += shard.stat().st_size
    (tmp_path / "all.idx").write_text("".join(lines))
    assert {image: label for image, (label,) in read_by_dali((tmp_path / "all.idx", shards))} == files
