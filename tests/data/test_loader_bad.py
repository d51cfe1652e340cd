"""Samples that are damaged: substituted, masked, or the end."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tests.data._loaders import SEED, N, Rows, flip_a_byte, loader, mixed, own_threads, rows, rows_of, uniform, written

from headway.core.errors import DataError
from headway.data import columns, opening
from headway.data.batch import BadSample
from headway.data.dataset import Dataset
from headway.data.order import Order
from headway.data.pack import pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed(tmp_path_factory.mktemp("loader"))


@pytest.fixture(scope="module")
def data(folder: Path) -> Dataset:
    return opening.open(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uniform(tmp_path_factory.mktemp("equal"))


@pytest.fixture(scope="module")
def expected(data: Dataset) -> Rows:
    return rows(loader(data, stop=63))


def damage(folder: Path, samples: list[int]) -> Dataset:
    """The data set with a byte flipped in the middle of some images."""
    data = opening.open(folder)
    for sample in samples:
        flip_a_byte(folder, data, sample, int(data.length[sample]) // 2)
    return data


def substitute_of(position: int, damaged: list[int]) -> int:
    """The first good sample after a position in its epoch's permutation, which is a circle."""
    first = position - position % N
    _, samples = Order(N, SEED)(np.arange(first, first + N))
    circle = np.roll(samples, -(position % N)).tolist()
    return next(sample for sample in circle if sample not in damaged)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_sample_is_substituted_by_the_next_good_one(copy: Path, expected: Rows, threads: int) -> None:
    _, samples = Order(N, SEED)(np.arange(N))
    # one alone, three in a row, and the last of the epoch, which the circle's beginning substitutes
    damaged = samples[[2, 8, 9, 10, N - 1]].tolist()
    data = damage(copy, damaged)
    pixels = {row[2]: row[5] for row in expected}
    found, bad = [], []
    for batch in loader(data, stop=63, threads=threads):
        found += rows([batch])
        bad += batch.bad
    for (position, epoch, asked, served, label, image), good in zip(found, expected, strict=True):
        assert (position, epoch, asked) == good[:3]
        assert served == substitute_of(position, damaged)
        assert label == data.label[served]
        assert image == pixels[served]
    assert bad == [BadSample(row[0], row[2], row[3], "checksum") for row in found if row[2] != row[3]]
    assert [entry.asked for entry in bad[:5]] == damaged
    assert len(bad) == len([row for row in expected if row[2] in damaged])


def test_random_choices_come_from_the_sample_that_was_asked(copy: Path, data: Dataset) -> None:
    damaged = damage(copy, [3, 4])
    for batch, whole in zip(loader(damaged, stop=46), loader(data, stop=46), strict=True):
        assert (batch.keys() == whole.keys()).all()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_world_substitutes_alike(copy: Path, world: int) -> None:
    data = damage(copy, [0, 1, 2, 11])
    alone = rows(loader(data, stop=63))
    ranks = [list(map(rows_of, loader(data, stop=63, rank=rank, world=world))) for rank in range(world)]
    assert [row for step in zip(*ranks, strict=True) for part in step for row in part] == alone


def test_a_damaged_sample_is_masked(copy: Path, expected: Rows) -> None:
    data = damage(copy, [6, 7])
    bad = []
    for batch in loader(data, stop=63, on_bad="mask"):
        for row in rows([batch]):
            if row[2] in (6, 7):
                assert row[3] == -1
                assert row[5] == bytes(len(row[5]))
            else:
                assert row == expected[row[0]]
        bad += [(entry.asked, entry.served) for entry in batch.bad]
    assert sorted(set(bad)) == [(6, -1), (7, -1)]
    assert len(bad) == len([row for row in expected if row[2] in (6, 7)])


@pytest.mark.parametrize("on_bad", ["substitute", "mask"])
def test_an_evaluation_substitutes_nothing(copy: Path, on_bad: str) -> None:
    """A sample would count twice otherwise."""
    found = rows(loader(damage(copy, [6, 22]), 5, order=None, on_bad=on_bad))
    assert [row[3] for row in found] == [sample if sample not in (6, 22) else -1 for sample in range(N)]


