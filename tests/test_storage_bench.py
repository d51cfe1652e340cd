"""`bench.storage`: the load it generates, against numbers worked out by hand, on a folder and on a server."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench._storage.load import Load, lay_objects, name_object, run_stream
from bench._storage.store import Address, Folder
from tests.data.tiers._server import serving

from headway.core.errors import UsageError

SMALL = Load(objects=30, mean_bytes=2000, variation=0.6, reads_per_write=90)


def test_sizes_have_their_mean_and_their_variation() -> None:
    """Of 200,000 draws, the mean and the variation are within 1 %."""
    sizes = Load(objects=200_000, mean_bytes=114_660, variation=0.62, reads_per_write=90).draw_sizes()
    assert sizes.mean() == pytest.approx(114_660, rel=0.01)
    assert sizes.std() / sizes.mean() == pytest.approx(0.62, rel=0.01)
    # Half of a log-normal lies below its mean over sqrt(1 + 0.62**2) = 1.1766: 97,450 bytes.
    assert np.median(sizes) == pytest.approx(97_450, rel=0.01)


def test_one_of_91_operations_writes_and_each_object_is_read_once_an_epoch() -> None:
    operations = list(itertools.islice(SMALL.list_operations(0), 910))
    assert [place for place, (is_write, _) in enumerate(operations) if is_write] == list(range(90, 910, 91))
    reads = [number for is_write, number in operations if not is_write]
    assert len(reads) == 900
    for epoch in range(30):
        assert sorted(reads[30 * epoch : 30 * epoch + 30]) == list(range(30))
    other = replace(SMALL, order_seed=1)
    assert reads != [number for is_write, number in itertools.islice(other.list_operations(0), 910) if not is_write]


def test_streams_share_an_epoch() -> None:
    """Three of them read each of the 30 objects once, ten each, before any is read again."""
    reads = list[list[int]]()
    for epoch in range(3):
        parts = []
        for stream in range(3):
            operations = (number for is_write, number in SMALL.list_operations(stream, 3) if not is_write)
            parts.append(list(itertools.islice(operations, 10 * epoch, 10 * epoch + 10)))
        assert sorted(itertools.chain.from_iterable(parts)) == list(range(30))
        reads.append(parts[0])
    assert reads[0] != reads[1]


def test_a_stream_reads_what_it_counts(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    assert lay_objects(SMALL, store) == 30
    assert lay_objects(SMALL, store) == 0
    found = run_stream(SMALL, store, 0, 1, seconds=1e9, operations=182)
    sizes = SMALL.draw_sizes()
    assert (found.reads, found.writes, len(found.taken)) == (180, 2, 180)
    # Six epochs of 30 objects.
    assert found.read_bytes == 6 * sizes.sum()
    written = [path.stat().st_size for path in (tmp_path / "written-0").iterdir()]
    assert found.written_bytes >= sum(written) > 0


def test_a_server_is_read(tmp_path: Path) -> None:
    load = Load(objects=20, mean_bytes=2000, variation=0.6, reads_per_write=None)
    with serving(tmp_path) as server:
        address = Address(server.uri)
        with pytest.raises(UsageError, match="20 of 20 objects are not on the server"):
            lay_objects(load, address)
        lay_objects(load, Folder(tmp_path))
        assert lay_objects(load, address) == 0
        found = run_stream(load, address, 0, 1, seconds=1e9, operations=40)
    assert found.read_bytes == 2 * load.draw_sizes().sum()


def test_the_need_of_twelve_nodes_is_printed_beside_it(tmp_path: Path) -> None:
    """12 x 11,105 images/s of 114,660 bytes are 15.3 GB/s and 133,260 objects a second; a 90th of it is written."""
    command = [sys.executable, "-m", "bench.storage", str(tmp_path), "--quick", "--nodes", "12", "--streams", "1"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "200 of 200 objects laid down" in said
    for need in ("15.3 GB/s", "133,260 /s", "170 MB/s", "storage_of_required"):
        assert need in said
    assert len(list(tmp_path.rglob("000000/*"))) == 200
    assert (tmp_path / name_object(199)).is_file()
