"""Joins the parts of a pack that several machines have packed, without copying their shards.

A part is a folder in DST.parts. The join moves the shards into DST.parts/joined, which becomes DST once its columns are
written. Each shard is in its part or there, under the same name: a join that is killed leaves nothing that opens, and
the next one goes on.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.core.files import sync_folder, write_and_sync
from headway.data.columns import (
    COLUMNS_FILE,
    DatasetDescription,
    compute_fingerprint,
    count_classes,
    find_common_size,
)
from headway.data.opening import open as open_pack
from headway.data.pack import (
    SKIPPED_FILE,
    PackResult,
    check_target,
    format_skipped,
    get_parts_folder,
    is_one_of_two,
    list_set_warnings,
)
from headway.data.pack_part import PART_FILE, PartSet, load_part_set
from headway.data.pack_plan import PackPart
from headway.data.pack_set import MAX_SHARDS
from headway.data.set_warnings import list_class_warnings
from headway.data.staging import clear_leftovers, move_into_place
from headway.storage.addresses import parse_local_path

_JOINED = "joined"
_SET_NAMES = ("train", "eval")
_MAX_LISTED_PARTS = 20

Part = dict[str, PartSet]
"""The sets of one part by name: train and eval, or one without a name."""


def join_pack(dst: str | os.PathLike[str], *, overwrite: bool = False) -> PackResult:
    """Joins all parts of a pack, which `headway.pack(src, dst, part=(1, 16))` and its like have written.

    `dst` then serves the samples, order and labels that a pack by one machine serves. The shards are moved, not copied;
    the folder of the parts, `dst`.parts, is removed.

    Args:
        dst: the folder that the parts were packed for.
        overwrite: replaces a packed data set at `dst`.

    Returns:
        the result of the whole pack.

    Raises:
        UsageError: there are no parts; `dst` exists.
        DataError: parts are missing, there twice, damaged, or of different packs; no image of a class is left.
        HeadwayError: a folder cannot be written.
    """
    start_time = time.perf_counter()
    dst = parse_local_path(dst, "Join the parts in a local folder, then copy it there.").resolve()
    clear_leftovers(dst)
    parts_folder = get_parts_folder(dst)
    try:
        parts = _load_parts(parts_folder, dst)
        # A join that was killed at its very end has left parts without shards beside the finished pack.
        if not _is_finished(parts, dst):
            check_target(dst, overwrite)
            names = _check_parts(parts, parts_folder, dst)
            _join(parts, names, parts_folder, dst, overwrite)
        _remove_parts(parts_folder, dst)
    except OSError as error:
        where, fix = str(error.filename or parts_folder), "Then join again: nothing is lost."
        raise HeadwayError(f"the parts cannot be joined ({error.strerror})", where=where, fix=fix) from error
    return _describe_result(parts, dst, time.perf_counter() - start_time)


def _load_parts(parts_folder: Path, dst: Path) -> list[Part]:
    """Loads all finished parts, sorted by number."""
    parts = []
    for entry in sorted(os.listdir(parts_folder)) if parts_folder.is_dir() else []:
        folder = parts_folder / entry
        # A hidden folder is of a pack that runs, or was killed.
        if entry.startswith(".") or entry == _JOINED or not folder.is_dir():
            continue
        names = ("",) if (folder / PART_FILE).is_file() else _SET_NAMES
        if lacking := [name for name in names if not (folder / name / PART_FILE).is_file()]:
            what = f"{os.path.join(lacking[0], PART_FILE)} is missing in it, so it is no finished part"
            raise DataError(what, where=str(folder), fix="Copy the folder again, or pack this part again.")
        parts.append({name: load_part_set(folder / name) for name in names})
    if not parts:
        fix = f"Pack them first, each on a machine of its own: headway pack SRC {dst} --part 1/16, and so on."
        raise UsageError("no finished parts are there", where=str(parts_folder), fix=fix)
    return sorted(parts, key=lambda part: _first_set(part).facts.index)


def _first_set(part: Part) -> PartSet:
    return next(iter(part.values()))


def _is_finished(parts: Sequence[Part], dst: Path) -> bool:
    """Returns True if `dst` is the pack of these parts, and holds all of their shards."""
    moved = True
    for part in parts:
        for name, part_set in part.items():
            if not (dst / name / COLUMNS_FILE).is_file():
                return False
            for shard in part_set.description.shards:
                is_moved = not (part_set.folder / shard.name).exists() and (dst / name / shard.name).is_file()
                moved = moved and is_moved
    return moved and any(part_set.description.shards for part in parts for part_set in part.values())


def _check_parts(parts: Sequence[Part], parts_folder: Path, dst: Path) -> tuple[str, ...]:
    """Checks that these are all parts of one pack, and returns the names of its sets."""
    first = parts[0]
    by_index: dict[int, Path] = {}
    for part in parts:
        facts, folder = _first_set(part).facts, _get_folder(part)
        if facts.count != _first_set(first).facts.count:
            what = f"{_get_folder(first).name} is one of {_first_set(first).facts.count} parts, and {folder.name} of "
            raise DataError(
                f"{what}{facts.count}", where=str(parts_folder), fix="Remove those that do not belong to this pack."
            )
        if facts.index in by_index:
            what = f"part {facts.index}/{facts.count} is there twice, as {by_index[facts.index].name} and {folder.name}"
            raise DataError(what, where=str(parts_folder), fix="Remove one of them.")
        by_index[facts.index] = folder
        if difference := _find_difference(first, part):
            what = f"{_get_folder(first).name} and {folder.name} are of different packs: {difference}"
            fix = "Pack each part from the same images with the same options."
            raise DataError(what, where=str(parts_folder), fix=fix)
    count = _first_set(first).facts.count
    if missing := [index for index in range(1, count + 1) if index not in by_index]:
        listed = ", ".join(map(str, missing[:_MAX_LISTED_PARTS]))
        more = f" and {len(missing) - _MAX_LISTED_PARTS:,} more" if len(missing) > _MAX_LISTED_PARTS else ""
        which = f"part {listed} is" if len(missing) == 1 else f"parts {listed}{more} are"
        fix = f"Pack what is missing: headway pack SRC {dst} --part {missing[0]}/{count}"
        raise DataError(f"of {count} parts, {which} missing", where=str(parts_folder), fix=fix)
    for name in first:
        if sum(len(part[name].description.shards) for part in parts) > MAX_SHARDS:
            raise DataError("they have too many shards", where=str(parts_folder), fix="Pack them with larger shards.")
        _check_images_left(name, parts)
    return tuple(first)


def _get_folder(part: Part) -> Path:
    name, part_set = next(iter(part.items()))
    return part_set.folder.parent if name else part_set.folder


def _find_difference(one: Part, other: Part) -> str:
    """Describes the first difference of two parts' packs; empty if they are of one."""
    if one.keys() != other.keys():
        return "only one of them has an evaluation set"
    for name, part_set in one.items():
        a, b = part_set.description, other[name].description
        for what, values in {
            "modes": (a.mode, b.mode),
            "formats": (a.format, b.format),
            "numbers of images": (f"{part_set.facts.planned:,}", f"{other[name].facts.planned:,}"),
            "kinds of label": (a.label_kind, b.label_kind),
        }.items():
            if values[0] != values[1]:
                return f"their {what} are {values[0]} and {values[1]}"
        if a.classes != b.classes:
            return "their classes differ"
        # The number is a hash of names, labels and sizes in their order, and of all options.
        if a.pack_id != b.pack_id:
            return "their images, seeds, splits or options differ"
    return ""


