"""Opens a packed data set at a remote address: its columns are fetched whole, its records as they are read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.core.files import read_text, write_atomically
from headway.core.untrusted_json import parse_object
from headway.data.columns import COLUMNS_FILE, PACK_FORMATS, DatasetDescription, compute_fingerprint, load_columns
from headway.data.dataset import Dataset
from headway.data.records import Records
from headway.data.tiers.layout import Columns, Ids, RecordLayout, extract_image
from headway.data.tiers.state import LOCKS_FILE, STATE_FILE
from headway.data.tiers.store import PACKS
from headway.storage.addresses import get_cache_folder as default_cache_folder
from headway.storage.remote_folder import RemoteFolder
from headway.storage.transport import FileVersion


def open_remote(uri: str, cache_folder: str | os.PathLike[str] | None = None) -> Dataset:
    """Opens the pack at an address, such as s3://bucket/imagenet/train.

    The columns are checked against their fingerprint and kept in `cache_folder / packs / fingerprint`; they are fetched
    again only where the remote file has changed. `Dataset.read` fetches one run after the other; a tier is faster.

    Raises:
        UsageError: there is no pack at this address, or nothing installed reads it.
        DataError: its columns are damaged, or cannot be fetched.
    """
    remote, root = RemoteFolder(uri), Path(cache_folder or default_cache_folder())
    try:
        mark = remote.read_version(COLUMNS_FILE)
    except FileNotFoundError:
        raise _build_no_pack_error(remote) from None
    try:
        columns, description = _load_kept_columns(root, remote.uri, mark) or _fetch_columns(root, remote, mark)
    finally:
        remote.close()
    if description.format not in PACK_FORMATS:
        what = f"it is packed in a format that is not known here, {description.format!r}"
        raise DataError(what, where=remote.shown, fix="Pack the data again.")
    for shard in description.shards:  # local files will have these names
        path = PurePosixPath(shard.name)
        if path.is_absolute() or ".." in path.parts or path.name in ("", COLUMNS_FILE, STATE_FILE, LOCKS_FILE):
            raise DataError(f"{shard.name!r} is no name of a shard", where=remote.shown, fix="Pack the data again.")
    return Dataset(Path(remote.shown), columns, description, source=RemoteShards(remote, columns, description))


@final
class RemoteShards:
    """Records that are fetched as they are read, one run after the other, by the thread that reads."""

    def __init__(self, remote: RemoteFolder, columns: Columns, description: DatasetDescription) -> None:
        shards = description.shards
        self.remote = remote.reopen({shard.name: shard.size for shard in shards})
        self._columns, self._layout = columns, RecordLayout(columns, shards)
        self._names = [shard.name for shard in shards]

    def read(self, ids: Ids) -> Records:
        """As `Dataset.read`. Raises DataError where the address cannot be read."""
        extents: dict[int, NDArray[np.uint8]] = {}
        for run in self._layout.group_into_runs(np.unique(ids)):
            low = int(run.start[0])
            data = self.remote.read(self._names[int(run.shard[0])], low, int(run.end.max()) - low)
            extents.update(zip(run.ids.tolist(), run.slice_bytes(low, data), strict=True))
        return Records.from_buffers([extract_image(self._columns, sample, extents[sample]) for sample in ids.tolist()])

    def close(self) -> None:
        """Closes the connections; a later read opens new ones."""
        self.remote.close()


def _load_kept_columns(root: Path, uri: str, mark: FileVersion) -> tuple[Columns, DatasetDescription] | None:
    """The columns that were fetched before from this address, where its file is still the same."""
    try:
        known = parse_object(read_text(_locate_note(root, uri)))
        if not mark.tag or known["mark"] != list(mark):
            return None
        path = root / PACKS / known["fingerprint"] / COLUMNS_FILE
        if path.stat().st_size != mark.size:
            return None
        columns, description, metadata = load_columns(path)
        # Packs of the same columns share their place here, whatever their classes and channels are called.
        if known["description"] != _hash_description(metadata):
            return None
    except (OSError, ValueError, LookupError, TypeError, DataError):
        return None
    return columns, description


def _fetch_columns(root: Path, remote: RemoteFolder, mark: FileVersion) -> tuple[Columns, DatasetDescription]:
    columns, description, data = _fetch_checked(remote, mark)
    path = root / PACKS / description.fingerprint / COLUMNS_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
        note = _locate_note(root, remote.uri)
        note.parent.mkdir(exist_ok=True)
        columns, description, metadata = load_columns(path)
        known = {"uri": remote.shown, "mark": mark, "fingerprint": description.fingerprint}
        write_atomically(note, json.dumps(known | {"description": _hash_description(metadata)}))
    except OSError:
        pass  # a folder that cannot be written: they stay in memory
    return columns, description


def _fetch_checked(remote: RemoteFolder, mark: FileVersion) -> tuple[Columns, DatasetDescription, bytes]:
    """The columns in memory, and the file's bytes. A transfer that went wrong is done again once."""
    where = f"{remote.shown}/{COLUMNS_FILE}"
    what, fix = "the columns do not have their fingerprint", "Copy the data there again, or pack again."
    for _ in range(2):
        data = remote.read(COLUMNS_FILE, 0, mark.size).tobytes()
        number = os.memfd_create("columns")
        try:
            with open(number, "wb", closefd=False) as file:
                file.write(data)
            columns, description, _ = load_columns(Path(f"/proc/self/fd/{number}"))
            if compute_fingerprint(columns) == description.fingerprint:
                return columns, description, data
        except DataError as error:
            what = error.what
        finally:
            os.close(number)
    raise DataError(what, where=where, fix=fix)


def _hash_description(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(metadata["headway"].encode()).hexdigest()


def _build_no_pack_error(remote: RemoteFolder) -> UsageError:
    for part in ("train", "eval"):
        try:
            remote.read_version(f"{part}/{COLUMNS_FILE}")
        except (FileNotFoundError, DataError):
            continue
        fix = f"Name one: {remote.shown}/{part}."
        return UsageError("this address holds packed parts", where=remote.shown, fix=fix)
    what = f"there is no packed data set (no {COLUMNS_FILE})"
    return UsageError(what, where=remote.shown, fix="Pack the data (headway pack SRC DST), and copy the folder there.")


def _locate_note(root: Path, uri: str) -> Path:
    return root / "addresses" / f"{hashlib.sha256(uri.encode()).hexdigest()[:32]}.json"
