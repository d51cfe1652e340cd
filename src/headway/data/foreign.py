"""Foreign data: what was never packed is scanned once, and its columns are kept beside it.

They are a hidden file, `.NAME.columns.safetensors`, next to the folder or file NAME; where that cannot be written, one
in the cache folder; where neither can, they live as long as the data set. They count for as long as the size and the
time of change of every file they follow from are the same (of an image folder: of its folders, not of each image,
whose checksum shows a change).
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
"""Of what is kept; another number is scanned again."""


@final
@dataclass(frozen=True, kw_only=True)
class _ForeignAddress:
    """What a user calls foreign data, taken apart."""

    path: Path
    """Absolute: a file, a folder, or a pattern of files where `files` holds several."""
    files: tuple[Path, ...]
    part: str
    labels: str

    @property
    def root(self) -> Path:
        """What the names of shards are relative to."""
        return self.path if self.path.is_dir() else self.path.parent

    def list_columns_files(self) -> Iterator[Path]:
        """Where its columns may be kept, the first choice first."""
        extra = [self.part] if self.part else []
        extra += [self.labels] if self.labels != LABELS[0] else []
        yield self.path.parent / ".".join(["", self.path.name, *extra, "columns.safetensors"])
        digest = hashlib.sha256("\n".join([os.fspath(self.path), *extra]).encode("utf-8", "surrogateescape"))
        yield get_cache_folder() / "columns" / f"{digest.hexdigest()[:32]}.columns.safetensors"


def open_foreign(uri: str, *, mapped: bool | None, progress: ScanProgress | None) -> Dataset:
    """Opens foreign data by their kept columns, or scans them; see `headway.open`."""
    address = _parse_address(uri)
    for file in address.list_columns_files():
        if (kept := _load_kept(file, address, mapped)) is not None:
            return kept
    found = read_foreign_records(address.path, address.files, address.part, address.labels)
    state = _describe_files(address, {*found.files, *found.watched})  # as it is before the scan
    cut_before = mapping.find_cut_files()
    columns, description = scan(found, address.root, uri, progress)
    mapping.check_mappings(but=cut_before)
    data = save(columns, metadata=description.to_metadata() | {"scanned": json.dumps(state)})
    for file in address.list_columns_files():
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, data)
            columns, description, _ = load_columns(file)
            break
    return Dataset(address.root, columns, description, mapped=mapped)


def _load_kept(file: Path, address: _ForeignAddress, mapped: bool | None) -> Dataset | None:
    """The data set of columns that are kept in `file`, if they are there and still count."""
    if not file.is_file():
        return None
    try:
        columns, description, metadata = load_columns(file)
        scanned = parse_object(metadata["scanned"])
        if scanned != _describe_files(address, {Path(path) for path, _, _ in scanned["files"]}):
            return None
        if any((address.root / shard.name).stat().st_size != shard.size for shard in description.shards):
            return None
    except (DataError, LookupError, TypeError, ValueError, OSError):
        return None
    return Dataset(address.root, columns, description, mapped=mapped)


def _describe_files(address: _ForeignAddress, watched: set[Path]) -> dict[str, Any]:
    """What columns follow from: of each file its path, its size in bytes, and when it was changed."""
    states = ((path, path.stat()) for path in sorted({*watched, *address.files}))
    files = [[os.fspath(path), status.st_size, status.st_mtime_ns] for path, status in states]
    return {"layout": _LAYOUT, "named": [os.fspath(path) for path in address.files], "files": files}


def _parse_address(uri: str) -> _ForeignAddress:
    labels = LABELS[0]
    if not os.path.lexists(uri) and "?" in uri:
        name, _, query = uri.rpartition("?")
        key, _, value = query.partition("=")
        if key == "labels" and value in LABELS:
            uri, labels = name, value
    path = Path(os.path.abspath(uri))
    if path.exists():
        return _ForeignAddress(path=path, files=(path,), part="", labels=labels)
    if path.parent.exists() and not set(path.name) & set("{*?["):
        return _ForeignAddress(path=path.parent, files=(path.parent,), part=path.name, labels=labels)
    files = expand_pattern(path)
    if not files:
        raise build_missing_error(path)
    return _ForeignAddress(path=path, files=files, part="", labels=labels)
