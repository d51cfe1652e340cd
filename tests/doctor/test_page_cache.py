"""What of files lies in memory: of files written, mapped here and elsewhere, in parts, and where nothing holds."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.tiers._server import make_pack

from headway.core.mounts import find_mount
from headway.data import opening
from headway.data.formats.byte_ranges import map_path
from headway.doctor import page_cache
from headway.doctor.page_cache import COLD, FileSpan, evict, load, measure_resident_share, restore_residency
from headway.doctor.storage import list_files

SIZE = 16 << 20
HALF = SIZE // 2
NOBODY = 65534
WARM = 0.9
"""What lies in memory is never less, whatever the kernel takes back meanwhile for other processes."""


def written(folder: Path, name: str = "file", size: int = SIZE) -> Path:
    path = folder / name
    path.write_bytes(np.random.default_rng(0).bytes(size))
    return path


def share(*files: Path | FileSpan) -> float:
    found = measure_resident_share(files)
    assert found is not None
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """16 MiB on a disk, whole in memory."""
    path, mount = written(tmp_path), find_mount(tmp_path)
    if measure_resident_share([path]) is None or mount is None or mount.kind == "tmpfs":
        pytest.skip("this system does not say what lies in memory, or has its temporary files there")
    assert load([path]) == SIZE
    return path


@pytest.fixture
def other_process(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Maps the file and has looked at all of it."""
    program = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        f"sum(view[::{mmap.PAGESIZE}])\n"
        "print('looked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "looked\n"
        yield process


def test_what_was_just_written_lies_in_memory_and_can_be_evicted(file: Path) -> None:
    content = file.read_bytes()
    assert share(file) > WARM
    found = evict([file])
    assert (found.held, found.note) == (True, "")
    assert found.before is not None
    assert found.after is not None
    assert found.before > WARM
    assert share(file) <= found.after < COLD
    assert file.read_bytes() == content
    assert share(file) > WARM


def test_what_this_process_maps_is_evicted_and_stays_mapped(file: Path) -> None:
    view = map_path(file)
    content = bytes(view)
    found = evict([file])
    assert found.held, found
    assert bytes(view) == content
    assert share(file) > WARM


def test_a_data_set_in_use_is_evicted_and_its_records_stay(tmp_path: Path, file: Path) -> None:
    with closing(opening.open(make_pack(tmp_path, size=(90, 60), shard_bytes=150_000))) as data:
        records = data.read(np.arange(len(data)))
        before = [bytes(record) for record in records]
        assert evict(list_files(data)).held
        assert [bytes(record) for record in records] == before


def test_a_part_is_evicted_alone(file: Path) -> None:
    assert evict([FileSpan(file, 0, HALF)]).held
    assert share(FileSpan(file, end=HALF)) < COLD
    assert share(FileSpan(file, HALF)) > WARM
    assert share(file) == pytest.approx(0.5, abs=0.05)


def test_spans_count_whole_pages_and_each_once(file: Path) -> None:
    page = mmap.PAGESIZE
    assert evict([file]).held
    load([FileSpan(file, 0, 1)])  # more may have been read ahead
    assert measure_resident_share([FileSpan(file, 3, 4)]) == 1
    assert measure_resident_share([FileSpan(file, 0, page), FileSpan(file, 5, 6), FileSpan(file, page - 1, page)]) == 1
    whole = share(file)
    assert whole < 0.5
    assert share(file, FileSpan(file, 0, HALF), FileSpan(file, HALF)) == whole


@given(
    st.lists(st.tuples(st.integers(0, 40 * mmap.PAGESIZE), st.integers(0, 9 * mmap.PAGESIZE)), max_size=8),
    st.sampled_from([mmap.PAGESIZE, 4 * mmap.PAGESIZE]),
)
def test_ranges_hold_the_pieces_of_all_spans_once(spans: list[tuple[int, int]], align: int) -> None:
    wanted = {
        place
        for begin, length in spans
        if length or begin % align
        for place in range(begin // align, -(-(begin + length) // align))
    }
    ranges = page_cache._align_ranges([FileSpan(Path("a"), begin, begin + length) for begin, length in spans], align)
    held = [place for low, high in ranges.get(Path("a"), []) for place in range(low // align, high // align)]
    assert held == sorted(wanted)
    assert all(low % align == high % align == 0 for some in ranges.values() for low, high in some)


def test_what_lay_in_memory_lies_there_again(file: Path) -> None:
    assert evict([file]).held
    load([FileSpan(file, 0, HALF)])
    with suppress(KeyError), restore_residency([file]):
        assert evict([file]).held
        raise KeyError  # whatever happens inside
    assert share(FileSpan(file, 0, HALF)) > WARM


def test_what_did_not_lie_in_memory_is_not_brought_there(file: Path) -> None:
    assert evict([file]).held
    with restore_residency([file]):
        pass
    assert share(file) < COLD


def test_as_much_is_loaded_as_is_free(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert evict([file]).held
    monkeypatch.setattr("headway.doctor.page_cache.read_free_memory_bytes", lambda: 1 << 20)
    assert load([file]) == 1 << 20
    assert 0 < share(file) < 0.5


def test_a_file_that_another_process_maps_stays(file: Path, other_process: subprocess.Popen[str]) -> None:
    found = evict([file])
    assert not found.held
    assert found.after is not None
    assert found.after > 0.5
    assert "another process uses them" in found.note
    other_process.communicate("")
    assert evict([file]).held


def test_files_in_memory_stay_there(small_disk: Path) -> None:
    path = written(small_disk, size=1 << 18)
    found = evict([path])
    assert (found.held, found.before, found.after) == (False, 1, 1)
    assert found.note == "The files are always in memory: their file system is tmpfs."


def test_what_is_not_there_has_no_pages(file: Path) -> None:
    gone, empty = file.with_name("gone"), written(file.parent, "empty", 0)
    for files in ([], [gone], [empty], [gone, empty]):
        assert measure_resident_share(files) is None
        found = evict(files)
        assert (found.held, found.after) == (False, None)
        assert ("no file" in found.note) == (not files)
        assert load(files) == 0
        with restore_residency(files):
            pass
    assert share(gone, file, empty) > WARM
    assert evict([gone, file, empty]).held


@pytest.mark.root
def test_of_another_users_files_nothing_is_told_and_nothing_is_done() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        path = written(Path(name), size=1 << 20)
        assert share(path) > WARM
        os.seteuid(NOBODY)
        try:
            told, found = measure_resident_share([path]), evict([path])
        finally:
            os.seteuid(0)
        assert told is None
        assert (found.held, found.before) == (False, None)
        assert "another user's" in found.note
        assert share(path) > WARM
