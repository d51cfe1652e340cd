"""Pack: any source of images -> shards and columns. Parallel, crash-safe, every image decoded once."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import DataError, UsageError, suggest_nearest
from headway.core.files import write_and_sync
from headway.core.user_code import import_user_object
from headway.data import native
from headway.data.columns import COLUMNS_FILE
from headway.data.formats.pack_source import PackSource
from headway.data.formats.writers import WRITERS
from headway.data.opening import open_split
from headway.data.pack_mode import ImageEncoder, PackMode, Transform, open_header, summarise_notes
from headway.data.pack_plan import PackJob, plan_sets
from headway.data.pack_set import SetResult, pack_set, use_strict_pillow
from headway.data.reference import GRAY_MODES
from headway.data.staging import clear_leftovers, stage_folder
from headway.storage.addresses import is_address, parse_local_path, redact_address

SKIPPED_FILE = "skipped.txt"

_LISTED_FILES = 20

PackProgress = Callable[[int, int], None]
"""Called with (images done, images in all)."""


@final
@dataclass(frozen=True, kw_only=True)
class PackResult:
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


# Each keyword is a flag of `headway pack`.
def pack(  # noqa: PLR0913
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
    progress: PackProgress | None = None,
) -> PackResult:
    """Packs `src` (see `open_split`) into the folder `dst`, or, where there are two sets, into `dst`/train and /eval.

    `src` may be the address of one pack, such as http://host/photos/train; `dst` is on this machine.

    Every image is decoded, and refused by name if that fails. `dst` appears when all of it is on the disk: a pack that
    is killed leaves nothing that opens, and the next one to `dst` clears up after it. Samples are stored in the order
    of a hash of their names, not by class, so that a stretch of a shard, read sequentially, is a fair mixture.

    Args:
        format: of the shards: recordio, tar, lmdb or raw; None: raw where the source holds pixels or the mode is raw,
            else recordio.
        mode: what becomes of each image (see `headway.data.pack_mode`); None: seekable, raw where the format is raw.
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
    dst = parse_local_path(dst, "Pack to a local folder, then copy it there.").resolve()
    src = src if is_address(src) else parse_local_path(src, "")
    named = redact_address(os.fspath(src))
    _check_numbers(split, threads, shard_bytes)
    wanted = PackMode.parse(mode) if mode is not None else None
    if isinstance(src, Path):
        _check_places(src.resolve(), dst)
    clear_leftovers(dst)
    _check_target(dst, overwrite)
    function = _import_transform(transform) if isinstance(transform, str) else transform
    train, evaluation = open_split(src)
    pixels = train.images.raw_channels > 0
    chosen, how = _choose_format_and_mode(format, wanted, raw_source=pixels, transformed=function is not None)
    encoder, missing = build_encoder(how, function, orient, [train, evaluation] if evaluation else [train])
    plans = plan_sets(named, train, evaluation, split, seed)
    job = PackJob(
        source=named,
        format=chosen,
        encoder=encoder,
        transform=transform if isinstance(transform, str) else _get_transform_name(transform),
        threads=threads or count_usable_cores(),
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
    with stage_folder(dst, needed_bytes=needed_bytes, replace=overwrite) as staging, use_strict_pillow():
        for plan in plans:
            report = functools.partial(_report_progress, progress, done, total)
            result = pack_set(plan, staging / plan.name, job, report)
            done += len(plan.ids)
            results.append(result)
            bad += result.bad
            for note, names in result.notes.items():
                seen.setdefault(note, []).extend(names)
        if bad and not skip_bad:
            raise _build_bad_files_error(bad, total, named)
        if bad:
            lines = [f"{name}\t{reason}\n" for name, reason in bad]
            write_and_sync(staging / SKIPPED_FILE, "".join(lines).encode())
    return PackResult(
        folders=tuple(dst / plan.name for plan in plans),
        format=chosen,
        mode=str(encoder.mode),
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
            *(_describe_pixels(wanted, encoder) if pixels else ()),
            *summarise_notes(seen, can_turn=function is not None or encoder.mode.kind in ("encode", "raw")),
        ),
        seconds=time.perf_counter() - begun,
    )


