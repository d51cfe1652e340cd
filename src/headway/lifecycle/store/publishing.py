"""Publishes versions: writes their folders aside, and moves them to their places once they are on the disk."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import final

import numpy as np
from safetensors.numpy import save

from headway.core.errors import DataError
from headway.core.files import sync_folder
from headway.data.columns import COLUMNS_FILE, compute_fingerprint, load_columns
from headway.data.store_address import MANIFEST_FILE, VERSIONS
from headway.lifecycle.store.manifest import Manifest, load_manifest
from headway.lifecycle.store.objects import get_object_path
from headway.lifecycle.store.open_objects import open_objects
from headway.lifecycle.store.rows import Rows
from headway.lifecycle.store.version_files import build_columns, get_version_folder

ALL_COLUMNS = "headway_columns"
"""Entry of the metadata of the columns: SHA-256 of all of them, the places of the records included."""
_SYNC_THREADS = 4


@final
@dataclass(frozen=True, kw_only=True)
class NewVersion:
    """A version that is about to be published."""

    version: str
    """ID."""
    folder: Path | None
    """Folder with its files, not on the disk yet; None: the store has the version already."""
    shards: frozenset[str]
    """Names of the shards that its columns lead to."""
    paths: tuple[Path, ...] = ()
    """The folder and everything in it."""


def prepare_version(store: Path, staging: Path, rows: Rows, manifest: Manifest) -> NewVersion:
    """Writes the folder of a version into `staging`, unless the store has it. Raises OSError."""
    version = manifest.compute_id()
    if (shards := _find_shards(store, version)) is not None:
        # Its time says to the garbage collection that somebody is about to use it.
        os.utime(get_version_folder(store, version))
        return NewVersion(version=version, folder=None, shards=shards)
    folder = staging / version
    paths = [folder, folder / MANIFEST_FILE]
    folder.mkdir()
    (folder / MANIFEST_FILE).write_bytes(manifest.to_bytes())
    for number, split in enumerate(rows.schema.splits):
        if split in manifest.splits:
            place = folder / split
            place.mkdir()
            part = rows.take(np.flatnonzero(rows.split == number))
            columns, description = build_columns(part, split, manifest, version)
            metadata = description.to_metadata() | {ALL_COLUMNS: compute_fingerprint(columns)}
            (place / COLUMNS_FILE).write_bytes(save(columns, metadata=metadata))
            paths += [place, place / COLUMNS_FILE]
    shards = frozenset(shard.digest for shard in rows.shards)
    return NewVersion(version=version, folder=folder, shards=shards, paths=tuple(paths))


def publish_versions(store: Path, staging: Path, versions: Sequence[NewVersion]) -> list[NewVersion]:
    """Moves the folders of versions to their places; they and their entries are on the disk then.

    Returns what is there now: another process may have published the same version meanwhile. Raises OSError.
    """
    paths = [path for one in versions for path in one.paths]
    if paths:
        # File systems with a journal write down together what is synced at the same time.
        # Each thread gets one list of them: handing over a file takes longer than most syncs of a small one.
        shares = [paths[first::_SYNC_THREADS] for first in range(min(_SYNC_THREADS, len(paths)))]
        with ThreadPoolExecutor(len(shares), thread_name_prefix="sync") as pool:
            list(pool.map(_sync, shares))
    published = [_put(store, staging, one) for one in versions]
    # Always: who has published a version that is there may not have come so far.
    sync_folder(store / VERSIONS)
    return published


def write_version(store: Path, staging: Path, rows: Rows, manifest: Manifest) -> str:
    """Writes and publishes one version. Returns the ID. Raises OSError."""
    (done,) = publish_versions(store, staging, [prepare_version(store, staging, rows, manifest)])
    return done.version


def expect_files(store: Path, version: NewVersion) -> None:
    """Raises DataError if a file of a published version is missing."""
    folder, objects = get_version_folder(store, version.version), open_objects(store)
    missing = [str(get_object_path(store, name)) for name in version.shards if objects.measure(name) is None]
    if not folder.exists():
        missing = [str(folder)]
    if missing:
        what = "a file of the new version is missing: was it collected as garbage, with too short a grace?"
        raise DataError(what, where=missing[0], fix="Make the change again.")


def expect_version(store: Path, version: str) -> None:
    """Raises DataError unless a version is there, with its shards."""
    if _find_shards(store, version) is None:
        what = "the version is not there, or damaged: it was collected as garbage, or the store is incomplete"
        raise DataError(what, where=str(get_version_folder(store, version)), fix="Begin with another version.")


def _sync(paths: Sequence[Path]) -> None:
    # Folders too.
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _put(store: Path, staging: Path, version: NewVersion) -> NewVersion:
    target = get_version_folder(store, version.version)
    if version.folder is None:
        return version
    while True:
        try:
            os.rename(version.folder, target)
            return version
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        # Another process has published it meanwhile, perhaps with other shards.
        if (shards := _find_shards(store, version.version)) is not None:
            return replace(version, folder=None, shards=shards)
        # It cannot be used: a shard of it is lost. Another process may be moving it aside too.
        with suppress(FileNotFoundError):
            os.rename(target, staging / f"lost-{secrets.token_hex(6)}")


def _find_shards(store: Path, version: str) -> frozenset[str] | None:
    """Returns the names of the shards of a version; None: it is not there, or cannot be used."""
    folder = get_version_folder(store, version)
    if not folder.is_dir():
        return None
    shards: dict[str, int] = {}
    try:
        for split in load_manifest(folder).splits:
            _, description, _ = load_columns(folder / split / COLUMNS_FILE)
            shards |= {PurePosixPath(shard.name).stem: shard.size for shard in description.shards}
    except DataError:
        return None
    objects = open_objects(store)
    is_whole = all(objects.measure(name) == size for name, size in shards.items())
    return frozenset(shards) if is_whole else None