def _check_images_left(name: str, parts: Sequence[Part]) -> None:
    """Raises DataError unless an image of each class is left, as a pack by one machine does."""
    sets = [part[name] for part in parts]
    description, which = sets[0].description, f" of {name}" if name else ""
    labels = np.concatenate([part_set.columns["label"] for part_set in sets])
    if labels.size:
        planned = {number for part_set in sets for number in part_set.facts.planned_classes}
        lost = sorted(planned - set(np.unique(labels).tolist())) if name != "eval" and planned else []
        if not lost:
            return
        which = f" of class {description.classes[lost[0]]!r}"
    fix = "Put good images into it, and pack all parts again."
    raise DataError(f"no image is left{which}", where=description.source, fix=fix)


def _join(parts: Sequence[Part], names: Sequence[str], parts_folder: Path, dst: Path, overwrite: bool) -> None:
    joined = parts_folder / _JOINED
    joined.mkdir(exist_ok=True)
    for name in names:
        (joined / name).mkdir(exist_ok=True)
        sets = [part[name] for part in parts]
        # Nothing there may open while shards are moved.
        (joined / name / COLUMNS_FILE).unlink(missing_ok=True)
        for part_set in sets:
            for file in sorted(os.listdir(part_set.folder)):
                # Hidden files are of the file system.
                if file != PART_FILE and not file.startswith("."):
                    os.rename(part_set.folder / file, joined / name / file)
        sync_folder(joined / name)
    skipped = [line for name in names for part in parts for line in part[name].facts.skipped]
    if skipped:
        write_and_sync(joined / SKIPPED_FILE, format_skipped(skipped))
    for name in names:
        columns, description = _join_columns([part[name] for part in parts])
        write_and_sync(joined / name / COLUMNS_FILE, save(columns, metadata=description.to_metadata()))
        sync_folder(joined / name)
        # Checks that each shard is there, whole, and of this pack.
        open_pack(joined / name).close()
    sync_folder(joined)
    move_into_place(joined, dst, overwrite)


