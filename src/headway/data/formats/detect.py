"""Recognises the format of foreign data, and opens them."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.core.errors import DataError, UsageError, suggest_nearest
from headway.data.formats import arrays, cifar, datum, folder, lmdb, recordio, tar, webdataset
from headway.data.formats.arrays import SetOpeners
from headway.data.formats.byte_ranges import ByteRange, FolderFiles, map_path, read_head
from headway.data.formats.cifar import LABEL_KINDS as LABEL_KINDS
from headway.data.formats.foreign_records import ForeignRecords
from headway.data.formats.pack_source import EVAL_NAMES, LISTING_EXTENSIONS, is_image, list_entries
from headway.data.formats.patterns import group_shards
from headway.data.formats.unpack import GZIP_MAGIC, unpack_gzip

_RECORDIO_MAGIC = recordio.MAGIC.to_bytes(4, "little")
_TAR_EXTENSIONS = (".tar", ".tar.gz", ".tgz")
_SHARD_EXTENSIONS = (".rec", *_TAR_EXTENSIONS)
_MAX_LISTED_MEMBERS = 64
"""Members of an archive that are searched for arrays. Archives of arrays have fewer; those of images, many more."""


def read_foreign_records(path: Path, files: Sequence[Path], set_name: str, label_kind: str) -> ForeignRecords:
    """Returns the records of foreign data: a file, a folder, or the files that a pattern expands to.

    Args:
        path: the file, the folder or the pattern.
        files: `path` alone, or the files that the pattern expands to.
        set_name: name of the data set in a folder or an archive with several; empty for the only one.
        label_kind: one of LABEL_KINDS.

    Raises:
        UsageError: the format is unknown; there are several data sets and `set_name` is empty; or there is no such set.
        DataError: the data are damaged.
    """
    if files != (path,):
        return _open_shards(files)
    openers = _detect_folder(path, label_kind) if path.is_dir() else _detect_file(path, label_kind)
    if set_name in openers:
        return openers[set_name]()
    names = ", ".join(sorted(openers))
    # A folder of one set: the last component of the path was meant as a file.
    if set_name and set(openers) == {""}:
        raise build_missing_error(path / set_name)
    if set_name:
        what = f"there is no such file or folder, nor such a set in {path} (it has: {names})"
        raise UsageError(what, where=str(path / set_name), fix="Name one that is there.")
    if len(openers) == 1:
        return next(iter(openers.values()))()
    fix = f"Name one: {path / ('train' if 'train' in openers else sorted(openers)[0])}."
    raise UsageError(f"this holds several data sets: {names}", where=str(path), fix=fix)


PACK_FIX = "Pack one: headway pack SRC DST."


def build_missing_error(path: Path) -> UsageError:
    """Builds the error for a path that does not exist."""
    fix = PACK_FIX
    # A neighbour with nearly that name is probably meant: `val` beside `eval`, or a misspelt folder.
    if path.parent.is_dir() and path.name:
        neighbours = [name for names in list_entries(str(path.parent)) for name in names]
        sets = [name for name in neighbours if name in EVAL_NAMES and path.name in EVAL_NAMES]
        if hint := suggest_nearest(path.name, sets or neighbours, only_close=True):
            fix = f"{hint} {fix}"
        elif sets:
            fix = f"Did you mean {sets[0]!r}? {fix}"
    return UsageError("there is no such file or folder", where=str(path), fix=fix)


def list_sets(path: Path) -> list[str]:
    """Returns the names of the data sets in a file or folder of foreign data; one empty name for a single one."""
    return sorted(_detect_folder(path, LABEL_KINDS[0]) if path.is_dir() else _detect_file(path, LABEL_KINDS[0]))


def is_image_folder(path: Path) -> bool:
    """Returns True if a folder holds class folders, and no shards or arrays."""
    openers = _detect_folder(path, LABEL_KINDS[0]).values()
    return all(isinstance(opener, functools.partial) and opener.func is folder.open_folder for opener in openers)


def _detect_folder(path: Path, label_kind: str) -> SetOpeners:
    # From the most specific layout to the most general: any folder could hold images.
    folders, names = list_entries(str(path))
    if "data.mdb" in names:
        return {"": functools.partial(_open_lmdb, path / "data.mdb")}
    files = FolderFiles(path, names)
    for openers in (cifar.find_sets(files, label_kind), arrays.find_idx_sets(files), arrays.find_npy_sets(files)):
        if openers:
            return openers
    shards = [name for name in names if name.endswith(_SHARD_EXTENSIONS)]
    if shards:
        return {
            name: functools.partial(_open_shards, [path / shard for shard in shard_names])
            for name, shard_names in group_shards(shards).items()
        }
    # A folder with train/ beside one of EVAL_NAMES has two sets.
    folder_by_lower_name = {name.lower(): name for name in sorted(folders)}
    if "train" in folder_by_lower_name and list_entries(str(path / folder_by_lower_name["train"]))[0]:
        set_names = [folder_by_lower_name[name] for name in ("train", *EVAL_NAMES) if name in folder_by_lower_name]
        return {name: functools.partial(folder.open_folder, path / name) for name in set_names}
    return {"": functools.partial(folder.open_folder, path)}


def _detect_file(path: Path, label_kind: str) -> SetOpeners:
    # Reading from a named pipe would block.
    head = read_head(path, 512) if path.is_file() else b""
    # The first bytes decide; the extension only for formats without a signature.
    if path.suffix.lower() in LISTING_EXTENSIONS:
        return {"": functools.partial(folder.open_listing, path)}
    if head.startswith(GZIP_MAGIC) and not path.name.endswith(_TAR_EXTENSIONS):
        return {"": functools.partial(arrays.open_idx, path)}
    if arrays.is_idx(head):
        return {"": functools.partial(arrays.open_idx, path)}
    if head.startswith(arrays.NPY_MAGIC):
        return {"": functools.partial(arrays.open_npy, path)}
    if path.name.endswith(_TAR_EXTENSIONS) or head[257:262] == b"ustar":
        return _detect_archive(path, label_kind)
    if head.startswith(_RECORDIO_MAGIC) or path.suffix == ".rec":
        return {"": functools.partial(_open_shards, [path])}
    if head[lmdb.MAGIC_OFFSET :].startswith(lmdb.MAGIC):
        return {"": functools.partial(_open_lmdb, path)}
    # CIFAR files have no magic number, so their names decide, last of all.
    siblings = FolderFiles(path.parent, list_entries(str(path.parent))[1])
    if opener := cifar.find_file_opener(path.name, siblings, label_kind):
        return {"": opener}
    fix = "Name a packed folder, or pack the original data."
    if is_image(path.name):
        fix = "For a single image, name the folder that it is in."
    raise UsageError("its format is not known", where=str(path), fix=fix)


def _detect_archive(path: Path, label_kind: str) -> SetOpeners:
    members: Mapping[str, ByteRange] = {
        member.name: member
        for member in itertools.islice(tar.read_ranges(_unpack_if_compressed(path)), _MAX_LISTED_MEMBERS)
    }
    return cifar.find_sets(members, label_kind) or {"": functools.partial(_open_shards, [path])}


def _open_shards(files: Sequence[Path]) -> ForeignRecords:
    missing = [file for file in files if not file.is_file()]
    if missing:
        what = f"a shard is missing ({len(missing)} of {len(files)} are)"
        raise DataError(what, where=str(missing[0]), fix="Copy it again, or leave it out of the pattern.")
    extensions = {
        next(
            (extension for extension in (*_TAR_EXTENSIONS[1:], *_SHARD_EXTENSIONS) if file.name.endswith(extension)), ""
        )
        for file in files
    }
    if extensions == {".rec"} or (len(files) == 1 and read_head(files[0], 4) == _RECORDIO_MAGIC):
        return recordio.open_shards(files)
    # A single file without a known extension is tried as a tar archive.
    if extensions <= {*_TAR_EXTENSIONS} or len(files) == 1:
        return webdataset.open_tars([_unpack_if_compressed(file) for file in files])
    raise UsageError(
        f"shards are .rec or .tar, and the names end with {', '.join(sorted(map(repr, extensions)))}",
        where=os.path.commonpath(files),
        fix="Name shards of one format.",
    )


def _open_lmdb(path: Path) -> ForeignRecords:
    first_entry = next(lmdb.read_entries(path), None)
    if first_entry is None or not webdataset.is_sample_file(first_entry.name):
        return datum.open_database(path)
    # Caffe's tools put file names into keys: `00000000_cat/0.jpg` looks like WebDataset, so the value decides.
    if not datum.is_datum(map_path(path)[first_entry.offset : first_entry.offset + first_entry.size]):
        return webdataset.open_shards("lmdb", [path], [lmdb.read_entries(path)])
    return datum.open_database(path)


def _unpack_if_compressed(path: Path) -> Path:
    return unpack_gzip(path) if read_head(path, 2) == GZIP_MAGIC else path
