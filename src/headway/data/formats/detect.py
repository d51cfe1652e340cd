"""Recognises the format of foreign data, and opens them."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.core.errors import DataError, UsageError
from headway.data.formats import arrays, cifar, datum, folder, lmdb, recordio, tar, webdataset
from headway.data.formats.arrays import PartOpeners
from headway.data.formats.byte_ranges import ByteRange, FolderFiles, map_path, read_head
from headway.data.formats.cifar import LABELS as LABELS
from headway.data.formats.foreign_records import ForeignRecords
from headway.data.formats.pack_source import EVAL_NAMES, LISTING_EXTENSIONS, list_entries
from headway.data.formats.patterns import group_shards
from headway.data.formats.unpack import unpack_gzip

_RECORDIO = recordio.MAGIC.to_bytes(4, "little")
_GZIP = b"\x1f\x8b"
_TAR = (".tar", ".tar.gz", ".tgz")
_SHARDS = (".rec", *_TAR)
_ARCHIVE_MEMBERS = 64
"""An archive of arrays has fewer members; one of images may have millions."""


def read_foreign_records(path: Path, files: Sequence[Path], part: str, labels: str) -> ForeignRecords:
    """Returns the records of foreign data: a file, a folder, or the files that a pattern names (`files`).

    Args:
        part: which part of a folder or an archive with several; empty for the only one.
        labels: one of LABELS.

    Raises:
        UsageError: the format is not known; there are several parts and none is named; or there is no such part.
        DataError: the data are damaged.
    """
    if files != (path,):
        return _open_shards(files)
    parts = _detect_folder(path, labels) if path.is_dir() else _detect_file(path, labels)
    if part in parts:
        return parts[part]()
    names = ", ".join(sorted(parts))
    # A folder without parts: the last component of the path was meant as a file.
    if part and set(parts) == {""}:
        raise build_missing_error(path / part)
    if part:
        what = f"there is no such file or folder, nor such a part of {path} (it has: {names})"
        raise UsageError(what, where=str(path / part), fix="Name one that is there.")
    if len(parts) == 1:
        return next(iter(parts.values()))()
    fix = f"Name one: {path / ('train' if 'train' in parts else sorted(parts)[0])}."
    raise UsageError(f"this holds several data sets: {names}", where=str(path), fix=fix)


def build_missing_error(path: Path) -> UsageError:
    """Returns the error for a path that does not exist."""
    return UsageError("there is no such file or folder", where=str(path), fix="Pack one: headway pack SRC DST.")


def list_parts(path: Path) -> list[str]:
    """Returns the names of the data sets in a file or folder of foreign data; one empty name for a single one."""
    return sorted(_detect_folder(path, LABELS[0]) if path.is_dir() else _detect_file(path, LABELS[0]))


def is_image_folder(path: Path) -> bool:
    """Returns True for a folder of class folders without shards or arrays."""
    kinds = _detect_folder(path, LABELS[0]).values()
    return all(isinstance(opener, functools.partial) and opener.func is folder.open_folder for opener in kinds)


def _detect_folder(path: Path, labels: str) -> PartOpeners:
    # From the most specific layout to the most general: any folder could hold images.
    folders, names = list_entries(str(path))
    if "data.mdb" in names:
        return {"": functools.partial(_open_lmdb, path / "data.mdb")}
    files = FolderFiles(path, names)
    for parts in (cifar.find_parts(files, labels), arrays.find_idx_parts(files), arrays.find_npy_parts(files)):
        if parts:
            return parts
    shards = [name for name in names if name.endswith(_SHARDS)]
    if shards:
        return {
            name: functools.partial(_open_shards, [path / shard for shard in chosen])
            for name, chosen in group_shards(shards).items()
        }
    # A folder with train/ beside one of EVAL_NAMES has two parts.
    by_name = {name.lower(): name for name in sorted(folders)}
    if "train" in by_name and list_entries(str(path / by_name["train"]))[0]:
        halves = [by_name[name] for name in ("train", *EVAL_NAMES) if name in by_name]
        return {name: functools.partial(folder.open_folder, path / name) for name in halves}
    return {"": functools.partial(folder.open_folder, path)}


def _detect_file(path: Path, labels: str) -> PartOpeners:
    # Reading from a named pipe would wait for ever.
    head = read_head(path, 512) if path.is_file() else b""
    # From here on, the first bytes decide; the extension only where bytes do not tell.
    if path.suffix.lower() in LISTING_EXTENSIONS:
        return {"": functools.partial(folder.open_listing, path)}
    if head.startswith(_GZIP) and not path.name.endswith(_TAR):
        return {"": functools.partial(arrays.open_idx, path)}
    if arrays.is_idx(head):
        return {"": functools.partial(arrays.open_idx, path)}
    if head.startswith(arrays.NPY_MAGIC):
        return {"": functools.partial(arrays.open_npy, path)}
    if path.name.endswith(_TAR) or head[257:262] == b"ustar":
        return _detect_archive(path, labels)
    if head.startswith(_RECORDIO) or path.suffix == ".rec":
        return {"": functools.partial(_open_shards, [path])}
    if head[lmdb.MAGIC_AT :].startswith(lmdb.MAGIC):
        return {"": functools.partial(_open_lmdb, path)}
    # CIFAR files have no magic number, so their names decide, last of all.
    beside = FolderFiles(path.parent, list_entries(str(path.parent))[1])
    if opener := cifar.find_file_opener(path.name, beside, labels):
        return {"": opener}
    raise UsageError("its format is not known", where=str(path), fix="Name a packed folder, or pack the original data.")


def _detect_archive(path: Path, labels: str) -> PartOpeners:
    members: Mapping[str, ByteRange] = {
        piece.name: piece for piece in itertools.islice(tar.read_ranges(_decompress(path)), _ARCHIVE_MEMBERS)
    }
    return cifar.find_parts(members, labels) or {"": functools.partial(_open_shards, [path])}


def _open_shards(files: Sequence[Path]) -> ForeignRecords:
    missing = [file for file in files if not file.is_file()]
    if missing:
        what = f"a shard is missing ({len(missing)} of {len(files)} are)"
        raise DataError(what, where=str(missing[0]), fix="Copy it again, or leave it out of the pattern.")
    endings = {next((ending for ending in (*_TAR[1:], *_SHARDS) if file.name.endswith(ending)), "") for file in files}
    if endings == {".rec"} or (len(files) == 1 and read_head(files[0], 4) == _RECORDIO):
        return recordio.open_shards(files)
    # A single file without a known extension is tried as a tar archive.
    if endings <= {*_TAR} or len(files) == 1:
        return webdataset.open_tars([_decompress(file) for file in files])
    raise UsageError(
        f"shards are .rec or .tar, and the names end with {', '.join(sorted(map(repr, endings)))}",
        where=os.path.commonpath(files),
        fix="Name shards of one format.",
    )


def _open_lmdb(path: Path) -> ForeignRecords:
    first = next(lmdb.read_entries(path), None)
    if first is None or not webdataset.is_sample_file(first.name):
        return datum.open_database(path)
    # Caffe's tools put file names into keys: `00000000_cat/0.jpg` looks like WebDataset, so the value decides.
    if not datum.is_datum(map_path(path)[first.offset : first.offset + first.size]):
        return webdataset.open_shards("lmdb", [path], [lmdb.read_entries(path)])
    return datum.open_database(path)


def _decompress(path: Path) -> Path:
    return unpack_gzip(path) if read_head(path, 2) == _GZIP else path
