"""Packing 250 ImageNet files: speed in each mode and format, and the size of seekable files.

seekable_size_ratio   bytes of the shards of a seekable pack over the bytes of the files
seekable_images_s     images/s of `headway.pack` in its default mode, on all usable cores
pack_seekable_gain    its images/s over those of the code of commit 1f63696, which transcoded by libjpeg and decoded
                      each image besides; --quick measures it only where that code was built before
Each pack is timed as a whole: reading (the page cache is warm), decoding, writing, and flushing to the disk. The rows
take turns. So do the two processes of the gain, and the other one is stopped meanwhile; a ratio is of one round, and
the claim the median over rounds.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import headway
from bench._arms import ROOT, ArmError, Comparison, ours
from bench._common import Claim, arguments, median, report, table
from bench._data import images
from bench._family import run_bench
from bench._old_tree import build_old_tree
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

NOW, OLD_COMMIT = "now", "1f63696"


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


def compare_with_old(source: Path, folder: Path, rounds: int, quick: bool) -> Claim | None:
    """The gain over the older commit; None, and said, where that cannot be built."""
    with Comparison(folder) as arms:
        try:
            trees = {NOW: ROOT, OLD_COMMIT: build_old_tree(OLD_COMMIT, may_build=not quick)}
        except ArmError as reason:
            arms.leave_out(OLD_COMMIT, str(reason))
            return None
        for name, tree in trees.items():
            asked = {"tree": str(tree / "src"), "source": str(source), "target": str(folder / name), "version": name}
            arms.add(name, ours("pack", asked))
        # A pack takes longer, so a turn is one pack.
        arms.run(rounds, seconds=0.01)
        table(arms.rows())
        if (ratio := arms.ratio(NOW, OLD_COMMIT)) is None:
            return None
    gain, low, high = ratio
    how = f"median of {rounds} rounds [{low:.2f}, {high:.2f}] on {count_usable_cores()} cores"
    return Claim("pack_seekable_gain", gain, "", how)


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = 1 if options.quick else 5
    with tempfile.TemporaryDirectory() as name:
        source = images(Path(name) / "images")
        if source is None:
            return
        original_bytes = sum(path.stat().st_size for path in source.rglob("*.JPEG"))
        made = rounds_of(source, Path(name), rounds)
        gain = compare_with_old(source, Path(name), 2 if options.quick else 9, options.quick)
    cores = count_usable_cores()
    rows: list[tuple[str, ...]] = [("mode", "format", "images/s (95 %)", "MB", "of the files")]
    speeds = {row: median([packed.samples / packed.seconds for packed in packs]) for row, packs in made.items()}
    for (mode, form), packs in made.items():
        middle, low, high = speeds[mode, form]
        size = packs[0].bytes
        speed = f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]"
        rows.append((mode, str(form), speed, f"{size / 1e6:.1f}", f"{size / original_bytes:.4f}"))
    claims = []
    (seekable, *_) = made[ROWS[0]]
    if seekable.mode == "seekable":
        how = f"{seekable.samples} ImageNet files"
        claims.append(Claim("seekable_size_ratio", seekable.bytes / original_bytes, "", how))
        how = f"median of {rounds} packs on {cores} cores"
        claims.append(Claim("seekable_images_s", speeds[ROWS[0]][0], "images/s", how))
        claims += [gain] if gain else []
    else:
        print(*seekable.notes)
    report(claims, options, rows)


if __name__ == "__main__":
    run_bench(main)
