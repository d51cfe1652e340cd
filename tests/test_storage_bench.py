"""`bench.storage`: the load it generates, against numbers worked out by hand, on a folder and on a server."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import final

import numpy as np
import pytest
from bench._storage.load import Load, lay_objects, name_object, run_stream
from bench._storage.store import Address, Folder, Store, open_store
from bench._storage.visit import visit
from bench.storage import build_parser, measure_storage
from tests.data.tiers._server import serving

from headway.core.errors import UsageError


@final
class Recorder(Store):
    """A place where nothing is, that remembers what is written."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def measure(self, name: str) -> int | None:
        return None

    def read(self, name: str, nbytes: int) -> int:
        return 0

    def write(self, name: str, content: bytes) -> None:
        self.written.append(name)

    def list_names(self, folder: str) -> list[str]:
        return []

    def remove(self, name: str) -> None:
        pass


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
    written = [path.stat().st_size for path in (tmp_path / "written/alone/0").iterdir()]
    assert found.written_bytes >= sum(written) > 0


def test_a_server_is_read(tmp_path: Path) -> None:
    load = Load(objects=20, mean_bytes=2000, variation=0.6, reads_per_write=None)
    with serving(tmp_path) as server:
        address = Address(server.uri)
        with pytest.raises(UsageError, match="20 of 20 objects are not on the server"):
            lay_objects(load, address)
        lay_objects(load, Folder(tmp_path))
        assert lay_objects(load, address) == 0
        # Nothing is written to a server, also at the end.
        with visit(address, "client", keeps=False):
            pass
        found = run_stream(load, address, 0, 1, seconds=1e9, operations=40)
    assert found.read_bytes == 2 * load.draw_sizes().sum()


@pytest.mark.parametrize("address", [False, True], ids=["folder", "address"])
def test_clients_share_objects_and_the_last_one_removes_them(
    tmp_path: Path, address: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"memory://{tmp_path.name}" if address else str(tmp_path)
    store = open_store(target)
    first, second = (replace(SMALL, client=name) for name in ("first", "second"))
    with visit(store, "first", keeps=False):
        assert lay_objects(first, store) == 30
        with visit(store, "second", keeps=False):
            # Only what is not there yet.
            store.remove(name_object(7))
            other = open_store(target)
            assert lay_objects(second, other) == 1
            for one, place in ((first, store), (second, other)):
                run_stream(one, place, 0, 1, seconds=1e9, operations=91)
            assert store.list_names("written") == ["first", "second"]
        assert capsys.readouterr().out.startswith(
            f"{store.place} stays, as other clients use it: first. The last one removes it."
        )
        assert store.list_names("written") == ["first"]
        assert store.measure(name_object(7)) is not None
    assert capsys.readouterr().out == ""
    assert store.list_names("") == []
    store = open_store(target)
    with visit(store, "third", keeps=True):
        lay_objects(SMALL, store)
    assert capsys.readouterr().out == f"{store.place} stays, as --keep asked: remove it when you no longer need it.\n"
    assert lay_objects(SMALL, open_store(target)) == 0
    store.remove("")


def test_clients_lay_objects_down_in_different_orders(tmp_path: Path) -> None:
    """Two that begin at once would write each object twice if they went the same way."""
    ways = []
    for client in ("a", "b"):
        store = Recorder()
        lay_objects(replace(SMALL, client=client), store)
        ways.append(store.written)
    assert ways[0] != ways[1]
    assert sorted(ways[0]) == sorted(ways[1])


def run_bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.storage", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_need_of_twelve_nodes_is_printed_beside_it(tmp_path: Path) -> None:
    """12 x 11,105 images/s of 114,660 bytes are 15.3 GB/s and 133,260 objects a second; a 90th of it is written."""
    done = run_bench(tmp_path, "--quick", "--nodes", "12", "--streams", "1")
    assert done.returncode == 0, done.stderr
    assert f"200 of 200 objects laid down in {tmp_path}/headway-storage-bench\n" in done.stdout
    for need in ("15.3 GB/s", "133,260 /s", "170 MB/s", "storage_of_required", "no figures to quote"):
        assert need in done.stdout
    # Nothing is left that a later command could take for data.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("FILE",), "FILE: this is a file, not a folder. Name the folder that is to be measured."),
        (("storge",), "storge: there is no such folder. Did you mean 'storage'? Make it, or name another."),
        (("storage", "--streams", "0"), "--streams is 0. Set it to 1 or more."),
        (("storage", "--nodes", "0"), "--nodes is 0. Set it to 1 or more."),
        (("storage", "--objects", "0"), "--objects is 0. Set it to 1 or more."),
        (("storage", "--reads-per-write", "-1"), "--reads-per-write is -1. Set it to 0 or more."),
        (("storage", "--variation", "nan"), "--variation is nan. Set it to 0 or more."),
        (("storage", "--mean-kb", "0"), "--mean-kb is 0. Set it to 0.01 to 1,000,000."),
        (("storage", "--seconds", "nan"), "--seconds is nan. Set it to 0.01 to 1,000,000."),
        (
            ("storage", "--objects", "3"),
            "4 streams have 3 objects, and each needs one of its own. Set --streams to less",
        ),
        (("storage", "--objects", "9" * 9), "Free space there, or set --objects to less."),
        (("--keep",), "--keep is for a folder or a URL, and none is named. Name one, or leave --keep out."),
        (("nope://host/storage",), "nothing installed reads nope://"),
        (("storage", "--node", "dgx"), "there is no node type 'dgx' in the catalog."),
        (("storage", "--json", "no/where"), "no/where: nothing can be written there. Name another place."),
    ],
)
def test_mistakes_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("storage").mkdir()
    Path("FILE").touch()
    with pytest.raises(UsageError) as caught:
        measure_storage(build_parser().parse_args([*options]))
    assert sentence in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["FILE", "storage"]


def test_a_mistake_has_no_traceback(tmp_path: Path) -> None:
    done = run_bench(tmp_path / "nowhere", "--quick")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"bench.storage: {tmp_path}/nowhere: there is no such folder. Make it, or name another.\n"
