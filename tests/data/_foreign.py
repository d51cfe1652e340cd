"""What the tests of foreign formats share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from numpy.typing import NDArray
from tests.data._packs import picture

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.data import columns, opening
from headway.data.dataset import Dataset
from headway.data.formats import detect
from headway.data.scan import scan_records

PICTURES = [picture(number, size=(8 + number % 3, 5 + number % 2)) for number in range(7)]
PICTURES[2] = picture(2, "PNG")
PICTURES[3] = picture(3, mode="L")
PIXELS = np.random.default_rng(0).integers(0, 256, (7, 5, 4, 3), np.uint8)
LABELS = [2, 0, 1, 1, 2, 0, 0]


def same(data: Dataset, images: Sequence[bytes | NDArray[np.uint8]], labels: Any = LABELS) -> Dataset:
    """Fails unless a data set holds these image files or pixels, mapped or not, with these labels."""
    assert len(data) == len(images)
    assert np.array_equal(data.label, labels)
    wanted = [image if isinstance(image, bytes) else image.tobytes() for image in images]
    for source in (data, Dataset(data.folder, data._columns, data.description, mapped=False)):
        assert [bytes(record) for record in source.read(np.arange(len(data)))] == wanted
        source.close()
    assert data.crc32c.tolist() == [crc32c(image) for image in wanted]
    assert data.length.tolist() == [len(image) for image in wanted]
    for place, image in enumerate(images):
        raw = bool(data.flags[place] & columns.FLAG_RAW)
        assert raw == (not isinstance(image, bytes))
        if not isinstance(image, bytes):
            planar = bool(data.flags[place] & columns.FLAG_PLANAR)
            shape = [int(data.height[place]), int(data.width[place])]
            shape.insert(0 if planar else 2, data.description.channels)
            assert shape == [*image.shape, *([1] if image.ndim == 2 else [])], (planar, shape, image.shape)
        else:
            assert bool(data.flags[place] & columns.FLAG_NOT_JPEG) == (not image.startswith(b"\xff\xd8\xff"))
    if data.description.label_kind == "class":
        assert data.description.class_counts == tuple(
            np.bincount(np.asarray(labels, np.int64), minlength=len(data.classes))
        )
    assert data.description.mode == "foreign"
    return data


def names_of(data: Dataset) -> list[str]:
    return [data.name(sample) for sample in range(len(data))]


def said(uri: object, kind: type[HeadwayError] = DataError) -> str:
    """The sentence with which something is refused."""
    with pytest.raises(kind) as refused:
        opening.open(str(uri))
    assert type(refused.value) is kind
    return str(refused.value)


def looked_at(uri: Path, part: str = "") -> bool:
    """Whether foreign data open, without keeping columns. Anything but a sentence of ours is let out."""
    root = uri if uri.is_dir() else uri.parent
    try:
        found_columns, description = scan_records(
            detect.read_foreign_records(uri, (uri,), part, detect.LABEL_KINDS[0]), root, str(uri), None
        )
    except (DataError, UsageError) as error:
        where = str(error)
    else:
        where = ""
        data = Dataset(root, found_columns, description)
        assert [crc32c(record) for record in data.read(np.arange(len(data)))] == data.crc32c.tolist()
    assert not where or str(root) in where
    return not where


def damages(whole: bytes, edits: int, heads: Sequence[int] = ()) -> Iterator[bytes]:
    """The bytes of a file cut at many places, and with bytes changed; `heads`: places to change for certain."""
    rng = random.Random(0)
    for size in sorted({0, 1, 3, *rng.sample(range(len(whole)), min(20, len(whole))), len(whole) - 1}):
        yield whole[:size]
    for at in [*heads, *(rng.randrange(len(whole)) for _ in range(edits))]:
        changed = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            changed[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            at = min(len(whole) - 1, at + 1)
        yield bytes(changed)


def survives(path: Path, *, edits: int = 60, heads: Sequence[int] = (), open: Callable[[], bool] | None = None) -> None:
    """Damages a file in many ways: each either opens or is refused with a sentence. Puts it back as it was."""
    whole = path.read_bytes()
    opened = open or (lambda: looked_at(path))
    assert opened()
    for damaged in damages(whole, edits, heads):
        path.write_bytes(damaged)
        opened()
    path.write_bytes(whole)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, outside of the data."""
    folder = tmp_path / "the-cache"
    monkeypatch.setenv("HEADWAY_CACHE", str(folder))
    return folder
