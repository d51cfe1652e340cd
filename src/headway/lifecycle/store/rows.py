"""Rows: all samples of a version as arrays, sorted by their IDs. Nothing per sample in Python, so millions are fine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from headway.lifecycle.store.annotations import decode_annotations
from headway.lifecycle.store.manifest import Schema
from headway.lifecycle.store.records import Sample

NO_LABEL = -1
NOT_PLANNED = 255
PLACES = ("offset", "length", "crc32c", "width", "height", "flags", "gray")
"""Columns that describe the stored bytes; they go with them into every version."""

FOLDER_LEVELS = 8
"""Most levels of folders that are counted."""

Ids = NDArray[np.int64]
_WILDCARD = re.compile(r"[*?\[]")


class ShardObject(NamedTuple):
    """A shard in the store."""

    digest: str
    """SHA-256 of its bytes, which is its name."""
    size: int
    pack_id: int
    """Number of the pack that its records carry."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Names:
    """Texts end to end in one array, as the columns of a pack hold them."""

    text: NDArray[np.uint8]
    offset: NDArray[np.uint64]

    @staticmethod
    def build(names: Sequence[str]) -> Names:
        """Joins texts."""
        encoded = [name.encode() for name in names]
        return Names(
            text=np.frombuffer(b"".join(encoded), np.uint8),
            offset=np.cumsum([0, *map(len, encoded)], dtype=np.uint64),
        )

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, row: int) -> str:
        return self.text[self.offset[row] : self.offset[row + 1]].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        text, offset = self.text.tobytes(), self.offset.tolist()
        return (text[begin:end].decode() for begin, end in pairwise(offset))

    def find(self, text: str) -> int:
        """Returns the row of a text, or -1; it takes 50 ms for a million."""
        wanted = np.frombuffer(text.encode(), np.uint8)
        rows = np.flatnonzero(np.diff(self.offset) == len(wanted))
        ends = self.offset[rows + 1].astype(np.int64)
        # From the end: file names differ there, and begin with the same folders.
        for place in range(1, len(wanted) + 1):
            is_equal = self.text[ends - place] == wanted[-place]
            rows, ends = rows[is_equal], ends[is_equal]
        return int(rows[0]) if len(rows) else -1

    def match(self, pattern: str) -> NDArray[np.bool_]:
        """Returns True for the texts that fit a pattern such as `night/*`, as `fnmatch` has it; bool [n]."""
        prefix = _WILDCARD.split(pattern, maxsplit=1)[0]
        wanted = np.frombuffer(prefix.encode(), np.uint8)
        rows = np.flatnonzero(np.diff(self.offset) >= len(wanted))
        begin = self.offset[rows].astype(np.int64)
        # Without a wildcard in it, the beginning is compared for all texts at once: a folder takes 50 ms for a million.
        for place in reversed(range(len(wanted))):
            is_equal = self.text[begin + place] == wanted[place]
            rows, begin = rows[is_equal], begin[is_equal]
        if pattern != f"{prefix}*":
            fits, text = re.compile(translate(pattern)).match, self.text.tobytes()
            places = zip(self.offset[rows].tolist(), self.offset[rows + 1].tolist(), strict=True)
            rows = rows[np.array([fits(text[begin:end].decode()) is not None for begin, end in places], np.bool_)]
        mask = np.zeros(len(self), np.bool_)
        mask[rows] = True
        return mask

    def count_folders(self) -> dict[str, int]:
        """Returns the number of texts in each folder of the first levels, such as `night`, its subfolders included."""
        counts = Counter[str]()
        for folder, count in Counter(text.rpartition("/")[0] for text in self).items():
            parts = folder.split("/") if folder else []
            # A name may have 500 levels, and a million such names would be 500 million folders.
            for depth in range(1, min(len(parts), FOLDER_LEVELS) + 1):
                counts["/".join(parts[:depth])] += count
        return dict(counts)

    def take(self, rows: Ids) -> Names:
        """Returns the texts of these rows."""
        begin = self.offset[rows].astype(np.int64)
        length = self.offset[rows + 1].astype(np.int64) - begin
        offset = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(length, out=offset[1:])
        # Source place of each byte: its place in the result, shifted by where its text begins.
        source = np.arange(offset[-1]) + np.repeat(begin - offset[:-1], length)
        return Names(text=self.text[source], offset=offset.astype(np.uint64))

    @staticmethod
    def join(parts: Sequence[Names]) -> Names:
        """Returns all texts of several lists."""
        ends = np.cumsum([0, *(len(part.text) for part in parts)])
        offsets = [part.offset[1:] + np.uint64(end) for part, end in zip(parts, ends, strict=False)]
        return Names(
            text=np.concatenate([part.text for part in parts] or [np.zeros(0, np.uint8)]),
            offset=np.concatenate([np.zeros(1, np.uint64), *offsets]),
        )


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Samples of a version, or new ones for it. Every array has an entry for each sample."""

    schema: Schema
    classes: tuple[str, ...]
    """Names of the classes, in the order of their numbers."""
    shards: tuple[ShardObject, ...]
    sample_id: NDArray[np.uint8]
    """SHA-256 of the stored bytes, uint8 [n, 32]."""
    names: Names
    label: NDArray[np.int64]
    """Number of the class; NO_LABEL."""
    split: NDArray[np.uint8]
    """Number of the split in `Schema.splits`."""
    shard: NDArray[np.uint32]
    """Number in `shards`."""
    places: dict[str, NDArray[Any]]
    """The columns of PLACES."""
    annotations: Names | None = None
    """Canonical text of each sample's annotations, often empty; see `encode_annotations`. None: no sample has any."""
    planned: NDArray[np.uint8] | None = None
    """Number of the split that a sample without a label goes to when it gets one: that in which it was, or was wanted.
    NOT_PLANNED: where its name says. None: no sample has a planned split."""

    def __len__(self) -> int:
        return len(self.label)

    @property
    def keys(self) -> NDArray[np.bytes_]:
        """IDs as one value each, which numpy can sort and search; [n]."""
        # numpy ignores zeros at the end of these, and all have the same length, so equal keys are equal IDs.
        return np.ascontiguousarray(self.sample_id).view("S32").reshape(-1)

    def get_sample(self, row: int) -> Sample:
        """Returns one sample."""
        label = int(self.label[row])
        return Sample(
            sample=self.sample_id[row].tobytes().hex(),
            name=self.names[row],
            label=None if label == NO_LABEL else self.classes[label],
            split=self.schema.splits[self.split[row]],
            annotations=None if self.annotations is None else decode_annotations(self.annotations[row]),
            planned_split=""
            if self.planned is None or self.planned[row] == NOT_PLANNED
            else self.schema.splits[self.planned[row]],
        )

    def find(self, keys: NDArray[np.bytes_]) -> Ids:
        """Returns the row of each ID, -1 where there is none. The rows must be sorted."""
        if not len(self):
            return np.full(len(keys), -1, np.int64)
        own = self.keys
        # The samples of two versions are often the same.
        if len(keys) == len(own) and (keys == own).all():
            return np.arange(len(own))
        places = np.minimum(np.searchsorted(own, keys), len(own) - 1)
        return np.where(own[places] == keys, places, -1).astype(np.int64)

    def take(self, rows: Ids) -> Rows:
        """Returns these rows."""
        return replace(
            self,
            sample_id=self.sample_id[rows],
            names=self.names.take(rows),
            label=self.label[rows],
            split=self.split[rows],
            shard=self.shard[rows],
            places={name: column[rows] for name, column in self.places.items()},
            annotations=None if self.annotations is None else self.annotations.take(rows),
            planned=None if self.planned is None else self.planned[rows],
        )

    def get_annotations(self) -> Names:
        """Returns the text of each sample's annotations, also where no sample has any."""
        return self.annotations or Names(text=np.zeros(0, np.uint8), offset=np.zeros(len(self) + 1, np.uint64))

    def get_planned(self) -> NDArray[np.uint8]:
        """Returns the planned split of each sample, also where no sample has one."""
        return np.full(len(self), NOT_PLANNED, np.uint8) if self.planned is None else self.planned

    def name_classes(self, classes: tuple[str, ...]) -> Rows:
        """Returns the same rows with another list of classes, which has all that are in use."""
        if classes == self.classes:
            return self
        numbers = {name: number for number, name in enumerate(classes)}
        # One entry more: NO_LABEL is the last one, by Python's rule for -1.
        table = np.array([*(numbers.get(name, NO_LABEL) for name in self.classes), NO_LABEL], np.int64)
        return replace(self, classes=classes, label=table[self.label])

    def settle(self) -> Rows:
        """Returns the same samples in their canonical form: sorted by ID, with the classes and shards in use only."""
        keys = self.keys
        # A change of labels leaves the order as it is, and to sort a million IDs takes longer than all else.
        ordered = self if (keys[:-1] <= keys[1:]).all() else self.take(np.argsort(keys, kind="stable"))
        if self.schema.classes is not None:
            classes = self.schema.classes
        else:
            used = np.unique(self.label[self.label != NO_LABEL])
            classes = tuple(sorted(self.classes[number] for number in used.tolist()))
        ordered = ordered.name_classes(classes)
        used_shards = np.unique(ordered.shard)
        table = np.zeros(len(self.shards), np.uint32)
        table[used_shards] = np.arange(len(used_shards), dtype=np.uint32)
        shards = tuple(self.shards[number] for number in used_shards.tolist())
        annotations = ordered.annotations
        if annotations is not None and not len(annotations.text):
            annotations = None
        return replace(
            ordered,
            shards=shards,
            shard=table[ordered.shard],
            annotations=annotations,
            planned=ordered._settle_planned(),
        )

    def _settle_planned(self) -> NDArray[np.uint8] | None:
        """Returns the planned splits without those of labelled samples, and those that the names say anyway."""
        if self.planned is None:
            return None
        planned = np.where(self.label == NO_LABEL, self.planned, NOT_PLANNED).astype(np.uint8)
        rows = np.flatnonzero(planned != NOT_PLANNED)
        said = self.schema.choose_splits(self.names.take(rows))
        planned[rows[planned[rows] == said]] = NOT_PLANNED
        return None if (planned == NOT_PLANNED).all() else planned


