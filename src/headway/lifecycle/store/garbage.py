"""Garbage collection: removes what no name leads to, and leaves what a running job may be about to use."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import final

from headway.core.errors import DataError, UsageError
from headway.core.files import sync_folder
from headway.core.text_format import format_bytes, pluralise
from headway.data.columns import COLUMNS_FILE, load_columns
from headway.data.store_address import OBJECTS, VERSIONS
from headway.lifecycle.copies.hash_cache import EXTENSION as HASHES
from headway.lifecycle.store.history import History, list_kept_versions
from headway.lifecycle.store.manifest import load_manifest
from headway.lifecycle.store.shard_objects import EXTENSION, STAGING, is_abandoned, is_older, list_objects, stage


@final
@dataclass(frozen=True, kw_only=True)
class GarbageResult:
    """Files that were removed, or would be."""

    versions: tuple[str, ...]
    """IDs."""
    shards: int
    staging: int
    """Folders of processes that were killed."""
    bytes: int
    """Size of the shards and columns."""

    def describe(self, *, dry_run: bool) -> str:
        """Returns a sentence for the user."""
        did = "Would remove" if dry_run else "Removed"
        parts = (pluralise(len(self.versions), "version"), pluralise(self.shards, "shard"))
        leftovers = f" and {pluralise(self.staging, 'folder')} of killed processes" if self.staging else ""
        return f"{did} {', '.join(parts)}{leftovers}: {format_bytes(self.bytes)}."


def collect_garbage(store: Path, history: History, *, keep: int | None, grace_s: float, dry_run: bool) -> GarbageResult:
    """Removes versions, shards and leftovers that nothing needs; see `Store.collect_garbage`."""
    if keep is not None and keep < 1:
        raise UsageError(f"{keep} versions cannot be kept", fix="Keep at least 1: the newest one.")
    # Reading all columns takes long, so others may commit meanwhile; what they have changed is looked at again below.
    needs = {folder.name: _list_shards(folder) for folder in _list_versions(store)}
    if dry_run:
        with history.read() as database:
            return _choose(store, list_kept_versions(database, keep), needs, grace_s).count()
    with stage(store) as trash:
        # Nobody may commit here: a commit checks, under the same lock, that all of its files are there.
        with history.lock() as database:
            found = _choose(store, list_kept_versions(database, keep), needs, grace_s)
            result = found.count()
            # A version is gone at once, and before its shards: what is there is always whole.
            for folder in found.versions:
                os.rename(folder, trash / folder.name)
            if found.versions:
                sync_folder(store / VERSIONS)
            for path in found.shards:
                os.rename(path, trash / path.name)
        for path in (store / OBJECTS).glob(f"??/*{HASHES}"):
            # Also those that a killed process has left.
            if not path.with_suffix(EXTENSION).exists():
                path.unlink(missing_ok=True)
        for folder in found.staging:
            shutil.rmtree(folder, ignore_errors=True)
    return result


@final
@dataclass(frozen=True)
class _Garbage:
    """Paths that nothing needs."""

    versions: list[Path]
    shards: list[Path]
    staging: list[Path]

    def count(self) -> GarbageResult:
        files = [*self.shards, *(path for folder in self.versions for path in folder.rglob("*") if path.is_file())]
        return GarbageResult(
            versions=tuple(folder.name for folder in self.versions),
            shards=len(self.shards),
            staging=len(self.staging),
            bytes=sum(path.stat().st_size for path in files),
        )


def _choose(store: Path, kept: set[str], needs: dict[str, set[str]], grace_s: float) -> _Garbage:
    """Chooses what can go.

    Args:
        kept: IDs of the versions that names lead to.
        needs: names of the shards of each version, as far as they are known.
    """
    folders = _list_versions(store)
    old = [folder for folder in folders if folder.name not in kept and is_older(folder, grace_s)]
    needed = set[str]()
    for folder in folders:
        if folder not in old:
            needed |= needs[folder.name] if folder.name in needs else _list_shards(folder)
    return _Garbage(
        versions=old,
        shards=[path for path in list_objects(store) if path.name not in needed and is_older(path, grace_s)],
        # A pack may write into its folder for days.
        staging=[
            path for path in sorted((store / STAGING).glob("*")) if is_older(path, grace_s) and is_abandoned(path)
        ],
    )


def _list_versions(store: Path) -> list[Path]:
    return sorted((store / VERSIONS).glob("*"))


def _list_shards(version: Path) -> set[str]:
    """Returns the file names of the shards of a version. Raises DataError if it is damaged."""
    names = set[str]()
    # By its manifest, so that a split whose columns are missing is noticed.
    for split in load_manifest(version).splits:
        try:
            _, description, _ = load_columns(version / split / COLUMNS_FILE)
        except DataError as error:
            fix = "Restore it from a copy. Until then nothing is removed, since its shards are unknown."
            raise DataError(error.what, where=error.where, fix=fix) from error
        names.update(PurePosixPath(shard.name).name for shard in description.shards)
    return names
