"""Opens data sets: packs, remote packs and foreign data; and lists the images of a source that is to be packed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from headway.core.errors import DataError, UsageError
from headway.data.columns import COLUMNS_FILE, PACK_AGAIN, PACK_FORMATS, DatasetDescription, Shard, load_columns
from headway.data.dataset import Dataset
from headway.data.foreign import open_foreign
from headway.data.formats import detect, recordio, trailer
from headway.data.formats.dataset_source import build_pack_source
from headway.data.formats.folder import list_image_folder
from headway.data.formats.listing import list_file
from headway.data.formats.listing_columns import ColumnNames
from headway.data.formats.pack_source import (
    EVAL_NAMES,
    LISTING_EXTENSIONS,
    SHARD_EXTENSIONS,
    PackSource,
    is_image,
    list_entries,
)
from headway.data.store_address import StoreAddress, is_store_address
from headway.data.store_objects import find_remote_objects
from headway.data.tiers.remote_dataset import RemoteShards, open_remote, open_remote_version
from headway.data.unjoined import expect_joined
from headway.storage.addresses import is_url


def open(
    uri: str | os.PathLike[str],
    *,
    mapped: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Opens a data set: a pack, or foreign data, which are scanned the first time.

    A pack opens in the same time whatever its size. It may lie at a URL such as `s3://bucket/imagenet/train`, or be a
    version in a store, such as `store:cars@v3/train`. Foreign data must be on this machine. The scan reads all of them
    once for sizes and checksums, and keeps its columns beside the data (see `foreign`), so the next opening is as fast
    as a pack's. Foreign data are

    - a folder of images, CLASS/NAME.jpg, or a CSV or JSONL file that lists them;
    - RecordIO (`.rec`) and tar in the WebDataset layout: a file, a folder of shards, or a pattern such as
      `train-{000..146}.tar` or `train-*.rec`;
    - LMDB with Caffe's `Datum` values, or with WebDataset's keys;
    - IDX (MNIST), `.npy`, CIFAR-10 and CIFAR-100 (binary files and Python archives, also as `.tar.gz`).

    If a folder or an archive holds several data sets, name one as if it were a sub-folder:
    `cifar-10-batches-bin/train`, `mnist/test` (the `t10k-` files), `shards/val` (`val-000.tar`...). For CIFAR-100's
    coarse labels, write `cifar-100-python/train?labels=coarse`.

    Args:
        mapped: True maps shards, False reads them by pread. None maps them, except on a network file system.
        progress: called during a scan with (samples done, samples in all).

    Raises:
        UsageError: nothing is at `uri`, its format is not known, or it holds several data sets.
        DataError: columns, shards or foreign data are damaged, missing, or from different packs.
    """
    text = os.fspath(uri).removeprefix("file://")
    if is_store_address(text):
        text = str(StoreAddress.parse(text).resolve_split())
    if is_url(text):
        return open_remote(text)
    root = Path(text)
    path = root / COLUMNS_FILE
    if not path.is_file():
        pack_names = [name for name in ("train", "eval") if (root / name / COLUMNS_FILE).is_file()]
        if pack_names:
            raise UsageError(
                "this folder holds several packs", where=str(root), fix=f"Name one: {root / pack_names[0]}."
            )
        expect_joined(root)
        return open_foreign(text, mapped=mapped, progress=progress)
    # Only the columns of a pack are read, so the time does not depend on its size.
    columns, description, _ = load_columns(path)
    if description.format not in PACK_FORMATS:
        raise DataError(f"the pack format {description.format!r} is not known", where=str(path), fix=PACK_AGAIN)
    if (objects := find_remote_objects(root, description.shards)) is not None:
        return open_remote_version(root, columns, description, objects)
    for shard in description.shards:
        check_shard(root / shard.name, shard, description)
    return Dataset(root, columns, description, mapped=mapped)


def check_shard(path: Path, shard: Shard, description: DatasetDescription) -> None:
    """Raises DataError unless the file of a shard is there, whole, and of the pack that is described."""
    fix = "Copy the folder again, or pack again."
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataError("a shard is missing", where=str(path), fix=fix) from None
    # A ValueError is a name that no file can have.
    except (OSError, ValueError) as error:
        raise DataError(f"a shard cannot be opened ({error})", where=str(path.parent), fix=fix) from None
    # Opening a named pipe would block until a process writes to it.
    if not stat.S_ISREG(status.st_mode):
        raise DataError("this shard is not a regular file", where=str(path), fix=fix)
    read_pack_id = recordio.read_pack_id if description.format == "recordio" else trailer.read_pack_id
    if read_pack_id(path) != (description.pack_id if shard.pack_id is None else shard.pack_id):
        fix = "Keep the files of one pack together, or pack again."
        raise DataError("this shard belongs to another pack", where=str(path), fix=fix)
    if status.st_size != shard.size:
        what = f"the shard has {status.st_size} bytes and should have {shard.size}"
        raise DataError(what, where=str(path), fix="Copy it again, or pack again.")


