"""Verifies a store: reads every shard and every version, and lists what is damaged or missing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.errors import DataError
from headway.core.files import describe_os_error
from headway.core.printable import escape_controls
from headway.data.columns import COLUMNS_FILE, compute_fingerprint, load_columns
from headway.data.formats.byte_ranges import map_path
from headway.data.store_address import VERSIONS
from headway.data.version_columns import compute_content_fingerprint
from headway.lifecycle.store.compaction import read_image
from headway.lifecycle.store.history import History, list_kept_versions
from headway.lifecycle.store.ingest import Progress
from headway.lifecycle.store.manifest import load_manifest
from headway.lifecycle.store.publishing import ALL_COLUMNS
from headway.lifecycle.store.rows import Rows
from headway.lifecycle.store.shard_objects import get_object_path, hash_file, list_objects
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
    """Checks all shards, and all versions that are there. Returns what is damaged or missing."""
    with history.read() as database:
        named = list_kept_versions(database, 1)
    folders = sorted((store / VERSIONS).glob("*"))
    damages = [
        StoreDamage(
            where=f"{VERSIONS}/{version}", reason="the version is missing, and it is the newest of a data set or tagged"
        )
        for version in sorted(named - {folder.name for folder in folders})
    ]
    objects = list(list_objects(store))
    total, done = len(objects) + len(folders), 0
    # Each record is read once, however many versions have it.
    seen: dict[str, set[tuple[int, bytes]]] = {}
    for path in objects:
        damages += _check_object(store, path)
        done += 1
        if progress:
            progress(done, total)
    for folder in folders:
        damages += _check_version(store, folder, seen)
        done += 1
        if progress:
            progress(done, total)
    return damages


def _check_object(store: Path, path: Path) -> Iterator[StoreDamage]:
    where = str(path.relative_to(store))
    try:
        digest = hash_file(path)
    except OSError as error:
        yield StoreDamage(where=where, reason=f"it cannot be read ({describe_os_error(error)})")
        return
    if digest != path.stem:
        yield StoreDamage(where=where, reason="its bytes have changed: their SHA-256 is not its name")


def _check_version(store: Path, folder: Path, seen: dict[str, set[tuple[int, bytes]]]) -> Iterator[StoreDamage]:
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
        yield from _check_records(store, f"{where}/{split}", rows, seen)


def _check_records(
    store: Path, where: str, rows: Rows, seen: dict[str, set[tuple[int, bytes]]]
) -> Iterator[StoreDamage]:
    """Compares the bytes of each sample with its ID."""
    offset = rows.places["offset"].tolist()
    views: dict[int, memoryview | None] = {}
    for number, shard in enumerate(rows.shards):
        path = get_object_path(store, shard.digest)
        try:
            views[number] = map_path(path)
        except DataError as error:
            views[number] = None
            yield StoreDamage(where=where, reason=f"{path.relative_to(store)}: {error.what}")
    for row, number in enumerate(rows.shard.tolist()):
        view, digest = views[number], rows.sample_id[row].tobytes()
        known = seen.setdefault(rows.shards[number].digest, set())
        if view is None or (offset[row], digest) in known:
            continue
        known.add((offset[row], digest))
        try:
            data = read_image(view, rows, row)
        except DataError as error:
            yield StoreDamage(where=f"{where}, sample {rows.names[row]}", reason=error.what)
            continue
        if hashlib.sha256(data).digest() != digest:
            yield StoreDamage(where=f"{where}, sample {rows.names[row]}", reason="its bytes are not those of its ID")