def build_encoder(
    mode: PackMode, function: Transform | None, orient: bool, sources: Sequence[PackSource]
) -> tuple[ImageEncoder, tuple[str, ...]]:
    """What becomes of each image; and a sentence where the native core, which the mode needs, is missing."""
    kept = mode.kind in ("keep", "seekable")
    if orient and kept and not function:
        what = f"mode {mode} keeps the files as they are, so they cannot be turned"
        raise UsageError(what, fix="Leave --orient out, or choose a mode such as quality=95 or resize=256,quality=90.")
    missing: tuple[str, ...] = ()
    if mode.kind in ("seekable", "encode") and not native.is_available():
        missing = ("JPEGs were not made seekable, which needs the native core.",)
    with use_strict_pillow():
        gray = mode.kind == "raw" and all(map(_are_all_gray, sources))
    encoder = ImageEncoder(
        mode=PackMode(kind="keep") if missing and kept else mode,
        channels=1 if gray else 3,
        seekable=native.make_seekable if mode.kind in ("seekable", "encode") and not missing else None,
        transform=function,
        orient=orient,
    )
    return encoder, missing


def _describe_pixels(wanted: PackMode | None, encoder: ImageEncoder) -> tuple[str, ...]:
    """What became of pixels, where that is not what the mode's name says."""
    if encoder.transform or encoder.mode.kind == "encode":
        return ()
    if encoder.mode.kind != "raw":
        return ("The source's pixels are stored as PNG, which loses nothing.",)
    if wanted is not None and wanted.kind != "raw":
        return (f"Mode {wanted} is of image files: the source's pixels are stored as they are, in mode raw.",)
    return ()


def _import_transform(path: str) -> Transform:
    function = import_user_object(path, base=Path.cwd(), what="--transform")
    if not callable(function):
        raise UsageError(
            f"{path!r} is no function", where="--transform", fix="Name a function of (image, label, name)."
        )
    transform: Transform = function
    return transform


def _get_transform_name(function: Transform | None) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}" if function else ""


def _are_all_gray(source: PackSource) -> bool:
    """Whether every image is gray, by their headers; looks no further than the first that is not."""
    if source.images.gray is not None:
        return source.images.gray
    for sample in range(len(source)):
        try:
            with open_header(source.images.read(sample)) as image:
                if image.mode not in GRAY_MODES:
                    return False
        except Exception:  # a bad image, which the pack will name
            continue
    return True


def _choose_format_and_mode(
    format: str | None, mode: PackMode | None, *, raw_source: bool, transformed: bool
) -> tuple[str, PackMode]:
    """Format and mode where either may be left out."""
    if format is not None and format not in WRITERS:
        raise UsageError(f"{format!r} is no format that can be written", fix=suggest_nearest(format, WRITERS))
    lossless = mode is None or mode.kind in ("keep", "seekable")
    if format is None:
        format = "raw" if (raw_source and lossless) or (mode and mode.kind == "raw") else "recordio"
    if mode is None or (format == "raw" and raw_source and lossless):
        mode = PackMode(kind="raw" if format == "raw" else "keep" if raw_source else "seekable")
    if mode.kind == "seekable" and raw_source and not transformed:  # PNG has nothing to seek
        mode = PackMode(kind="keep")
    if (format == "raw") != (mode.kind == "raw"):
        fix = "Choose --mode raw or raw,resize=N." if format == "raw" else "Choose --format raw, or another mode."
        raise UsageError(f"format {format} does not hold images in mode {mode}", fix=fix)
    return format, mode


def _report_progress(progress: PackProgress | None, before: int, total: int, done: int) -> None:
    if progress:
        progress(before + done, total)


def _check_numbers(split: float, threads: int | None, shard_bytes: int) -> None:
    if not 0 <= split < 1:
        raise UsageError(f"a split of {split:g} is no share of the images", fix="Choose 0 <= split < 1, such as 0.1.")
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads cannot pack anything", fix="Choose at least 1.")
    if shard_bytes < 1:
        raise UsageError(f"a shard cannot have {shard_bytes} bytes", fix="Choose some 100 MB or more.")


def _build_bad_files_error(bad: list[tuple[str, str]], total: int, src: str) -> DataError:
    lines = [f"  {name}: {reason}" for name, reason in bad[:_LISTED_FILES]]
    if len(bad) > _LISTED_FILES:
        lines.append(f"  and {len(bad) - _LISTED_FILES:,} more")
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