def _join_columns(sets: Sequence[PartSet]) -> tuple[dict[str, NDArray[Any]], DatasetDescription]:
    """Returns the columns and the description of the whole set."""
    columns = {
        name: np.concatenate([part_set.columns[name] for part_set in sets])
        for name in sets[0].columns
        if name not in ("shard", "name_offset")
    }
    # Shards and bytes of names are counted through all parts.
    num_shards = num_bytes = num_samples = 0
    shard_columns, offset_columns, gaps = [], [np.zeros(1, np.uint64)], []
    for part_set in sets:
        facts = part_set.facts
        first = PackPart(index=facts.index, count=facts.count).take(facts.planned).start
        gaps += [first - num_samples] * len(part_set.description.shards)
        num_samples += len(part_set.columns["label"])
        shard_columns.append(part_set.columns["shard"] + np.uint16(num_shards))
        offset_columns.append(part_set.columns["name_offset"][1:] + np.uint64(num_bytes))
        num_shards += len(part_set.description.shards)
        num_bytes += len(part_set.columns["name"])
    columns |= {"shard": np.concatenate(shard_columns), "name_offset": np.concatenate(offset_columns)}
    description = sets[0].description
    classes = description.classes
    return columns, replace(
        description,
        fingerprint=compute_fingerprint(columns),
        class_counts=count_classes(description.label_kind, columns["label"], len(classes)),
        channels=max(part_set.description.channels for part_set in sets),
        common_size=find_common_size(columns),
        shards=tuple(shard for part_set in sets for shard in part_set.description.shards),
        record_gaps=tuple(gaps) if any(gaps) else (),
    )


def _remove_parts(parts_folder: Path, dst: Path) -> None:
    # Hidden first, at once: parts without shards must not be taken for parts.
    leftover = dst.with_name(f".{dst.name}.packing-{os.getpid()}")
    os.rename(parts_folder, leftover)
    sync_folder(dst.parent)
    shutil.rmtree(leftover, ignore_errors=True)


def _describe_result(parts: Sequence[Part], dst: Path, seconds: float) -> PackResult:
    first = _first_set(parts[0])
    names = tuple(parts[0])
    sets = {name: [part[name] for part in parts] for name in names}
    folders = tuple(dst / name for name in names)
    counts = tuple(sum(len(part_set.columns["label"]) for part_set in sets[name]) for name in names)
    skipped = [pair for name in names for part_set in sets[name] for pair in part_set.facts.skipped]
    description = first.description
    classes = description.classes if description.label_kind != "value" else ()
    return PackResult(
        folders=folders,
        format=description.format,
        mode=description.mode,
        samples=sum(counts),
        counts=counts,
        classes=classes,
        left_out=sum(part_set.facts.left_out for name in names for part_set in sets[name]),
        bytes=sum(shard.size for name in names for part_set in sets[name] for shard in part_set.description.shards),
        skipped=skipped,
        skipped_file=dst / SKIPPED_FILE if skipped else None,
        notes=(),
        warnings=(
            *list_class_warnings(description.label_kind, classes),
            *list_set_warnings(folders, is_one_of_two(description.source)),
        ),
        seconds=seconds,
    )
