"""Other readers of our tar, LMDB and `.npy` shards get the bytes and labels that were packed (DALI: test_dali.py)."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import PEERS_PYTHON
from tests.data._packs import contents, folder, picture

from headway.data import opening
from headway.data.pack import pack

pytestmark = pytest.mark.peers

WEBDATASET = """
import base64, json, sys
import webdataset as wds
for sample in wds.WebDataset(sys.argv[1:], shardshuffle=False):
    image = next(value for ending, value in sample.items() if ending in ("jpg", "png"))
    label = json.loads(sample["cls"] if "cls" in sample else sample["json"])
    print(json.dumps([sample["__key__"], base64.b64encode(image).decode(), label]))
"""
LMDB = """
import base64, json, sys
import lmdb
for path in sys.argv[1:]:
    with lmdb.open(path, subdir=False, readonly=True, lock=False) as env, env.begin() as transaction:
        found = {bytes(key).decode(): value for key, value in transaction.cursor()}
        assert env.stat()["entries"] == len(found)
        for key, image in found.items():
            number, _, ending = key.partition(".")
            if ending in ("jpg", "png"):
                label = json.loads(found.get(number + ".cls") or found[number + ".json"])
                print(json.dumps([number, base64.b64encode(image).decode(), label]))
"""
NUMPY = """
import base64, json, sys
import numpy
place = 0
for path in sys.argv[1:]:
    images = numpy.load(path, mmap_mode="r")
    labels = numpy.load(path.replace(".npy", ".labels.npy"))
    assert len(images) == len(labels)
    for image, label in zip(images, labels):
        print(json.dumps([f"{place:09d}", base64.b64encode(image.tobytes()).decode(), label.tolist()]))
        place += 1
"""
READERS = {"tar": WEBDATASET, "lmdb": LMDB, "raw": NUMPY}


@pytest.mark.parametrize("kind", ["class", "values"])
@pytest.mark.parametrize("format", READERS)
def test_another_reader_finds_every_sample(tmp_path: Path, format: Any, kind: str) -> None:
    root = folder(tmp_path / "src", {"cat": 20, "dog": 12})
    (root / "cat/a.b.png").write_bytes(picture(99, "PNG"))
    if kind == "values":
        rows = [{"path": str(path), "value": [n / 3, -n]} for n, path in enumerate(sorted(root.rglob("*.*g")))]
        root = tmp_path / "list.jsonl"
        root.write_text("\n".join(map(json.dumps, rows)))
    mode, shard_bytes = ("raw", 3000) if format == "raw" else ("keep", 9000)
    done = pack(root, tmp_path / "dst", format=format, mode=mode, shard_bytes=shard_bytes)
    packed = opening.open(done.folders[0])
    shards = [str(done.folders[0] / shard.name) for shard in packed.description.shards]
    assert len(shards) > 1
    command = [str(PEERS_PYTHON), "-c", READERS[format], *shards]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    read = [json.loads(line) for line in run.stdout.splitlines()]
    assert [key for key, _, _ in read] == [f"{number:09d}" for number in range(len(packed))]
    assert [base64.b64decode(image) for _, image, _ in read] == list(contents(done.folders[0]).values())
    np.testing.assert_array_equal(np.array([label for *_, label in read], packed.label.dtype), packed.label)