def build_empty(schema: Schema) -> Rows:
    """Returns no samples."""
    none = np.zeros(0, np.int64)
    return Rows(
        schema=schema,
        classes=schema.classes or (),
        shards=(),
        sample_id=np.zeros((0, 32), np.uint8),
        names=Names.build([]),
        label=none,
        split=none.astype(np.uint8),
        shard=none.astype(np.uint32),
        places={name: none.astype(PLACE_TYPES[name]) for name in PLACES},
    )


PLACE_TYPES = {
    "offset": np.uint64,
    "length": np.uint32,
    "crc32c": np.uint32,
    "width": np.uint32,
    "height": np.uint32,
    "flags": np.uint8,
    "gray": np.uint8,
}


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Returns the samples of all parts, which have one schema; sort them with `Rows.settle`."""
    classes = tuple(sorted({name for part in parts for name in part.classes}))
    numbers: dict[ShardObject, int] = {}
    shards = []
    for part in parts:
        table = np.array([numbers.setdefault(shard, len(numbers)) for shard in part.shards], np.uint32)
        shards.append(table[part.shard] if len(part) else part.shard)
    named = [part.name_classes(classes) for part in parts]
    return Rows(
        schema=parts[0].schema,
        classes=classes,
        shards=tuple(numbers),
        sample_id=np.concatenate([part.sample_id for part in parts]),
        names=Names.join([part.names for part in parts]),
        label=np.concatenate([part.label for part in named]),
        split=np.concatenate([part.split for part in parts]),
        shard=np.concatenate(shards),
        places={name: np.concatenate([part.places[name] for part in parts]) for name in PLACES},
        annotations=Names.join([part.get_annotations() for part in parts])
        if any(part.annotations is not None for part in parts)
        else None,
        planned=np.concatenate([part.get_planned() for part in parts])
        if any(part.planned is not None for part in parts)
        else None,
    )
