"""The file `samples.csv` of a Croissant description: a row for each image, and the version that its change asks for."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.dataset import Dataset
from headway.data.formats.tar_writer import guess_extension
from headway.lifecycle.interchange.croissant import LABELLED_BY, DescribedFile, DescribedSet, list_label_columns

SAMPLES_CSV = "samples.csv"
_BLOCK = 256
# Columns that say how the images are packed, and who labelled them: the samples are the same if others differ.
_ABOUT_PACKING = ("width", "height", "file", LABELLED_BY)

Progress = Callable[[int, int], None]


def write_samples(
    file: BinaryIO, sets: Mapping[str, Dataset], described: DescribedSet, setters: Mapping[str, str], progress: Progress
) -> DescribedFile:
    """Writes the SHA-256 of each record, its name, labels, split, size, and who set the label.

    Args:
        sets: packs by the name of their split.
        setters: who set the label of each record, by its SHA-256.
        progress: called with (samples done, samples in all).

    Raises:
        DataError: a record is damaged.
    """
    digest, size = hashlib.sha256(), 0
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(list_columns(described))
    total, done = sum(map(len, sets.values())), 0
    for name, dataset in sets.items():
        for start in range(0, len(dataset), _BLOCK):
            ids = np.arange(start, min(start + _BLOCK, len(dataset)))
            for row in _list_rows(dataset, ids, name, described, setters):
                writer.writerow(row)
            # Block by block: the table of a million images would take a gigabyte as one text.
            data = text.getvalue().encode()
            digest.update(data)
            file.write(data)
            size += len(data)
            text.seek(0)
            text.truncate()
            done += len(ids)
            progress(done, total)
    about = "Names, labels and sizes of the samples, in the order of the pack."
    return DescribedFile(
        id=SAMPLES_CSV, path=SAMPLES_CSV, size=size, sha256=digest.hexdigest(), media_type="text/csv", about=about
    )


def list_columns(described: DescribedSet) -> list[str]:
    """Returns the columns of the file."""
    split = ["split"] if described.splits else []
    by = [LABELLED_BY] if described.labellers else []
    file = ["file"] if described.image_types else []
    return ["sha256", "name", *list_label_columns(described), *split, *by, "width", "height", *file]


def _list_rows(
    dataset: Dataset, ids: NDArray[np.int64], split: str, described: DescribedSet, setters: Mapping[str, str]
) -> Iterator[list[str]]:
    for sample, record in zip(ids.tolist(), dataset.read(ids), strict=True):
        if crc32c(record) != dataset.crc32c[sample]:
            what = f"the record of sample {sample:,} is damaged"
            raise DataError(what, where=str(dataset.folder), fix="Run headway verify, and pack again.")
        digest = hashlib.sha256(record).hexdigest()
        cells = [digest, dataset.name(sample), *_list_labels(dataset, sample, described.separator)]
        cells += [split] if described.splits else []
        cells += [setters.get(digest, "")] if described.labellers else []
        cells += [str(dataset.width[sample]), str(dataset.height[sample])]
        if described.image_types:
            cells.append(f"{_number_record(dataset, sample):09d}.{guess_extension(bytes(record[:16]))}")
        yield cells


def _number_record(dataset: Dataset, sample: int) -> int:
    """Returns the number that a sample has in its shard; bad images that were left out before it are counted too."""
    gaps = dataset.description.record_gaps
    return sample + (gaps[dataset.shard[sample]] if gaps else 0)


def _list_labels(dataset: Dataset, sample: int, separator: str) -> list[str]:
    label, classes = dataset.label[sample], dataset.classes
    match dataset.description.label_kind:
        case "class":
            # Samples of a version may have no label yet.
            return [classes[int(label)] if label >= 0 else ""]
        case "multi":
            return [separator.join(classes[place] for place in np.flatnonzero(label))]
        case _:
            # `str` of a float32 has the fewest digits that restore it: 0.1, not 0.10000000149.
            return [str(number) for number in np.atleast_1d(label)]


def advise_version(version: str, old: Path, new: Path, *, same_files: bool) -> list[str]:
    """Returns a sentence with the next version, by the rules of Croissant, if the data are not those of `version` now.

    Args:
        version: MAJOR.MINOR.PATCH of the earlier description.
        old, new: samples.csv of the earlier description, and of this one.
        same_files: the shards are those of the earlier one.
    """
    before = set(_read_samples(old))
    kept, is_more = 0, False
    for sample in _read_samples(new):
        kept += sample in before
        is_more = is_more or sample not in before
    major, minor, patch = map(int, version.split("."))
    if kept < len(before):
        what, wanted = "samples were changed, moved or removed", (major + 1, 0, 0)
    elif is_more:
        what, wanted = "samples were added", (major, minor + 1, 0)
    elif not same_files:
        what, wanted = "the same samples are packed otherwise", (major, minor, patch + 1)
    else:
        return []
    return [f"This is still version {version}, and {what}: give it --version {'.'.join(map(str, wanted))}."]


def _read_samples(path: Path) -> Iterator[int]:
    """Yields a number for each row; it depends on what says which sample it is, and its labels and split."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file):
            yield hash(tuple((name, cell) for name, cell in row.items() if name not in _ABOUT_PACKING))
