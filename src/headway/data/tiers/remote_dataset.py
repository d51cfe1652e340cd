"""Opens a packed data set at a URL: its columns are fetched whole, its records as they are read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.core.files import read_text, write_atomically
from headway.core.untrusted_json import parse_object
from headway.data.columns import COLUMNS_FILE, PACK_FORMATS, DatasetDescription, compute_fingerprint, load_columns
from headway.data.dataset import Dataset
from headway.data.pack_part import PART_FILE
from headway.data.records import Records
from headway.data.store_objects import RemoteObjects
from headway.data.tiers.layout import Columns, Ids, RecordLayout, extract_image
from headway.data.tiers.state import LOCKS_FILE, STATE_FILE
from headway.data.tiers.store import PACKS_FOLDER
from headway.storage.addresses import get_cache_folder as default_cache_folder
from headway.storage.remote_folder import RemoteFolder
from headway.storage.transport import FileVersion


def open_remote(uri: str, cache_folder: str | os.PathLike[str] | None = None) -> Dataset:
    """Opens the pack at a URL, such as s3://bucket/imagenet/train.

    The columns are checked against their fingerprint and kept in `cache_folder / packs / fingerprint`; they are fetched
    again only if the remote file has changed. `Dataset.read` fetches one run after another; a tier is faster.

    Args:
        cache_folder: None: see `headway.storage.addresses.get_cache_folder`.

    Raises:
        UsageError: there is no pack at this URL, or no installed package can read it.
        DataError: its columns are damaged, or cannot be fetched.
    """
    remote = RemoteFolder(uri)
    cache_root = Path(cache_folder or default_cache_folder())
    try:
        version = remote.read_version(COLUMNS_FILE)
    except FileNotFoundError:
        raise _build_no_pack_error(remote) from None
    try:
        columns, description = _load_cached_columns(cache_root, remote.uri, version) or _fetch_columns(
            cache_root, remote, version
        )
    finally:
        remote.close()
    if description.format not in PACK_FORMATS:
        what = f"the pack format {description.format!r} is not known"
        raise DataError(what, where=remote.display_uri, fix="Pack the data again.")
    # The disk tier creates local files with these names, which must stay inside its folder.
    for shard in description.shards:
        path = PurePosixPath(shard.name)
        if path.is_absolute() or ".." in path.parts or path.name in ("", COLUMNS_FILE, STATE_FILE, LOCKS_FILE):
            raise DataError(
                f"{shard.name!r} is not the name of a shard", where=remote.display_uri, fix="Pack the data again."
            )
    return Dataset(Path(remote.display_uri), columns, description, source=RemoteShards(remote, columns, description))


def open_remote_version(
    folder: Path, columns: Columns, description: DatasetDescription, objects: RemoteObjects
) -> Dataset:
    """Opens columns on this machine whose shards lie at the address of a store; records are fetched as they are read.

    No shard is looked at: one that is missing is found when a record of it is read.

    Raises UsageError if no installed package can read such an address.
    """
    described = replace(description, shards=objects.shards)
    source = RemoteShards(RemoteFolder(objects.address), columns, described, objects.home)
    return Dataset(folder, columns, described, source=source)


@final
class RemoteShards:
    """Reads remote records when asked for, one run after another, in the calling thread.

    Attributes:
        home: folder on this machine with files about the shards of a store, by the same names; None: not of a store.
    """

    def __init__(
        self, remote: RemoteFolder, columns: Columns, description: DatasetDescription, home: Path | None = None
    ) -> None:
        shards = description.shards
        self.home = home
        self.remote = remote.reopen({shard.name: shard.size for shard in shards})
        self._columns = columns
        self._layout = RecordLayout(columns, shards)
        self._names = [shard.name for shard in shards]

    def read(self, ids: Ids) -> Records:
        """Reads records as `Dataset.read`. Raises DataError if a shard cannot be read."""
        extents: dict[int, NDArray[np.uint8]] = {}
        # Each sample is fetched once, even if it occurs several times; neighbours share a request.
        for run in self._layout.group_into_runs(np.unique(ids)):
            run_start = int(run.start[0])
            data = self.remote.read(self._names[int(run.shard[0])], run_start, int(run.end.max()) - run_start)
            extents.update(zip(run.ids.tolist(), run.slice_bytes(run_start, data), strict=True))
        return Records.from_buffers([extract_image(self._columns, sample, extents[sample]) for sample in ids.tolist()])

    def close(self) -> None:
        """Closes the connections; a later read opens new ones."""
        self.remote.close()


def _load_cached_columns(cache_root: Path, uri: str, version: FileVersion) -> tuple[Columns, DatasetDescription] | None:
    """Returns the columns fetched from this URL earlier, or None if the remote file has changed since."""
    try:
        note = parse_object(read_text(_get_note_path(cache_root, uri)))
        # Without an entity tag or a time, equal sizes do not prove equal files.
        if not version.tag or note["mark"] != list(version):
            return None
        path = cache_root / PACKS_FOLDER / note["fingerprint"] / COLUMNS_FILE
        if path.stat().st_size != version.size:
            return None
        columns, description, metadata = load_columns(path)
        # Packs with equal columns share this file, though their class names may differ.
        if note["description"] != _hash_description(metadata):
            return None
    except (OSError, ValueError, LookupError, TypeError, DataError):
        return None
    return columns, description


def _fetch_columns(cache_root: Path, remote: RemoteFolder, version: FileVersion) -> tuple[Columns, DatasetDescription]:
    """Fetches the columns and writes them to the cache folder, if that is possible."""
    columns, description, data = _fetch_and_verify(remote, version)
    columns_path = cache_root / PACKS_FOLDER / description.fingerprint / COLUMNS_FILE
    try:
        columns_path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(columns_path, data)
        # The note maps a URL to a fingerprint; several URLs may share one copy.
        note_path = _get_note_path(cache_root, remote.uri)
        note_path.parent.mkdir(exist_ok=True)
        columns, description, metadata = load_columns(columns_path)
        note = {"uri": remote.display_uri, "mark": version, "fingerprint": description.fingerprint}
        write_atomically(note_path, json.dumps(note | {"description": _hash_description(metadata)}))
    except OSError:
        # A folder that cannot be written: the columns stay in memory.
        pass
    return columns, description


def _fetch_and_verify(remote: RemoteFolder, version: FileVersion) -> tuple[Columns, DatasetDescription, bytes]:
    """Returns the columns in memory, their description, and the bytes of the file. A corrupt transfer is repeated once.

    Raises DataError if the second copy is damaged too.
    """
    where = f"{remote.display_uri}/{COLUMNS_FILE}"
    what = "the columns do not have their fingerprint"
    fix = "Copy the data there again, or pack again."
    for _ in range(2):
        data = remote.read(COLUMNS_FILE, 0, version.size).tobytes()
        # A file in memory: the columns are mapped the same way as local ones.
        descriptor = os.memfd_create("columns")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            columns, description, _ = load_columns(Path(f"/proc/self/fd/{descriptor}"))
            if compute_fingerprint(columns) == description.fingerprint:
                return columns, description, data
        except DataError as error:
            what = error.what
        finally:
            os.close(descriptor)
    raise DataError(what, where=where, fix=fix)


def _hash_description(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(metadata["headway"].encode()).hexdigest()


def _build_no_pack_error(remote: RemoteFolder) -> UsageError:
    for name in ("", "train/"):
        with contextlib.suppress(FileNotFoundError, DataError):
            remote.read_version(f"{name}{PART_FILE}")
            fix = "Join the parts on a local disk (headway pack --join DST), and copy the folder there."
            return UsageError("this is a part of a pack that is not joined yet", where=remote.display_uri, fix=fix)
    # The user may have named the folder above the packs.
    for name in ("train", "eval"):
        try:
            remote.read_version(f"{name}/{COLUMNS_FILE}")
        except (FileNotFoundError, DataError):
            continue
        fix = f"Name one: {remote.display_uri}/{name}."
        return UsageError("this address holds several packs", where=remote.display_uri, fix=fix)
    what = f"there is no packed data set (no {COLUMNS_FILE})"
    return UsageError(
        what, where=remote.display_uri, fix="Pack the data (headway pack SRC DST), and copy the folder there."
    )


def _get_note_path(cache_root: Path, uri: str) -> Path:
    return cache_root / "addresses" / f"{hashlib.sha256(uri.encode()).hexdigest()[:32]}.json"
