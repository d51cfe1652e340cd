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
from headway.data.store_pins import list_pins
from headway.lifecycle.copies.hash_cache import EXTENSION as HASHES
from headway.lifecycle.store.history import History, list_kept_versions
from headway.lifecycle.store.manifest import load_manifest
from headway.lifecycle.store.objects import Objects
from headway.lifecycle.store.open_objects import open_objects
from headway.lifecycle.store.shard_objects import STAGING, is_abandoned, is_older, stage


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
    pinned: int = 0
    """Versions that stay only because a run needs them."""

    def describe(self, *, dry_run: bool) -> str:
        """Returns a sentence for the user."""
        did = "Would remove" if dry_run else "Removed"
        parts = (pluralise(len(self.versions), "version"), pluralise(self.shards, "shard"))
        leftovers = f" and {pluralise(self.staging, 'folder')} of killed processes" if self.staging else ""
        kept = f" Kept {pluralise(self.pinned, 'older version')} that runs need." if self.pinned else ""
        return f"{did} {', '.join(parts)}{leftovers}: {format_bytes(self.bytes)}.{kept}"


def collect_garbage(
    store: Path, history: History, *, keep: int | None, grace_s: float, dry_run: bool, is_moved: bool
) -> GarbageResult:
    """Removes versions, shards and leftovers that nothing needs; see `Store.collect_garbage`."""
    if keep is not None and keep < 1:
        raise UsageError(f"{keep} versions cannot be kept", fix="Keep at least 1: the newest one.")
    objects = open_objects(store)
    if not dry_run:
        objects.expect_owner(is_moved=is_moved)
    # Reading all columns takes long, so others may commit meanwhile; what they have changed is looked at again below.
    needs = {folder.name: _list_shards(folder) for folder in _list_versions(store)}
    if dry_run:
        with history.read() as database:
            return _choose(store, objects, list_kept_versions(database, keep), needs, grace_s).count(objects)
    with stage(store) as trash:
        # Nobody may commit here: a commit checks, under the same lock, that all of its files are there.
        with history.lock() as database:
            found = _choose(store, objects, list_kept_versions(database, keep), needs, grace_s)
            result = found.count(objects)
            # A version is gone at once, and before its shards: what is there is always whole.
            for folder in found.versions:
                os.rename(folder, trash / folder.name)
            if found.versions:
                sync_folder(store / VERSIONS)
            for path in found.shards:
                objects.remove_entry(path, trash)
        for path in (store / OBJECTS).glob(f"??/*{HASHES}"):
            # Also those that a killed process has left.
            if objects.measure(path.stem) is None:
                path.unlink(missing_ok=True)
        for path, pin in list_pins(store):
            if pin is None:
                path.unlink(missing_ok=True)
        for folder in found.staging:
            shutil.rmtree(folder, ignore_errors=True)
        # Last, since an address may be out of reach: the next collection goes on with it.
        objects.sweep()
    return result


@final
@dataclass(frozen=True)
class _Garbage:
    """Paths that nothing needs."""

    versions: list[Path]
    shards: list[Path]
    """Entries of objects."""
    staging: list[Path]
    pinned: int

    def count(self, objects: Objects) -> GarbageResult:
        files = [path for folder in self.versions for path in folder.rglob("*") if path.is_file()]
        return GarbageResult(
            versions=tuple(folder.name for folder in self.versions),
            shards=len(self.shards),
            staging=len(self.staging),
            bytes=sum(path.stat().st_size for path in files)
            + sum(objects.measure(path.stem) or 0 for path in self.shards),
            pinned=self.pinned,
        )


def _choose(store: Path, objects: Objects, kept: set[str], needs: dict[str, set[str]], grace_s: float) -> _Garbage:
    """Chooses what can go.

    Args:
        kept: IDs of the versions that names lead to.
        needs: SHA-256 of the shards of each version, as far as they are known.
    """
    folders = _list_versions(store)
    pinned = {version for _, pin in list_pins(store) if pin is not None for version in pin.versions}
    unnamed = [folder for folder in folders if folder.name not in kept and is_older(folder, grace_s)]
    old = [folder for folder in unnamed if folder.name not in pinned]
    staging = sorted((store / STAGING).glob("*"))
    # Uploading many shards may take longer than the grace. Those that were brought to an address have these names here.
    needed = {
        PurePosixPath(name).stem
        for folder in staging
        if not is_abandoned(folder)
        for _, _, names in os.walk(folder)
        for name in names
    }
    for folder in folders:
        if folder not in old:
            needed |= needs[folder.name] if folder.name in needs else _list_shards(folder)
    return _Garbage(
        versions=old,
        shards=[path for path in objects.list_entries() if path.stem not in needed and is_older(path, grace_s)],
        # A pack may write into its folder for days.
        staging=[path for path in staging if is_older(path, grace_s) and is_abandoned(path)],
        pinned=len(unnamed) - len(old),
    )


def _list_versions(store: Path) -> list[Path]:
    return sorted((store / VERSIONS).glob("*"))


def _list_shards(version: Path) -> set[str]:
    """Returns the SHA-256 of each shard of a version. Raises DataError if it is damaged."""
    names = set[str]()
    # By its manifest, so that a split whose columns are missing is noticed.
    for split in load_manifest(version).splits:
        try:
            _, description, _ = load_columns(version / split / COLUMNS_FILE)
        except DataError as error:
            fix = "Restore it from a copy. Until then nothing is removed, since its shards are unknown."
            raise DataError(error.what, where=error.where, fix=fix) from error
        names.update(PurePosixPath(shard.name).stem for shard in description.shards)
    return names
