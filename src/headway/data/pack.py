"""Pack: any source of images to shards and columns. Parallel, crash-safe, every image decoded once."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import DataError, UsageError, suggest_nearest
from headway.core.files import write_and_sync
from headway.core.user_code import import_user_object
from headway.data import native
from headway.data.columns import COLUMNS_FILE
from headway.data.formats.listing_columns import parse_columns
from headway.data.formats.pack_source import EVAL_NAMES, PackSource
from headway.data.formats.writers import WRITERS
from headway.data.opening import open as open_pack
from headway.data.opening import open_split
from headway.data.pack_mode import ImageEncoder, PackMode, Transform, open_header, summarise_notes
from headway.data.pack_parts import expect_same_pack, get_parts_folder
from headway.data.pack_plan import PackJob, PackPart, plan_sets
from headway.data.pack_set import SetResult, pack_set, use_strict_pillow
from headway.data.reference import GRAY_MODES
from headway.data.set_warnings import NO_EVALUATION, describe_shared_images, list_class_warnings
from headway.data.staging import clear_leftovers, stage_folder
from headway.data.store_address import StoreAddress, is_store_address
from headway.storage.addresses import is_url, parse_local_path, redact_url

SKIPPED_FILE = "skipped.txt"

_MAX_LISTED_FILES = 20

PackProgress = Callable[[int, int], None]
"""Callback that gets (images packed, images in all)."""


@final
@dataclass(frozen=True, kw_only=True)
class PackResult:
    """Result of a pack."""

    folders: tuple[Path, ...]
    """One packed data set, or two: train and eval."""
    format: str
    mode: str
    """Mode that was used: `keep` if seekable was requested and the native core is missing."""
    samples: int
    counts: tuple[int, ...]
    """Samples of each of `folders`."""
    classes: tuple[str, ...]
    """Names of the classes; empty if labels are numbers."""
    left_out: int
    """Samples that the transform left out."""
    bytes: int
    """Size of all shards."""
    skipped: list[tuple[str, str]]
    """(name, reason) of each bad image that was left out."""
    skipped_file: Path | None
    """File that lists the bad images; None if there are none."""
    notes: tuple[str, ...]
    """Sentences about images that were left out, or stored in another way than requested."""
    warnings: tuple[str, ...]
    """Sentences about data that can be trained on, and probably should not be as they are."""
    seconds: float
    """Wall time of the pack."""


# Each keyword is a flag of `headway pack`.
def pack(  # noqa: PLR0913
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str | None = None,
    mode: str | None = None,
    transform: str | Transform | None = None,
    columns: str | None = None,
    orient: bool = False,
    split: float = 0.0,
    seed: int = 0,
    threads: int | None = None,
    shard_bytes: int = 1 << 30,
    skip_bad: bool = False,
    overwrite: bool = False,
    part: tuple[int, int] | None = None,
    progress: PackProgress | None = None,
) -> PackResult:
    """Packs `src` (see `open_split`) into the folder `dst`, or its two sets into `dst`/train and `dst`/eval.

    `src` may be the URL of one pack, such as http://host/photos/train, or a version in a store, such as
    store:cars@v3; `dst` must be on this machine.

    Every image is decoded, and bad ones are named. `dst` appears only when all of it is on the disk: a pack that is
    killed leaves nothing that opens, and the next pack to `dst` removes its leftovers. Samples are stored in the order
    of a hash of their names, not by class, so that a stretch of a shard, read sequentially, is a fair mixture.

    Several machines pack one data set if each packs another `part`, and `join_pack` joins the parts.

    Args:
        format: recordio, tar, lmdb or raw; None is raw if the source holds pixels or the mode is raw, else recordio.
        mode: how each image is stored (see `headway.data.pack_mode`); None is seekable, or raw if the format is raw.
        transform: `module:function` or `file.py:function`, or the function itself. It is called with (image, label,
            name) before the mode, on the packing threads, and returns a Pillow image, the bytes of an image file, or
            None to leave the sample out.
        columns: names of the columns of a CSV or JSONL file that are used, such as `path,label`, or
            `path=file,label=species` if the file has other names; all others are left out. None: the file has our
            names, and a column of boxes, masks or the like is refused.
        orient: turns images as their EXIF block says; in modes that encode them anew.
        split: share of the images, of each class if there are classes, that becomes the evaluation set.
        seed: of the split and the order; equal seeds and names give equal packs.
        threads: number of threads that read and decode; None is one for each usable core.
        shard_bytes: size at which a new shard begins.
        skip_bad: leaves bad images out and lists them in skipped.txt, instead of raising.
        overwrite: replaces a packed data set at `dst`, or this part of it, once the new one is complete.
        part: (3, 16) packs the third of 16 parts of the images, into a folder in `dst`.parts. All other arguments must
            be the same for all parts.

    Raises:
        UsageError: a path, number or mode is impossible; `dst` exists.
        DataError: images are bad (all of them are named); no image of the set or of a class is left; the classes of the
            two sets differ; a URL cannot be read.
        UserCodeError: the transform failed; its cause has the traceback.
        HeadwayError: `dst` cannot be written, or the disk is full.
    """
    start_time = time.perf_counter()
    dst = parse_local_path(dst, "Pack to a local folder, then copy it there.").resolve()
    # A password in a URL must not reach the columns file.
    source_name = redact_url(os.fspath(src))
    if is_store_address(src):
        address = StoreAddress.parse(os.fspath(src))
        src = address.resolve_split() if address.split else address.resolve()
    src = src if is_url(src) else parse_local_path(src, "")
    # All arguments are checked before the first file is written.
    _check_numbers(split, threads, shard_bytes)
    requested_mode = PackMode.parse(mode) if mode is not None else None
    pack_part = PackPart(index=part[0], count=part[1]) if part is not None else None
    if isinstance(src, Path):
        _check_not_nested(src.resolve(), dst)
    # A pack to the same place that was killed may have moved the old data set away: restore it first.
    clear_leftovers(dst)
    check_target(dst, overwrite)
    pack_folder = dst
    if pack_part:
        dst = get_parts_folder(dst) / pack_part.folder_name
        clear_leftovers(dst)
        _check_part_target(dst, overwrite)
    transform_function = _import_transform(transform) if isinstance(transform, str) else transform
    train, evaluation = open_split(src, parse_columns(columns) if columns is not None else None)
    has_pixels = train.images.raw_channels > 0
    has_transform = transform_function is not None
    chosen_format, chosen_mode = _choose_format_and_mode(format, requested_mode, has_pixels, has_transform)
    encoder, encoder_notes = build_encoder(
        chosen_mode, transform_function, orient, [train, evaluation] if evaluation else [train]
    )
    plans = plan_sets(source_name, train, evaluation, split, seed)
    transform_name = transform if isinstance(transform, str) else _get_transform_name(transform)
    usual_format, usual_mode = _choose_format_and_mode(None, None, has_pixels, has_transform)
    options = {
        "--format": chosen_format if chosen_format != usual_format else None,
        "--mode": str(chosen_mode) if chosen_mode != usual_mode else None,
        "--transform": transform_name or None,
        "--columns": columns,
        "--orient": "" if orient else None,
        "--split": f"{split:g}" if split else None,
        "--seed": f"{seed}" if seed else None,
    }
    job = PackJob(
        source=source_name,
        format=chosen_format,
        encoder=encoder,
        transform=transform_name,
        threads=threads or count_usable_cores(),
        shard_bytes=shard_bytes,
        skip_bad=skip_bad,
        sets=tuple(plan.name for plan in plans if plan.name),
        part=pack_part,
        options={option: text for option, text in options.items() if text is not None},
    )
    if pack_part:
        expect_same_pack(pack_folder, plans, job)
        plans = [plan.take_part(pack_part) for plan in plans]
    # Progress counts images over both sets.
    total = sum(len(plan.ids) for plan in plans)
    num_done = 0
    results: list[SetResult] = []
    bad_images: list[tuple[str, str]] = []
    names_by_note: dict[str, list[str]] = {}
    # Only bytes that are stored unchanged have a known size; it goes into the message of a full disk.
    is_unchanged = not transform_function and (chosen_mode.kind in ("keep", "seekable") or has_pixels)
    needed_bytes = sum(int(plan.sizes.sum()) + plan.labels.nbytes for plan in plans) if is_unchanged else None
    # Everything in the block goes to a temporary folder, which is renamed at its end.
    with stage_folder(dst, needed_bytes=needed_bytes, replace=overwrite) as staging, use_strict_pillow():
        for plan in plans:
            # Each set counts from 0; this adds the images of the sets before.
            report = functools.partial(_report_progress, progress, num_done, total)
            result = pack_set(plan, staging / plan.name, job, report)
            num_done += len(plan.ids)
            results.append(result)
            bad_images += result.bad
            for note, names in result.notes.items():
                names_by_note.setdefault(note, []).extend(names)
        # Raised after all images were checked, so one run names every bad one.
        if bad_images and not skip_bad:
            raise _build_bad_files_error(bad_images, total, source_name)
        if bad_images:
            write_and_sync(staging / SKIPPED_FILE, format_skipped(bad_images))
    folders = tuple(dst / plan.name for plan in plans)
    return PackResult(
        folders=folders,
        format=chosen_format,
        mode=str(encoder.mode),
        samples=sum(result.samples for result in results),
        counts=tuple(result.samples for result in results),
        classes=plans[0].source.classes if train.label_kind != "value" else (),
        left_out=sum(result.left_out for result in results),
        bytes=sum(result.size_bytes for result in results),
        skipped=bad_images,
        skipped_file=dst / SKIPPED_FILE if bad_images else None,
        notes=(
            *train.notes,
            *(evaluation.notes if evaluation else ()),
            *encoder_notes,
            *(_describe_pixel_storage(requested_mode, encoder) if has_pixels else ()),
            *summarise_notes(
                names_by_note, can_orient=transform_function is not None or encoder.mode.kind in ("encode", "raw")
            ),
        ),
        warnings=(
            *list_class_warnings(train.label_kind, plans[0].source.classes),
            # Only the join has both sets whole, and compares their images.
            *(() if pack_part and len(plans) == 2 else list_set_warnings(folders, is_one_of_two(source_name))),
        ),
        seconds=time.perf_counter() - start_time,
    )


def list_set_warnings(folders: Sequence[Path], may_be_half: bool) -> tuple[str, ...]:
    """Returns warnings about images that both sets hold, and a missing evaluation set.

    Args:
        folders: of one set, or of train and eval.
        may_be_half: the set may be one of two, so that a missing evaluation set is no surprise.
    """
    if len(folders) == 2:
        with closing(open_pack(folders[0])) as train, closing(open_pack(folders[1])) as evaluation:
            shared = describe_shared_images(train, evaluation)
        return (shared,) if shared else ()
    if may_be_half:
        return ()
    return (f"{NO_EVALUATION} Hold a tenth of the images out with --split 0.1, or pack others for it.",)


def is_one_of_two(source: str) -> bool:
    """Returns True if a source may be one of two sets that is packed alone: its name says so, or it is an address."""
    return is_url(source) or Path(source).stem.lower() in ("train", "training", *EVAL_NAMES)


def format_skipped(bad_images: Sequence[tuple[str, str]]) -> bytes:
    """Returns the content of skipped.txt: a line for each bad image."""
    return "".join(f"{name}\t{reason}\n" for name, reason in bad_images).encode()


def build_encoder(
    mode: PackMode, transform: Transform | None, orient: bool, sources: Sequence[PackSource]
) -> tuple[ImageEncoder, tuple[str, ...]]:
    """Builds the encoder of a mode.

    Returns:
        the encoder, and a sentence for the user if the native core that the mode needs is missing.

    Raises:
        UsageError: `orient` is set, and the mode stores files unchanged.
    """
    is_lossless = mode.kind in ("keep", "seekable")
    # Turning needs new pixels, which lossless modes do not write.
    if orient and is_lossless and not transform:
        what = f"mode {mode} keeps the files unchanged, so they cannot be turned"
        raise UsageError(what, fix="Leave --orient out, or choose a mode such as quality=95 or resize=256,quality=90.")
    notes: tuple[str, ...] = ()
    if mode.kind in ("seekable", "encode") and not native.is_available():
        notes = ("JPEGs were not made seekable, which needs the native core.",)
    with use_strict_pillow():
        # Raw pixels need their number of channels before the first shard is written.
        is_gray = mode.kind == "raw" and all(map(_are_all_gray, sources))
    encoder = ImageEncoder(
        mode=PackMode(kind="keep") if notes and is_lossless else mode,
        channels=1 if is_gray else 3,
        make_seekable=native.make_seekable if mode.kind in ("seekable", "encode") and not notes else None,
        transform=transform,
        orient=orient,
    )
    return encoder, notes


def _describe_pixel_storage(requested_mode: PackMode | None, encoder: ImageEncoder) -> tuple[str, ...]:
    """Returns a sentence if the raw pixels of a source are stored in another way than the mode says."""
    if encoder.transform or encoder.mode.kind == "encode":
        return ()
    if encoder.mode.kind != "raw":
        return ("The source's pixels are stored as PNG, which is lossless.",)
    if requested_mode is not None and requested_mode.kind != "raw":
        return (f"Mode {requested_mode} is for image files: the source's pixels are stored unchanged, in mode raw.",)
    return ()


def _import_transform(path: str) -> Transform:
    # Relative to the current folder, as a user types it.
    function = import_user_object(path, base=Path.cwd(), what="--transform")
    if not callable(function):
        raise UsageError(
            f"{path!r} is not a function", where="--transform", fix="Name a function of (image, label, name)."
        )
    transform: Transform = function
    return transform


def _get_transform_name(function: Transform | None) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}" if function else ""


def _are_all_gray(source: PackSource) -> bool:
    """Returns True if all images are gray by their headers; stops at the first one that is not."""
    if source.images.gray is not None:
        return source.images.gray
    for sample in range(len(source)):
        try:
            with open_header(source.images.read(sample)) as image:
                if image.mode not in GRAY_MODES:
                    return False
        except Exception:
            # Bad images are reported by the pack.
            continue
    return True


def _choose_format_and_mode(
    format: str | None, mode: PackMode | None, has_raw_pixels: bool, has_transform: bool
) -> tuple[str, PackMode]:
    """Returns format and mode, with defaults for those that are None. Raises UsageError if they do not match."""
    if format is not None and format not in WRITERS:
        raise UsageError(f"{format!r} is not a format that can be written", fix=suggest_nearest(format, WRITERS))
    # Pixels have no file to keep: lossless modes store them raw.
    is_lossless = mode is None or mode.kind in ("keep", "seekable")
    if format is None:
        format = "raw" if (has_raw_pixels and is_lossless) or (mode and mode.kind == "raw") else "recordio"
    if mode is None or (format == "raw" and has_raw_pixels and is_lossless):
        mode = PackMode(kind="raw" if format == "raw" else "keep" if has_raw_pixels else "seekable")
    # Pixels become PNG in this mode, which has no seekable form.
    if mode.kind == "seekable" and has_raw_pixels and not has_transform:
        mode = PackMode(kind="keep")
    if (format == "raw") != (mode.kind == "raw"):
        fix = "Choose --mode raw or raw,resize=N." if format == "raw" else "Choose --format raw, or another mode."
        raise UsageError(f"format {format} does not hold images in mode {mode}", fix=fix)
    return format, mode


def _report_progress(progress: PackProgress | None, num_before: int, total: int, num_done: int) -> None:
    if progress:
        progress(num_before + num_done, total)


def _check_numbers(split: float, threads: int | None, shard_bytes: int) -> None:
    if not 0 <= split < 1:
        raise UsageError(
            f"a split of {split:g} is not a share of the images", fix="Choose 0 <= split < 1, such as 0.1."
        )
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads cannot pack anything", fix="Choose at least 1.")
    if shard_bytes < 1:
        raise UsageError(f"a shard cannot have {shard_bytes} bytes", fix="Choose some 100 MB or more.")


def _build_bad_files_error(bad_images: list[tuple[str, str]], total: int, source_name: str) -> DataError:
    # Twenty names show the pattern; skipped.txt has all of them with --skip-bad.
    lines = [f"  {name}: {reason}" for name, reason in bad_images[:_MAX_LISTED_FILES]]
    if len(bad_images) > _MAX_LISTED_FILES:
        lines.append(f"  and {len(bad_images) - _MAX_LISTED_FILES:,} more")
    what, them = ("is not a readable image", "it") if len(bad_images) == 1 else ("are not readable images", "them")
    return DataError(
        f"{len(bad_images):,} of {total:,} file{'s'[: total > 1]} {what}",
        where=source_name,
        fix="\n".join([f"Repair or remove {them}, or skip with --skip-bad:", *lines]),
    )


def _check_not_nested(src: Path, dst: Path) -> None:
    # The next pack of the source would take the folder for a class.
    if src.is_dir() and dst.is_relative_to(src):
        what = "the destination is inside the source, so the next pack would take it for a class"
        raise UsageError(what, where=str(dst), fix=f"Choose a destination outside {src}.")
    if src.is_relative_to(dst):
        raise UsageError("the source is inside the destination", where=str(dst), fix="Choose another destination.")


def check_target(dst: Path, overwrite: bool) -> None:
    """Raises UsageError if something is at `dst` that must not be replaced."""
    if not dst.exists() or (dst.is_dir() and not any(dst.iterdir())):
        return
    if not dst.is_dir() or not any((dst / name / COLUMNS_FILE).is_file() for name in ("", "train")):
        raise UsageError(
            "the destination exists and is not a packed data set", where=str(dst), fix="Choose another destination."
        )
    if not overwrite:
        raise UsageError(
            "this exists", where=str(dst), fix="Choose another destination, or replace it with --overwrite."
        )


def _check_part_target(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not overwrite:
        fix = "Pack another part, join them with --join, or replace this one with --overwrite."
        raise UsageError("this part is packed already", where=str(folder), fix=fix)