def open_source(src: Path, columns: ColumnNames | None = None) -> PackSource:
    """Lists the images to pack: a folder of class folders, a CSV or JSONL file, or anything that `open` opens.

    Args:
        columns: our names of a list's columns (see `list_file`).

    Raises:
        UsageError: `src` does not exist, or is none of these; `columns` are given, and it is not a list.
        DataError: its content is damaged.
    """
    if src.suffix.lower() in LISTING_EXTENSIONS and src.is_file():
        return list_file(src, columns)
    if columns is not None:
        what = "only a CSV or JSONL file has columns, and this is none"
        raise UsageError(what, where=str(src), fix="Leave --columns out.")
    expect_joined(src)
    # Image files are listed, not scanned: packing reads each of them anyway.
    if src.is_dir() and not (src / COLUMNS_FILE).is_file() and detect.is_image_folder(src):
        return list_image_folder(src)
    try:
        dataset = open(src)
        return build_pack_source(dataset, remote=isinstance(dataset.source, RemoteShards))
    except UsageError as error:
        if not error.fix.endswith(detect.PACK_FIX):
            raise
        # The images are to be packed or looked at, so packing them is no advice.
        fix = error.fix.removesuffix(detect.PACK_FIX).rstrip()
        fix = fix or "Name a folder of images, a CSV or JSONL file of paths and labels, or a packed folder."
        raise UsageError(error.what, where=error.where, fix=fix) from None


def open_split(src: str | os.PathLike[str], columns: ColumnNames | None = None) -> tuple[PackSource, PackSource | None]:
    """Lists the training images and, if `src` has two sets (train and one of EVAL_NAMES), the evaluation images.

    The sets are folders of images, packs or foreign data; or sets in one file or folder of foreign data, such as
    CIFAR-10's train and test. A URL holds one pack. Raises as `open_source`.
    """
    if is_url(src) and columns is None:
        return build_pack_source(open(src), remote=True), None
    src = Path(src)
    # Folders of two sets first; then archives such as CIFAR-10, whose sets are inside.
    paths = None if columns is not None else _find_split_folders(src) or _find_foreign_sets(src)
    if paths is None:
        return open_source(src, columns), None
    note = (f"not packed: {', '.join(paths.unused)}",) if paths.unused else ()
    train, evaluation = open_source(paths.train), open_source(paths.evaluation)
    return (
        replace(train, notes=train.notes + note, root=str(paths.train)),
        replace(evaluation, root=str(paths.evaluation)),
    )


class _SplitPaths(NamedTuple):
    train: Path
    evaluation: Path
    unused: list[str]


def _find_split_folders(src: Path) -> _SplitPaths | None:
    """Returns the training and the evaluation folder, and the names of the other folders beside them.

    Returns None if there is no training folder, and raises UsageError if it has no evaluation folder beside it.
    """
    names = {name.lower(): name for name in sorted(list_entries(str(src))[0])} if src.is_dir() else {}
    if "train" not in names or (src / COLUMNS_FILE).is_file():
        return None
    train = src / names["train"]
    # A class may be called "train" too.
    if not _is_dataset_folder(train):
        return None
    candidates = [names[name] for name in EVAL_NAMES if name in names]
    evaluation = next((name for name in candidates if _is_dataset_folder(src / name)), None)
    if evaluation is not None:
        return _SplitPaths(
            train, src / evaluation, [name for name in names.values() if name not in (train.name, evaluation)]
        )
    # A folder train without an evaluation set is more likely a mistake than a class.
    if candidates or len(names) == 1:
        what = f"{candidates[0]} has no class folders" if candidates else "train has no evaluation folder beside it"
        fix = f"Pack the training set alone and split it: headway pack {train} DST --split 0.1"
        raise UsageError(what, where=str(src), fix=fix)
    return None


def _is_dataset_folder(folder: Path) -> bool:
    """Returns True for a folder that is a data set, and False for the folder of one class."""
    folders, files = list_entries(str(folder))
    if any(name == COLUMNS_FILE or name.endswith(SHARD_EXTENSIONS) for name in files):
        return True
    return bool(folders) and not any(map(is_image, files))


def _find_foreign_sets(src: Path) -> _SplitPaths | None:
    """Returns the sets of foreign data, such as CIFAR-10's train and test.

    A query such as that of `cifar-100-python?labels=coarse` is appended to the path of each set.
    """
    path, question_mark, query = (str(src), "", "") if src.exists() else str(src).partition("?")
    # A listing and a folder of images are single sets, which `open_source` handles.
    is_listing = os.path.isfile(path) and Path(path).suffix.lower() in LISTING_EXTENSIONS
    if not os.path.exists(path) or is_listing or (os.path.isdir(path) and detect.is_image_folder(Path(path))):
        return None
    # The original test set serves as the evaluation set.
    names = detect.list_sets(Path(path))
    evaluation = next((name for name in EVAL_NAMES if name in names), None)
    if "train" not in names or evaluation is None:
        return None
    unused = [name for name in names if name not in ("train", evaluation)]
    return _SplitPaths(
        Path(f"{path}/train{question_mark}{query}"), Path(f"{path}/{evaluation}{question_mark}{query}"), unused
    )
