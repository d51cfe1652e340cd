"""Pack: any source of images -> shards and columns. Parallel, crash-safe, every image decoded once."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.core.files import write_synced
from headway.data.dataset import COLUMNS_FILE
from headway.data.decode import usable_cores
from headway.data.formats.source import Source, open_split
from headway.data.pack_set import SetPlan, pack_set, strict_pillow
from headway.data.staging import clear_leftovers, staged

SKIPPED_FILE = "skipped.txt"

_SHOWN = 20
_SHARD_LIMIT = 1 << 16
"""A shard's number is a 16-bit column."""

Progress = Callable[[int, int], None]
"""Called with (images done, images in all)."""


@final
@dataclass(frozen=True, kw_only=True)
class Packed:
    """What a pack made."""

    folders: tuple[Path, ...]
    """One packed data set, or two: train and eval."""
    samples: int
    bytes: int
    """Size of all shards."""
    skipped: list[tuple[str, str]]
    """(name, reason) of each file left out."""
    notes: tuple[str, ...]
    """What was found beside the images and left out, in sentences."""
    seconds: float


def pack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    split: float = 0.0,
    seed: int = 0,
    threads: int | None = None,
    shard_bytes: int = 1 << 30,
    skip_bad: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Packed:
    """Packs `src` (see `open_split`) into the folder `dst`, or, where there are two sets, into `dst`/train and /eval.

    Every image is decoded, and refused by name if that fails; its bytes are stored as they are. `dst` appears when all
    of it is on the disk: a pack that is killed leaves nothing that opens, and the next one to `dst` clears up after it.
    Samples are stored in the order of a hash of their names, not by class, so that a stretch of a shard, read
    sequentially, is a fair mixture of the set.

    Args:
        split: share of the images that becomes the evaluation set; of each class, where there are classes.
        seed: of the choice and the order; the same seed and names give the same.
        threads: that read and decode; None: one for each usable core.
        shard_bytes: size at which a new shard is begun.
        skip_bad: leaves bad files out and lists them in skipped.txt, instead of raising.
        overwrite: replaces a packed data set at `dst`, once the new one is complete.

    Raises:
        UsageError: a place or a number that cannot be; `dst` exists.
        DataError: bad images (all of them are found first); classes that differ between the two sets.
        HeadwayError: `dst` cannot be written, or the disk is full.
    """
    begun = time.perf_counter()
    src, dst = Path(src), Path(dst).resolve()
    _check_numbers(split, threads, shard_bytes)
    _check_places(src.resolve(), dst)
    clear_leftovers(dst)
    _check_target(dst, overwrite)
    train, evaluation = open_split(src)
    plans = _plans(src, train, evaluation, split, seed)
    total = sum(len(plan.ids) for plan in plans)
    needed_bytes = sum(int(plan.sizes.sum()) + plan.labels.nbytes for plan in plans)
    # Two shards in a row hold more than shard_bytes together; a record adds at most 64 bytes to its image and label.
    if 2 * (needed_bytes + 64 * total) // shard_bytes + len(plans) > _SHARD_LIMIT:
        raise UsageError(f"shards of {shard_bytes:,} bytes would be too many", fix="Make them larger.")
    done = samples = size_bytes = 0
    bad: list[tuple[str, str]] = []
    with staged(dst, needed_bytes=needed_bytes, replace=overwrite) as staging, strict_pillow():
        for plan in plans:
            result = pack_set(
                plan,
                staging / plan.name,
                source=str(src),
                threads=threads or usable_cores(),
                shard_bytes=shard_bytes,
                skip_bad=skip_bad,
                report=functools.partial(_report, progress, done, total),
            )
            done += len(plan.ids)
            samples += result.samples
            size_bytes += result.size_bytes
            bad += result.bad
        if bad and not skip_bad:
            raise _bad_files(bad, total, src)
        if bad:
            lines = [f"{name}\t{reason}\n" for name, reason in bad]
            write_synced(staging / SKIPPED_FILE, "".join(lines).encode())
    return Packed(
        folders=tuple(dst / plan.name for plan in plans),
        samples=samples,
        bytes=size_bytes,
        skipped=bad,
        notes=train.notes + (evaluation.notes if evaluation else ()),
        seconds=time.perf_counter() - begun,
    )


def _report(progress: Progress | None, before: int, total: int, done: int) -> None:
    if progress:
        progress(before + done, total)


