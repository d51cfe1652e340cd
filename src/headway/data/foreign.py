"""Opens foreign data: data sets that were never packed. They are scanned once, and their columns are cached.

The columns are a hidden file, `.NAME.columns.safetensors`, beside the folder or file NAME; if that cannot be written,
a file in the cache folder; else they are only in memory. They are valid while the size and the modification
time of every file that they depend on are unchanged. For a folder of images these are its folders, not each image:
there, a checksum reveals a change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors.numpy import save

from headway.core.errors import DataError
from headway.core.files import write_atomically
from headway.core.untrusted_json import parse_object
from headway.data import mapping
from headway.data.columns import load_columns
from headway.data.dataset import Dataset
from headway.data.formats.detect import LABEL_KINDS, build_missing_error, read_foreign_records
from headway.data.formats.patterns import expand_pattern
from headway.data.scan import ScanProgress, scan_records
from headway.storage.addresses import get_cache_folder

_COLUMNS_VERSION = 1
"""Version of the cached columns; data with columns of another version are scanned again."""


@final
@dataclass(frozen=True, kw_only=True)
class _ForeignPath:
    """Parts of the path that a user gives for foreign data."""

    path: Path
    """Absolute: a file, a folder, or a pattern."""
    files: tuple[Path, ...]
    """`path` alone, or the files that the pattern expands to."""
    set_name: str
    """Name of the data set in a folder or an archive with several; empty for the only one."""
    label_kind: str
    """One of LABEL_KINDS."""

    @property
    def root(self) -> Path:
        """The folder that the names of shards are relative to."""
        return self.path if self.path.is_dir() else self.path.parent

    def list_columns_files(self) -> Iterator[Path]:
        """Yields the files that may hold the columns, the preferred one first."""
        extra = [self.set_name] if self.set_name else []
        extra += [self.label_kind] if self.label_kind != LABEL_KINDS[0] else []
        yield self.path.parent / ".".join(["", self.path.name, *extra, "columns.safetensors"])
        digest = hashlib.sha256("\n".join([os.fspath(self.path), *extra]).encode("utf-8", "surrogateescape"))
        yield get_cache_folder() / "columns" / f"{digest.hexdigest()[:32]}.columns.safetensors"


def open_foreign(uri: str, *, mapped: bool | None, progress: ScanProgress | None) -> Dataset:
    """Opens foreign data by their cached columns, or scans them and caches the columns; see `headway.open`."""
    location = _parse_path(uri)
    for file in location.list_columns_files():
        if (dataset := _load_cached_dataset(file, location, mapped)) is not None:
            return dataset
    records = read_foreign_records(location.path, location.files, location.set_name, location.label_kind)
    # Read before the scan: a file that changes meanwhile makes the columns out of date.
    file_states = _describe_files(location, {*records.files, *records.watched})
    # A file truncated during the scan must not get wrong checksums; files truncated earlier are not part of this data.
    truncated_before = mapping.find_truncated_files()
    columns, description = scan_records(records, location.root, uri, progress)
    mapping.check_mappings(but=truncated_before)
    data = save(columns, metadata=description.to_metadata() | {"scanned": json.dumps(file_states)})
    for file in location.list_columns_files():
        # A folder without write permission is normal for shared data: try the next place.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, data)
            columns, description, _ = load_columns(file)
            break
    return Dataset(location.root, columns, description, mapped=mapped)


def _load_cached_dataset(file: Path, location: _ForeignPath, mapped: bool | None) -> Dataset | None:
    """Returns the data set of the columns cached in `file`, or None if they are missing or out of date."""
    if not file.is_file():
        return None
    try:
        columns, description, metadata = load_columns(file)
        scanned = parse_object(metadata["scanned"])
        if scanned != _describe_files(location, {Path(path) for path, _, _ in scanned["files"]}):
            return None
        # Equal times do not prove equal content on coarse clocks; the size of each shard is cheap to compare.
        if any((location.root / shard.name).stat().st_size != shard.size for shard in description.shards):
            return None
    except (DataError, LookupError, TypeError, ValueError, OSError):
        return None
    return Dataset(location.root, columns, description, mapped=mapped)


def _describe_files(location: _ForeignPath, watched: set[Path]) -> dict[str, Any]:
    """Returns path, size in bytes and modification time of each file that the columns depend on."""
    path_stats = ((path, path.stat()) for path in sorted({*watched, *location.files}))
    files = [[os.fspath(path), status.st_size, status.st_mtime_ns] for path, status in path_stats]
    return {"layout": _COLUMNS_VERSION, "named": [os.fspath(path) for path in location.files], "files": files}


def _parse_path(uri: str) -> _ForeignPath:
    label_kind = LABEL_KINDS[0]
    # A file name may contain a question mark, so a path that exists is never split.
    if not os.path.lexists(uri) and "?" in uri:
        name, _, query = uri.rpartition("?")
        key, _, value = query.partition("=")
        if key == "labels" and value in LABEL_KINDS:
            uri, label_kind = name, value
    path = Path(os.path.abspath(uri))
    if path.exists():
        return _ForeignPath(path=path, files=(path,), set_name="", label_kind=label_kind)
    # The last component may be the name of a set, such as `mnist/train`.
    if path.parent.exists() and not set(path.name) & set("{*?["):
        return _ForeignPath(path=path.parent, files=(path.parent,), set_name=path.name, label_kind=label_kind)
    files = expand_pattern(path)
    if not files:
        raise build_missing_error(path)
    return _ForeignPath(path=path, files=files, set_name="", label_kind=label_kind)
