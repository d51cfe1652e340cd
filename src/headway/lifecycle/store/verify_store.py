"""Verifies a store: reads every shard and every version, and lists what is damaged or missing."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from headway.core.errors import DataError
from headway.core.printable import escape_controls
from headway.core.text_format import pluralise
from headway.data.columns import COLUMNS_FILE, FLAG_SPLIT, compute_fingerprint, load_columns
from headway.data.store_address import VERSIONS
from headway.data.version_columns import compute_content_fingerprint
from headway.lifecycle.store.history import History, list_kept_versions
from headway.lifecycle.store.ingest import Progress
from headway.lifecycle.store.manifest import load_manifest
from headway.lifecycle.store.objects import Objects, get_object_path, read_view
from headway.lifecycle.store.open_objects import open_objects
from headway.lifecycle.store.publishing import ALL_COLUMNS
from headway.lifecycle.store.rows import Rows
from headway.lifecycle.store.version_files import read_split


@final
@dataclass(frozen=True, kw_only=True)
class StoreDamage:
    """One damaged or missing file, or sample."""

    where: str
    """File, or version and sample."""
    reason: str

    def __str__(self) -> str:
        return f"{escape_controls(self.where, lines=False)}: {self.reason}"


def verify_store(store: Path, history: History, progress: Progress | None = None) -> list[StoreDamage]:
    """Checks all shards, and all versions that are there. Returns what is damaged or missing.

    Raises UsageError if no installed package reads the address of the shards.
    """
    objects = open_objects(store)
    with history.read() as database:
        named = list_kept_versions(database, 1)
    folders = sorted((store / VERSIONS).glob("*"))
    damages = [
        StoreDamage(
            where=f"{VERSIONS}/{version}", reason="the version is missing, and it is the newest of a data set or tagged"
        )
        for version in sorted(named - {folder.name for folder in folders})
    ]
    # By shard: each record is read once, however many versions have it, and so is each shard.
    wanted = defaultdict[str, _Records](dict)
    entries = {path.stem: path for path in objects.list_entries()}
    total, done = len(folders) + len(entries), 0
    for folder in folders:
        damages += _check_version(store, folder, wanted)
        done += 1
        if progress:
            progress(done, total)
    for digest in sorted({*entries, *wanted}):
        where = get_object_path(store, digest).relative_to(store)
        damages += _check_object(objects, digest, str(where), wanted[digest])
        done += digest in entries
        if progress:
            progress(done, total)
    return damages


@final
class _Record(NamedTuple):
    """A record to read, and the sample of a split that it was found in. Small, since there may be millions."""

    rows: Rows
    row: int
    split: str

    @property
    def where(self) -> str:
        return f"{self.split}, sample {self.rows.names[self.row]}"

    def read(self, shard: memoryview) -> bytes:
        """Returns its image. Raises DataError if it is damaged."""
        offset, length, flags = (int(self.rows.places[name][self.row]) for name in ("offset", "length", "flags"))
        return read_view(shard, offset, length, is_split=bool(flags & FLAG_SPLIT))


_Records = dict[tuple[int, bytes], _Record]
"""Records of a shard, by their offset and the SHA-256 of the image."""


def _check_object(objects: Objects, digest: str, where: str, records: _Records) -> Iterator[StoreDamage]:
    """Compares the bytes of a shard with its name, and those of each sample in it with its ID."""
    try:
        with objects.open(digest) as view:
            if hashlib.sha256(view).hexdigest() != digest:
                yield StoreDamage(where=where, reason="its bytes have changed: their SHA-256 is not its name")
            for (_, sample), record in records.items():
                try:
                    data = record.read(view)
                except DataError as error:
                    yield StoreDamage(where=record.where, reason=error.what)
                    continue
                if hashlib.sha256(data).digest() != sample:
                    yield StoreDamage(where=record.where, reason="its bytes are not those of its ID")
    except DataError as error:
        first = next(iter(records.values()), None)
        lost = "" if first is None else f"; it holds {pluralise(len(records), 'sample')}, such as {first.where}"
        yield StoreDamage(where=where, reason=f"{error.what}{lost}")


def _check_version(store: Path, folder: Path, wanted: defaultdict[str, _Records]) -> Iterator[StoreDamage]:
    """Checks the files of a version, and notes its records in `wanted`."""
    where = str(folder.relative_to(store))
    try:
        manifest = load_manifest(folder)
    except DataError as error:
        yield StoreDamage(where=where, reason=error.what)
        return
    for split in manifest.splits:
        try:
            rows = read_split(folder, manifest, split)
        except DataError as error:
            yield StoreDamage(where=f"{where}/{split}", reason=error.what)
            continue
        columns, _, metadata = load_columns(folder / split / COLUMNS_FILE)
        is_sound = metadata.get(ALL_COLUMNS) == compute_fingerprint(columns)
        if not is_sound or compute_content_fingerprint(columns) != manifest.splits[split].fingerprint:
            yield StoreDamage(where=f"{where}/{split}", reason="a column is damaged (the fingerprint does not match)")
        _note_records(f"{where}/{split}", rows, wanted)


def _note_records(where: str, rows: Rows, wanted: defaultdict[str, _Records]) -> None:
    parts = [wanted[shard.digest] for shard in rows.shards]
    for row, (number, offset) in enumerate(zip(rows.shard.tolist(), rows.places["offset"].tolist(), strict=True)):
        # What an earlier version has noted stays.
        parts[number].setdefault((offset, rows.sample_id[row].tobytes()), _Record(rows, row, where))
