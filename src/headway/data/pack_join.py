"""Joins the parts of a pack that several machines have packed, without copying their shards.

A part is a folder in DST.parts. The join moves the shards into DST.parts/joined, which becomes DST once its columns are
written. Each shard is in its part or there, under the same name: a join that is killed leaves nothing that opens, and
the next one goes on.
"""

from __future__ import annotations

import os
import shlex
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
from headway.data.opening import check_shard
from headway.data.pack import (
    SKIPPED_FILE,
    PackResult,
    check_target,
    format_skipped,
    is_one_of_two,
    list_set_warnings,
)
from headway.data.pack_identity import find_difference, identify_finished
from headway.data.pack_part import PART_FILE, PartSet
from headway.data.pack_parts import (
    JOINED,
    PARTS_SUFFIX,
    SAME_IMAGES,
    FinishedPart,
    get_parts_folder,
    list_missing_parts,
    load_finished_parts,
)
from headway.data.pack_plan import PackPart
from headway.data.pack_set import MAX_SHARDS
from headway.data.set_warnings import list_class_warnings
from headway.data.staging import clear_leftovers, move_into_place
from headway.storage.addresses import parse_local_path


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
        UsageError: there are no parts, or they are joined already; `dst` exists.
        DataError: parts are missing, there twice, damaged, or of different packs; no image of a class is left.
        HeadwayError: a folder cannot be written.
    """
    start_time = time.perf_counter()
    dst = parse_local_path(dst, "Join the parts in a local folder, then copy it there.").resolve()
    _expect_destination(dst)
    clear_leftovers(dst)
    parts_folder = get_parts_folder(dst)
    try:
        parts = load_finished_parts(parts_folder)
        if not parts:
            raise _build_no_parts_error(parts_folder, dst)
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


def suggest_join(*paths: str | os.PathLike[str] | None) -> str:
    """Returns the command that joins the parts of the first of these paths that has parts beside it."""
    for path in [one for one in paths if one is not None]:
        dst = Path(os.fspath(path).rstrip("/").removesuffix(PARTS_SUFFIX))
        if dst.name and get_parts_folder(dst).is_dir():
            return f"Write headway pack --join {shlex.quote(str(dst))}: the parts know the rest."
    return "Write headway pack --join DST, where DST is the folder that the parts were packed for."


def _expect_destination(dst: Path) -> None:
    """Raises UsageError if the user named the folder of the parts, or a part, in place of the folder to create."""
    for folder in (dst, dst.parent):
        if folder.name.endswith(PARTS_SUFFIX) and folder.is_dir():
            what = "this holds the parts, and --join takes the folder to create"
            raise UsageError(what, where=str(folder), fix=suggest_join(folder))


def _build_no_parts_error(parts_folder: Path, dst: Path) -> UsageError:
    if any((dst / name / COLUMNS_FILE).is_file() for name in ("", "train")):
        what = "this is a whole pack, and no parts lie beside it: they are joined already"
        return UsageError(what, where=str(dst), fix=f"Check it with headway verify {shlex.quote(str(dst))}")
    fix = f"Pack them first, each on a machine of its own: headway pack SRC {dst} --part 1/16, and so on."
    return UsageError("no finished parts are there", where=str(parts_folder), fix=fix)


def _is_finished(parts: Sequence[FinishedPart], dst: Path) -> bool:
    """Returns True if `dst` is the pack of these parts, and holds all of their shards."""
    moved = True
    for part in parts:
        for name, part_set in part.sets.items():
            if not (dst / name / COLUMNS_FILE).is_file():
                return False
            for shard in part_set.description.shards:
                is_moved = not (part_set.folder / shard.name).exists() and (dst / name / shard.name).is_file()
                moved = moved and is_moved
    return moved and any(part_set.description.shards for part in parts for part_set in part.sets.values())


def _check_parts(parts: Sequence[FinishedPart], parts_folder: Path, dst: Path) -> tuple[str, ...]:
    """Checks that these are all parts of one pack, and whole. Returns the names of its sets."""
    first, identity = parts[0], identify_finished(parts[0].sets)
    by_index: dict[int, Path] = {}
    for part in parts:
        name, index = part.folder.name, part.facts.index
        difference = find_difference(first.folder.name, identity, name, identify_finished(part.sets))
        if part.facts.count != first.facts.count:
            fix = "Remove those that do not belong to this pack."
            raise DataError(difference, where=str(parts_folder), fix=fix)
        if index in by_index:
            what = f"part {index}/{part.facts.count} is there twice, as {by_index[index].name} and {name}"
            raise DataError(what, where=str(parts_folder), fix="Remove one of them.")
        by_index[index] = part.folder
        if difference:
            what = f"{first.folder.name} and {name} are of different packs: {difference}"
            fix = f"{SAME_IMAGES}, and pack one of them again, for example: "
            raise DataError(what, where=str(parts_folder), fix=f"{fix}{first.format_command(dst, index)} --overwrite")
    count = first.facts.count
    if missing := list_missing_parts(list(by_index), count):
        next_index = next(index for index in range(1, count + 1) if index not in by_index)
        fix = f"Pack what is missing, with the same options: {first.format_command(dst, next_index)}"
        raise DataError(f"of {count} parts, {missing} missing", where=str(parts_folder), fix=fix)
    for name in first.sets:
        if sum(len(part.sets[name].description.shards) for part in parts) > MAX_SHARDS:
            raise DataError("they have too many shards", where=str(parts_folder), fix="Pack them with larger shards.")
        _check_images_left(name, parts)
    # Before anything is moved, so that a damaged part can be packed again.
    for part in parts:
        _check_shards(part, parts_folder, dst)
    return tuple(first.sets)


def _check_shards(part: FinishedPart, parts_folder: Path, dst: Path) -> None:
    """Checks that each shard of a part is there, whole, and of this pack: in its part, or moved by a killed join."""
    for name, part_set in part.sets.items():
        for shard in part_set.description.shards:
            moved = parts_folder / JOINED / name / shard.name
            path = part_set.folder / shard.name
            try:
                check_shard(path if path.exists() or not moved.exists() else moved, shard, part_set.description)
            except DataError as error:
                command = part.format_command(dst, part.facts.index)
                raise DataError(
                    f"{os.path.join(name, shard.name)} of part {part.facts.index} of {part.facts.count}: {error.what}",
                    where=str(part.folder),
                    fix=f"Copy this part here again, or pack it again: {command} --overwrite",
                ) from error


def _check_images_left(name: str, parts: Sequence[FinishedPart]) -> None:
    """Raises DataError unless an image of each class is left, as a pack by one machine does."""
    sets = [part.sets[name] for part in parts]
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


def _join(parts: Sequence[FinishedPart], names: Sequence[str], parts_folder: Path, dst: Path, overwrite: bool) -> None:
    joined = parts_folder / JOINED
    joined.mkdir(exist_ok=True)
    for name in names:
        (joined / name).mkdir(exist_ok=True)
        sets = [part.sets[name] for part in parts]
        # Nothing there may open while shards are moved.
        (joined / name / COLUMNS_FILE).unlink(missing_ok=True)
        for part_set in sets:
            for file in sorted(os.listdir(part_set.folder)):
                # Hidden files are of the file system.
                if file != PART_FILE and not file.startswith("."):
                    os.rename(part_set.folder / file, joined / name / file)
        sync_folder(joined / name)
    skipped = [line for name in names for part in parts for line in part.sets[name].facts.skipped]
    if skipped:
        write_and_sync(joined / SKIPPED_FILE, format_skipped(skipped))
    for name in names:
        columns, description = _join_columns([part.sets[name] for part in parts])
        write_and_sync(joined / name / COLUMNS_FILE, save(columns, metadata=description.to_metadata()))
        sync_folder(joined / name)
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


def _describe_result(parts: Sequence[FinishedPart], dst: Path, seconds: float) -> PackResult:
    names = tuple(parts[0].sets)
    sets = {name: [part.sets[name] for part in parts] for name in names}
    folders = tuple(dst / name for name in names)
    counts = tuple(sum(len(part_set.columns["label"]) for part_set in sets[name]) for name in names)
    skipped = [pair for name in names for part_set in sets[name] for pair in part_set.facts.skipped]
    description = sets[names[0]][0].description
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
