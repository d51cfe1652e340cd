"""Pack: any source of images -> shards and columns. Parallel, crash-safe, every image decoded once."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.cores import usable_cores
from headway.core.errors import DataError, UsageError, nearest
from headway.core.files import write_synced
from headway.core.importing import import_path
from headway.data import native
from headway.data.columns import COLUMNS_FILE
from headway.data.formats.source import Source, is_address, local_path, open_split
from headway.data.formats.writers import WRITERS
from headway.data.modes import Mode, Transform, Treatment, glanced, sentences
from headway.data.pack_plan import Job, plans_of
from headway.data.pack_set import SetResult, pack_set, strict_pillow
from headway.data.reference import GRAY_MODES
from headway.data.staging import clear_leftovers, staged
from headway.data.tiers.transport import shown

SKIPPED_FILE = "skipped.txt"

_SHOWN = 20

Progress = Callable[[int, int], None]
"""Called with (images done, images in all)."""


@final
@dataclass(frozen=True, kw_only=True)
class Packed:
    """What a pack made."""

    folders: tuple[Path, ...]
    """One packed data set, or two: train and eval."""
    format: str
    mode: str
    """`keep` also where seekable was wished for and the native core is missing."""
    samples: int
    counts: tuple[int, ...]
    """Samples of each of `folders`."""
    classes: tuple[str, ...]
    """Empty where labels are numbers."""
    left_out: int
    """Samples that the transform left out."""
    bytes: int
    """Size of all shards."""
    skipped: list[tuple[str, str]]
    """(name, reason) of each image left out."""
    skipped_file: Path | None
    """Where they are listed; None where there are none."""
    notes: tuple[str, ...]
    """What was left out, or is not as it was wished, in sentences."""
    seconds: float


def pack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str | None = None,
    mode: str | None = None,
    transform: str | Transform | None = None,
    orient: bool = False,
    split: float = 0.0,
    seed: int = 0,
    threads: int | None = None,
    shard_bytes: int = 1 << 30,
    skip_bad: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Packed:
    """Packs `src` (see `open_split`) into the folder `dst`, or, where there are two sets, into `dst`/train and /eval.

    `src` may be the address of one pack, such as http://host/photos/train; `dst` is on this machine.

    Every image is decoded, and refused by name if that fails. `dst` appears when all of it is on the disk: a pack that
    is killed leaves nothing that opens, and the next one to `dst` clears up after it. Samples are stored in the order
    of a hash of their names, not by class, so that a stretch of a shard, read sequentially, is a fair mixture.

    Args:
        format: of the shards: recordio, tar, lmdb or raw; None: raw where the source holds pixels or the mode is raw,
            else recordio.
        mode: what becomes of each image (see `headway.data.modes`); None: seekable, raw where the format is raw.
        transform: `module:function` or `file.py:function`, or the function itself: called with (image, label, name)
            before the mode, on the packing threads; returns a Pillow image, the bytes of an image file, or None to
            leave the sample out.
        orient: turns images as their EXIF block says; in modes that encode them anew.
        split: share of the images that becomes the evaluation set; of each class, where there are classes.
        seed: of the choice and the order; the same seed and names give the same.
        threads: that read and decode; None: one for each usable core.
        shard_bytes: size at which a new shard is begun.
        skip_bad: leaves bad images out and lists them in skipped.txt, instead of raising.
        overwrite: replaces a packed data set at `dst`, once the new one is complete.

    Raises:
        UsageError: a place, a number or a mode that cannot be; `dst` exists.
        DataError: bad images (all of them are found first); no image of the set or of a class is left; classes that
            differ between the two sets; an address that cannot be read.
        UserCodeError: the transform failed; its cause carries the traceback.
        HeadwayError: `dst` cannot be written, or the disk is full.
    """
    begun = time.perf_counter()
    dst = local_path(dst, "Pack to a local folder, then copy it there.").resolve()
    src = src if is_address(src) else local_path(src, "")
    named = shown(os.fspath(src))
    _check_numbers(split, threads, shard_bytes)
    wanted = Mode.parse(mode) if mode is not None else None
    if isinstance(src, Path):
        _check_places(src.resolve(), dst)
    clear_leftovers(dst)
    _check_target(dst, overwrite)
    function = _imported(transform) if isinstance(transform, str) else transform
    train, evaluation = open_split(src)
    pixels = train.images.raw_channels > 0
    chosen, how = _chosen(format, wanted, raw_source=pixels, transformed=function is not None)
    treatment, missing = treatment_of(how, function, orient, [train, evaluation] if evaluation else [train])
    plans = plans_of(named, train, evaluation, split, seed)
    job = Job(
        source=named,
        format=chosen,
        treatment=treatment,
        transform=transform if isinstance(transform, str) else _name_of(transform),
        threads=threads or usable_cores(),
        shard_bytes=shard_bytes,
        skip_bad=skip_bad,
        parts=tuple(plan.name for plan in plans if plan.name),
    )
    total = sum(len(plan.ids) for plan in plans)
    done = 0
    results: list[SetResult] = []
    bad: list[tuple[str, str]] = []
    seen: dict[str, list[str]] = {}
    as_they_are = not function and (how.kind in ("keep", "seekable") or pixels)
    needed_bytes = sum(int(plan.sizes.sum()) + plan.labels.nbytes for plan in plans) if as_they_are else None
    with staged(dst, needed_bytes=needed_bytes, replace=overwrite) as staging, strict_pillow():
        for plan in plans:
            report = functools.partial(_report, progress, done, total)
            result = pack_set(plan, staging / plan.name, job, report)
            done += len(plan.ids)
            results.append(result)
            bad += result.bad
            for note, names in result.notes.items():
                seen.setdefault(note, []).extend(names)
        if bad and not skip_bad:
            raise _bad_files(bad, total, named)
        if bad:
            lines = [f"{name}\t{reason}\n" for name, reason in bad]
            write_synced(staging / SKIPPED_FILE, "".join(lines).encode())
    return Packed(
        folders=tuple(dst / plan.name for plan in plans),
        format=chosen,
        mode=str(treatment.mode),
        samples=sum(result.samples for result in results),
        counts=tuple(result.samples for result in results),
        classes=plans[0].source.classes if train.label_kind != "value" else (),
        left_out=sum(result.left_out for result in results),
        bytes=sum(result.size_bytes for result in results),
        skipped=bad,
        skipped_file=dst / SKIPPED_FILE if bad else None,
        notes=(
            *train.notes,
            *(evaluation.notes if evaluation else ()),
            *missing,
            *(_of_pixels(wanted, treatment) if pixels else ()),
            *sentences(seen, can_turn=function is not None or treatment.mode.kind in ("encode", "raw")),
        ),
        seconds=time.perf_counter() - begun,
    )


def treatment_of(
    mode: Mode, function: Transform | None, orient: bool, sources: Sequence[Source]
) -> tuple[Treatment, tuple[str, ...]]:
    """What becomes of each image; and a sentence where the native core, which the mode needs, is missing."""
    kept = mode.kind in ("keep", "seekable")
    if orient and kept and not function:
        what = f"mode {mode} keeps the files as they are, so they cannot be turned"
        raise UsageError(what, fix="Leave --orient out, or choose a mode such as quality=95 or resize=256,quality=90.")
    missing: tuple[str, ...] = ()
    if mode.kind in ("seekable", "encode") and not native.is_available():
        missing = ("JPEGs were not made seekable, which needs the native core.",)
    with strict_pillow():
        gray = mode.kind == "raw" and all(map(_all_gray, sources))
    treatment = Treatment(
        mode=Mode(kind="keep") if missing and kept else mode,
        channels=1 if gray else 3,
        seekable=native.make_seekable if mode.kind in ("seekable", "encode") and not missing else None,
        transform=function,
        orient=orient,
    )
    return treatment, missing


def _of_pixels(wanted: Mode | None, treatment: Treatment) -> tuple[str, ...]:
    """What became of pixels, where that is not what the mode's name says."""
    if treatment.transform or treatment.mode.kind == "encode":
        return ()
    if treatment.mode.kind != "raw":
        return ("The source's pixels are stored as PNG, which loses nothing.",)
    if wanted is not None and wanted.kind != "raw":
        return (f"Mode {wanted} is of image files: the source's pixels are stored as they are, in mode raw.",)
    return ()


