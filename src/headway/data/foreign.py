"""Foreign data: data sets that were never packed. They are scanned once, and their columns are kept.

The columns are a hidden file, `.NAME.columns.safetensors`, beside the folder or file NAME; if that cannot be written,
a file in the cache folder; else they live as long as the data set. They are valid while the size and the modification
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
from headway.data.formats.detect import LABELS, build_missing_error, read_foreign_records
from headway.data.formats.patterns import expand_pattern
from headway.data.scan import ScanProgress, scan
from headway.storage.addresses import get_cache_folder

_LAYOUT = 1
"""Version of the kept columns; columns of another version are scanned again."""


@final
@dataclass(frozen=True, kw_only=True)
class _ForeignAddress:
    """Parts of the name that a user gives foreign data."""

    path: Path
    """Absolute: a file, a folder, or a pattern if `files` holds several."""
    files: tuple[Path, ...]
    part: str
    labels: str

    @property
    def root(self) -> Path:
        """The folder that the names of shards are relative to."""
        return self.path if self.path.is_dir() else self.path.parent

    def list_columns_files(self) -> Iterator[Path]:
        """Yields the files that may hold the columns, the preferred one first."""
        extra = [self.part] if self.part else []
        extra += [self.labels] if self.labels != LABELS[0] else []
        yield self.path.parent / ".".join(["", self.path.name, *extra, "columns.safetensors"])
        digest = hashlib.sha256("\n".join([os.fspath(self.path), *extra]).encode("utf-8", "surrogateescape"))
        yield get_cache_folder() / "columns" / f"{digest.hexdigest()[:32]}.columns.safetensors"


def open_foreign(uri: str, *, mapped: bool | None, progress: ScanProgress | None) -> Dataset:
    """Opens foreign data by their kept columns, or scans them; see `headway.open`."""
    address = _parse_address(uri)
    for file in address.list_columns_files():
        # The first valid columns win, beside the data or in the cache folder.
        if (kept := _load_kept(file, address, mapped)) is not None:
            return kept
    records = read_foreign_records(address.path, address.files, address.part, address.labels)
    # Taken before the scan: a file that changes meanwhile makes the columns out of date.
    state = _describe_files(address, {*records.files, *records.watched})
    # A file cut during the scan must not get wrong checksums; files cut earlier are not ours.
    cut_before = mapping.find_cut_files()
    columns, description = scan(records, address.root, uri, progress)
    mapping.check_mappings(but=cut_before)
    data = save(columns, metadata=description.to_metadata() | {"scanned": json.dumps(state)})
    for file in address.list_columns_files():
        # A folder without write permission is normal for shared data: try the next place.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, data)
            columns, description, _ = load_columns(file)
            break
    return Dataset(address.root, columns, description, mapped=mapped)


def _load_kept(file: Path, address: _ForeignAddress, mapped: bool | None) -> Dataset | None:
    """Returns the data set of the columns kept in `file`, or None if they are missing or out of date."""
    if not file.is_file():
        return None
    try:
        columns, description, metadata = load_columns(file)
        scanned = parse_object(metadata["scanned"])
        if scanned != _describe_files(address, {Path(path) for path, _, _ in scanned["files"]}):
            return None
        # Equal times do not prove equal content on coarse clocks; the size of each shard is cheap to compare.
        if any((address.root / shard.name).stat().st_size != shard.size for shard in description.shards):
            return None
    except (DataError, LookupError, TypeError, ValueError, OSError):
        return None
    return Dataset(address.root, columns, description, mapped=mapped)


def _describe_files(address: _ForeignAddress, watched: set[Path]) -> dict[str, Any]:
    """Returns path, size in bytes and modification time of each file that the columns depend on."""
    states = ((path, path.stat()) for path in sorted({*watched, *address.files}))
    files = [[os.fspath(path), status.st_size, status.st_mtime_ns] for path, status in states]
    return {"layout": _LAYOUT, "named": [os.fspath(path) for path in address.files], "files": files}


def _parse_address(uri: str) -> _ForeignAddress:
    labels = LABELS[0]
    # A file name may contain a question mark, so a path that exists is never split.
    if not os.path.lexists(uri) and "?" in uri:
        name, _, query = uri.rpartition("?")
        key, _, value = query.partition("=")
        if key == "labels" and value in LABELS:
            uri, labels = name, value
    path = Path(os.path.abspath(uri))
    if path.exists():
        return _ForeignAddress(path=path, files=(path,), part="", labels=labels)
    # The last component may be the name of a part, such as `mnist/train`.
    if path.parent.exists() and not set(path.name) & set("{*?["):
        return _ForeignAddress(path=path.parent, files=(path.parent,), part=path.name, labels=labels)
    files = expand_pattern(path)
    if not files:
        raise build_missing_error(path)
    return _ForeignAddress(path=path, files=files, part="", labels=labels)