def test_a_damaged_sample_stops_the_iteration(copy: Path) -> None:
    _, samples = Order(N, SEED)(np.arange(N))
    sample = int(samples[9])
    data = damage(copy, [sample])
    served: list[int] = []
    with pytest.raises(DataError) as stopped:
        served.extend(len(batch.samples) for batch in loader(data, on_bad="stop", threads=2))
    assert served == [7]
    assert str(stopped.value) == (
        f"{copy}: sample {sample} ({data.name(sample)}) is damaged (checksum). Run headway verify on the folder and "
        "pack again, or set data.on_bad to substitute or mask."
    )
    assert own_threads() == []


def test_where_every_sample_is_damaged_nothing_is_served(copy: Path) -> None:
    data = damage(copy, list(range(N)))
    with pytest.raises(
        DataError, match=r"every sample is damaged\. Run headway verify on the folder, and pack the data again\."
    ):
        next(iter(loader(data)))
    assert {row[3] for row in rows(loader(data, stop=N, on_bad="mask"))} == {-1}
    one_left = damage(copy, [4])  # flipped back
    assert {row[3] for row in rows(loader(one_left, stop=N))} == {4}


def test_without_checksums_only_what_does_not_decode_is_bad(copy: Path) -> None:
    data = opening.open(copy)
    flip_a_byte(copy, data, 5, 0)  # of the JPEG's or PNG's own magic number
    batches = list(islice(loader(data, N, verify="never"), 1))
    assert [(entry.asked, entry.reason) for entry in batches[0].bad] == [(5, "undecodable")]
    assert [entry.reason for entry in next(iter(loader(data, N, verify="first"))).bad] == ["checksum"]


def test_checksums_are_looked_at_first_always_or_never(equal: Path, tmp_path: Path) -> None:
    """The images are uncompressed, so that a flipped bit of a pixel is seen by its checksum alone."""
    folder = tmp_path / "copy"
    shutil.copytree(equal, folder)

    def bad(data: Dataset, verify: str) -> list[int]:
        (batch,) = loader(data, N, stop=N, verify=verify)
        return [entry.asked for entry in batch.bad]

    touched, fresh = opening.open(folder), opening.open(folder)
    assert bad(touched, "first") == []
    flip_a_byte(folder, touched, 8, int(touched.length[8]) - 3)
    assert bad(touched, "never") == bad(fresh, "never") == []
    assert bad(touched, "first") == []
    assert bad(fresh, "first") == [8]
    assert bad(fresh, "first") == [8]
    assert bad(touched, "always") == [8]


def test_a_split_record_that_is_damaged_is_substituted(tmp_path: Path) -> None:
    """One image holds RecordIO's magic number; where its parts no longer fit together, another one is served."""
    source = written(tmp_path / "src", [(8, 6)], ("jpg",), ("RGB",))
    path = source / "a/00.jpg"
    image = path.read_bytes()
    path.write_bytes(image + bytes(-len(image) % 4) + (0xCED7230A).to_bytes(4, "little") + b"tail")
    pack(source, tmp_path / "dst", mode="keep")
    data = opening.open(tmp_path / "dst")
    (sample,) = np.flatnonzero(data.flags & columns.FLAG_SPLIT).tolist()
    assert rows(loader(data, N, stop=N))
    flip_a_byte(tmp_path / "dst", data, sample, 1)
    for verify, reason in (("always", "checksum"), ("never", "undecodable")):
        (batch,) = loader(data, N, stop=N, verify=verify)
        assert [(entry.asked, entry.reason) for entry in batch.bad] == [(sample, reason)]


def test_an_image_that_is_not_what_its_columns_say_is_bad(copy: Path) -> None:
    data = opening.open(copy)
    width = data.width.copy()
    width[3] = 1000
    data.width = width
    (batch,) = loader(data, N, stop=N)
    assert [(entry.asked, entry.reason) for entry in batch.bad] == [(3, "undecodable")]