def _plans(src: Path, train: Source, evaluation: Source | None, share: float, seed: int) -> list[SetPlan]:
    order = _order(train, seed)
    if evaluation is None and share == 0:
        return [_plan("", train, order)]
    if evaluation is None:
        chosen = _stratified(train, order, share, src)
        return [_plan("train", train, order[~chosen]), _plan("eval", train, order[chosen])]
    names = [os.path.basename(part.root) for part in (train, evaluation)]
    if share > 0:
        fix = f"Leave --split out, or pack {train.root} alone."
        raise UsageError(f"this has an evaluation set already, {names[1]}", where=str(src), fix=fix)
    if train.classes != evaluation.classes:
        differences = [
            f"only in {name}: {', '.join(sorted(set(one.classes) - set(other.classes)))}"
            for name, one, other in ((names[0], train, evaluation), (names[1], evaluation, train))
            if set(one.classes) - set(other.classes)
        ]
        raise DataError(
            f"eval classes unlike train classes ({'; '.join(differences)})",
            where=str(src),
            fix="Give both the same class folders.",
        )
    return [
        _plan("train", train, order, f"{names[0]}/"),
        _plan("eval", evaluation, _order(evaluation, seed), f"{names[1]}/"),
    ]


def _plan(name: str, source: Source, ids: NDArray[np.int64], shown: str = "") -> SetPlan:
    sizes = np.fromiter((_size(source.paths[sample]) for sample in ids), np.int64, len(ids))
    return SetPlan(name=name, source=source, ids=ids, sizes=sizes, shown=shown)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # the reading of it will say by name what is wrong
        return 0


def _order(source: Source, seed: int) -> NDArray[np.int64]:
    """All samples, by a hash of seed and name."""
    hashes = b"".join(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest() for name in source.names)
    return np.argsort(np.frombuffer(hashes, "<u8"), kind="stable").astype(np.int64)


def _stratified(source: Source, order: NDArray[np.int64], share: float, src: Path) -> NDArray[np.bool_]:
    """Which places of `order` go to the evaluation set: the first round(share x n) of each class, at least 1 of 2."""
    of_class = source.label_kind == "class"
    groups = source.labels[order] if of_class else np.zeros(len(order), np.int64)
    counts = np.bincount(groups, minlength=len(source.classes) if of_class else 1)
    wanted = np.maximum(np.floor(share * counts + 0.5).astype(np.int64), counts >= 2)
    if (whole := np.flatnonzero((wanted >= counts) & (counts > 0))).size:
        name = f"class {source.classes[whole[0]]!r}, of {counts[whole[0]]} images," if of_class else "the set"
        raise UsageError(
            f"a split of {share:g} would leave {name} without a training image", where=str(src), fix="Split off less."
        )
    if not wanted.any():
        raise UsageError("no class has two images, so none can be split off", where=str(src), fix="Leave --split out.")
    by_group = np.argsort(groups, kind="stable")
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = np.zeros(len(order), np.bool_)
    chosen[by_group] = rank < np.repeat(wanted, counts)
    return chosen


def _check_numbers(split: float, threads: int | None, shard_bytes: int) -> None:
    if not 0 <= split < 1:
        raise UsageError(f"a split of {split:g} is no share of the images", fix="Choose 0 <= split < 1, such as 0.1.")
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads cannot pack anything", fix="Choose at least 1.")
    if shard_bytes < 1:
        raise UsageError(f"a shard cannot have {shard_bytes} bytes", fix="Choose some 100 MB or more.")


def _bad_files(bad: list[tuple[str, str]], total: int, src: Path) -> DataError:
    lines = [f"  {name}: {reason}" for name, reason in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"  and {len(bad) - _SHOWN:,} more")
    files = "file is" if len(bad) == 1 else "files are"
    return DataError(
        f"{len(bad):,} of {total:,} {files} no usable image",
        where=str(src),
        fix="\n".join(["Mend or remove them, or leave them out with --skip-bad:", *lines]),
    )


def _check_places(src: Path, dst: Path) -> None:
    if src.is_dir() and dst.is_relative_to(src):
        what = "a pack inside its own source would be taken for a class the next time"
        raise UsageError(what, where=str(dst), fix=f"Pack to a place outside {src}.")
    if src.is_relative_to(dst):
        raise UsageError("the source lies inside the place to pack to", where=str(dst), fix="Pack to another place.")


def _check_target(dst: Path, overwrite: bool) -> None:
    if not dst.exists() or (dst.is_dir() and not any(dst.iterdir())):
        return
    if not dst.is_dir() or not any((dst / part / COLUMNS_FILE).is_file() for part in ("", "train")):
        raise UsageError("this exists and is no packed data set", where=str(dst), fix="Pack to another place.")
    if not overwrite:
        raise UsageError("this exists", where=str(dst), fix="Pack to another place, or replace it with --overwrite.")