def _imported(path: str) -> Transform:
    function = import_path(path, base=Path.cwd(), what="--transform")
    if not callable(function):
        raise UsageError(
            f"{path!r} is no function", where="--transform", fix="Name a function of (image, label, name)."
        )
    transform: Transform = function
    return transform


def _name_of(function: Transform | None) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}" if function else ""


def _all_gray(source: Source) -> bool:
    """Whether every image is gray, by their headers; looks no further than the first that is not."""
    if source.images.gray is not None:
        return source.images.gray
    for sample in range(len(source)):
        try:
            with glanced(source.images.read(sample)) as image:
                if image.mode not in GRAY_MODES:
                    return False
        except Exception:  # a bad image, which the pack will name
            continue
    return True


def _chosen(format: str | None, mode: Mode | None, *, raw_source: bool, transformed: bool) -> tuple[str, Mode]:
    """Format and mode where either may be left out."""
    if format is not None and format not in WRITERS:
        raise UsageError(f"{format!r} is no format that can be written", fix=nearest(format, WRITERS))
    lossless = mode is None or mode.kind in ("keep", "seekable")
    if format is None:
        format = "raw" if (raw_source and lossless) or (mode and mode.kind == "raw") else "recordio"
    if mode is None or (format == "raw" and raw_source and lossless):
        mode = Mode(kind="raw" if format == "raw" else "keep" if raw_source else "seekable")
    if mode.kind == "seekable" and raw_source and not transformed:  # PNG has nothing to seek
        mode = Mode(kind="keep")
    if (format == "raw") != (mode.kind == "raw"):
        fix = "Choose --mode raw or raw,resize=N." if format == "raw" else "Choose --format raw, or another mode."
        raise UsageError(f"format {format} does not hold images in mode {mode}", fix=fix)
    return format, mode


def _report(progress: Progress | None, before: int, total: int, done: int) -> None:
    if progress:
        progress(before + done, total)


def _check_numbers(split: float, threads: int | None, shard_bytes: int) -> None:
    if not 0 <= split < 1:
        raise UsageError(f"a split of {split:g} is no share of the images", fix="Choose 0 <= split < 1, such as 0.1.")
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads cannot pack anything", fix="Choose at least 1.")
    if shard_bytes < 1:
        raise UsageError(f"a shard cannot have {shard_bytes} bytes", fix="Choose some 100 MB or more.")


def _bad_files(bad: list[tuple[str, str]], total: int, src: str) -> DataError:
    lines = [f"  {name}: {reason}" for name, reason in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"  and {len(bad) - _SHOWN:,} more")
    files = f"file{'s'[: total > 1]} {'is' if len(bad) == 1 else 'are'}"
    return DataError(
        f"{len(bad):,} of {total:,} {files} no usable image",
        where=src,
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
