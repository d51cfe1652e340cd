"""Packing 250 ImageNet files: speed in each mode and format, and the size of seekable files.

seekable_size_ratio   bytes of the shards of a seekable pack over the bytes of the files
seekable_images_s     images/s of `headway.pack` in its default mode, on all usable cores
Each pack is timed as a whole: reading (the page cache is warm), decoding, writing, and flushing to the disk. The rows
take turns.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import headway
from bench._common import Claim, arguments, median, report
from bench._data import images
from bench._family import run_bench
from headway.core.cpu_count import count_usable_cores
from headway.core.errors import HeadwayError
from headway.data.pack import PackResult

ROWS: tuple[tuple[str, str | None], ...] = (
    ("seekable", "recordio"),
    ("keep", "recordio"),
    ("keep", "tar"),
    ("keep", "lmdb"),
    ("resize=256,quality=90", "recordio"),
    ("raw,resize=256", "raw"),
)


def rounds_of(source: Path, folder: Path, rounds: int) -> dict[tuple[str, str | None], list[PackResult]]:
    """What each row packed, round by round; what cannot be had here is said and left out."""
    made: dict[tuple[str, str | None], list[PackResult]] = {row: [] for row in ROWS}
    for _ in range(rounds):
        for mode, form in list(made):
            try:
                made[mode, form].append(headway.pack(source, folder / "dst", mode=mode, format=form))
            except HeadwayError as error:
                print(f"{mode}, {form}: not here ({error})")
                del made[mode, form]
            shutil.rmtree(folder / "dst", ignore_errors=True)
    return made


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = 1 if options.quick else 5
    with tempfile.TemporaryDirectory() as name:
        source = images(Path(name) / "images")
        if source is None:
            return
        original_bytes = sum(path.stat().st_size for path in source.rglob("*.JPEG"))
        made = rounds_of(source, Path(name), rounds)
    cores = count_usable_cores()
    table: list[tuple[str, ...]] = [("mode", "format", "images/s (95 %)", "MB", "of the files")]
    speeds = {row: median([packed.samples / packed.seconds for packed in packs]) for row, packs in made.items()}
    for (mode, form), packs in made.items():
        middle, low, high = speeds[mode, form]
        size = packs[0].bytes
        speed = f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]"
        table.append((mode, str(form), speed, f"{size / 1e6:.1f}", f"{size / original_bytes:.4f}"))
    claims = []
    (seekable, *_) = made[ROWS[0]]
    if seekable.mode == "seekable":
        how = f"{seekable.samples} ImageNet files"
        claims.append(Claim("seekable_size_ratio", seekable.bytes / original_bytes, "", how))
        how = f"median of {rounds} packs on {cores} cores"
        claims.append(Claim("seekable_images_s", speeds[ROWS[0]][0], "images/s", how))
    else:
        print(*seekable.notes)
    report(claims, options, table)


if __name__ == "__main__":
    run_bench(main)
