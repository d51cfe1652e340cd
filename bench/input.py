"""Input from JPEG files, RandomResizedCrop(224) + flip: Headway's Loader and its peers side by side, two threads each.

originals_vs_best_peer, _vs_ffcv, _vs_dali   images/s of Headway over theirs. All read the same 250 ImageNet files:
                                             Headway and FFCV from a pack with their bytes or their lossless seekable
                                             form, the others as loose files; the page cache is warm.
originals_vs_dali_gpu   over DALI that decodes and resizes on the GPU, if there is one, and leaves its batches there
originals_vs_limit   over plain libjpeg-turbo (bench/limit.cpp): the same spliced bytes and boxes, decoded by as many
                     threads, without resizing and batching
pin_gain             images/s of Headway whose decoding threads are bound to a core each (`pin`), over those without:
                     what OMP_PROC_BIND=true does for threads of OpenMP
pack256_vs_ffcv      images/s over FFCV's, for files whose shorter side was reduced to 256 at JPEG quality 90
train_vs_loader      images/s of `headway train` with a network that does nothing, over those of the Loader. The network
                     gets bytes (augment.normalise: false); another row has the run that normalises them on the CPU,
                     whose cores the decoder needs too. Torch has one thread (OMP_NUM_THREADS=1): an OpenMP barrier on
                     cores that decode takes milliseconds.

--arms NAME... starts these alone, by their names in the table.

Each arm is a process of its own. They take turns, and the others are stopped meanwhile. Ratios are computed within a
round; a claim is the median over rounds. A core second is a second of processor time of all threads of an arm.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

import headway
from bench import _limit, _reading, _stages
from bench._arms import ArmError, Comparison, ours, peer
from bench._common import Claim, parser, report, table
from bench._data import images
from bench._family import run_bench

THREADS, BATCH, SIDE = 2, 128, 224
QUICK_IMAGES, QUICK_BATCH = 40, 16
HOW = {"size": SIDE, "crop": "random", "flip": True}
KERNEL = "antialiased triangle, Pillow's"
LIMIT_SAMPLES = 1000
ONE = {"OMP_NUM_THREADS": "1"}
PEERS = ("OpenCV in DataLoader", "FFCV", "DALI", "Pillow in DataLoader")


def start(arms: Comparison, source: Path, folder: Path, batch: int, quick: bool) -> None:
    """Packs the images and starts every arm; a quick run leaves out what only rows are made of,
    and smaller files, whose arms run the same code."""
    originals, small = folder / "originals", folder / "small"
    headway.pack(source, originals, mode="seekable")
    common = {"images": str(source), "folder": str(folder), "batch": batch, "threads": THREADS, "kernel": KERNEL}
    arms.add("Headway", ours("headway", {**common, "pack": str(originals), "how": HOW}))
    arms.add("OpenCV in DataLoader", peer("torch_loader", {**common, "decoder": "opencv"}))
    arms.add("FFCV", peer("ffcv", common))
    arms.add("DALI", peer("dali", common))
    if torch.cuda.is_available():
        arms.add("DALI, GPU decodes", peer("dali", {**common, "gpu": True}))
    if not quick:
        headway.pack(source, small, mode="resize=256,quality=90")
        arms.add("Headway, 256", ours("headway", {**common, "pack": str(small), "how": HOW}))
        arms.add("FFCV, 256", peer("ffcv", {**common, "resize": 256, "quality": 90}))
    arms.add("Headway train", ours("train", {**common, "pack": str(originals), "normalise": False}), ONE)
    add_limit(arms, originals, folder, QUICK_IMAGES if quick else LIMIT_SAMPLES)
    if not quick:
        normalising = ours("train", {**common, "pack": str(originals), "normalise": True})
        arms.add("Headway train, normalising", normalising, ONE)
        arms.add("Pillow in DataLoader", peer("torch_loader", {**common, "decoder": "pillow"}))
        slow = {**common, "pack": str(originals), "how": {**HOW, "backend": "pillow"}, "kernel": "Pillow itself"}
        arms.add("Headway, Pillow decodes", ours("headway", slow))
        pinned = {**common, "pack": str(originals), "how": {**HOW, "pin": True}}
        arms.add("Headway, pinned", ours("headway", pinned))
        for isa in ("portable", "avx2", "avx512"):
            command = ours("headway", {**common, "pack": str(originals), "how": HOW})
            arms.add(f"Headway, {isa}", command, {"HEADWAY_ISA": isa})


def add_limit(arms: Comparison, pack: Path, folder: Path, samples: int) -> None:
    try:
        program = _limit.build(folder)
    except ArmError as reason:
        arms.leave_out("limit", str(reason))
        return
    train = headway.open(pack)
    _limit.write_records(train, headway.Order(len(train), seed=1), samples, SIDE, folder / "spliced")
    train.close()
    arms.add("limit", [program, folder / "spliced", str(THREADS)])


def claims(arms: Comparison, how: str) -> list[Claim]:
    best = arms.fastest(PEERS)
    asked = [("originals_vs_best_peer", "Headway", best)] if best else []
    asked += [
        ("originals_vs_ffcv", "Headway", "FFCV"),
        ("originals_vs_dali", "Headway", "DALI"),
        ("originals_vs_dali_gpu", "Headway", "DALI, GPU decodes"),
        ("originals_vs_limit", "Headway", "limit"),
        ("pin_gain", "Headway, pinned", "Headway"),
        ("pack256_vs_ffcv", "Headway, 256", "FFCV, 256"),
        ("train_vs_loader", "Headway train", "Headway"),
    ]
    made = []
    for name, mine, other in asked:
        ratio = arms.ratio(mine, other)
        if ratio is not None:
            made.append(Claim(name, ratio[0], "", f"{mine} over {other}; {how}; 95 % [{ratio[1]:.3f}, {ratio[2]:.3f}]"))
    return made


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--arms", nargs="+", metavar="NAME", help="these arms alone, by their names in the table")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        measure(Path(name), options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    source = images(folder / "images", QUICK_IMAGES if options.quick else None)
    if source is None:
        report([], options)
        return
    rounds, seconds, batch = (2, 0.2, QUICK_BATCH) if options.quick else (7, 4.0, BATCH)
    with Comparison(folder, options.arms) as arms:
        start(arms, source, folder, batch, options.quick)
        if unknown := set(options.arms or ()) - arms.names:
            sys.exit(f"No arm is named {sorted(unknown)}. The names are {sorted(arms.names)}.")
        arms.run(rounds, seconds)
        how = f"median of {rounds} rounds of {seconds:g} s"
        made, shown, facts = claims(arms, how), arms.rows(), arms.facts()
    if options.arms:
        report(made, options, shown)
        return
    table(_reading.rows(source, folder / "reading", rounds, seconds / 4))
    table(_stages.rows(folder / "originals", batch, THREADS, HOW, 10 * rounds))
    table([("arm", "fact", "value"), *facts])
    report(made, options, shown)


if __name__ == "__main__":
    run_bench(main)
