"""What users do every day, each beside what they do without Headway.

own_transform_vs_loader          images/s of a user's data set (Pillow decodes; RandomResizedCrop, flip, colour jitter
                                 and normalisation as torchvision does them on PIL images) through headway.Loader with
                                 two worker processes, over the same data set through PyTorch's DataLoader with two
native_then_transform_vs_loader  images/s of a pack of the same files: native crop and flip, then one Python transform
                                 of at most 0.3 ms an image in two workers, over DataLoader with two workers in which
                                 Pillow decodes, crops and flips, followed by the same transform
finetune_vs_scratch_points       points of accuracy that fine-tuning gains on 360 images of two classes of CIFAR-10,
                                 from weights trained on the other eight, over training from scratch; three seeds
                                 (bench/_everyday/finetune.py)

Each arm is a process of its own; they take turns, and all others are stopped meanwhile. A ratio is taken within each
round; the claim is the median over rounds. Nothing trains there: the loops only take batches. The page cache is warm.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import headway
from bench._arms import Comparison, run_module
from bench._common import Claim, arguments, report, table
from bench._data import images
from bench._everyday.finetune import compare_finetuning
from bench._family import run_bench

WORKERS, BATCH = 2, 64
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ARMS = ("own", "own, torch", "native", "cheap, torch")
RATIOS = (
    ("own_transform_vs_loader", "own", "own, torch"),
    ("native_then_transform_vs_loader", "native", "cheap, torch"),
)

Section = Callable[[Path, argparse.Namespace], list[Claim]]
"""A part of the bench: measures in a folder, prints its own tables, and returns its claims."""


def compare_loaders(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Own data sets and transforms, against DataLoader."""
    source = images(folder / "images")
    if source is None:
        return []
    rounds, seconds = (2, 0.5) if options.quick else (7, 5.0)
    headway.pack(source, folder / "pack", mode="seekable")
    asked = {"images": str(source), "pack": str(folder / "pack"), "batch": BATCH, "workers": WORKERS}
    with Comparison(folder) as arms:
        for name in ARMS:
            arms.add(name, run_module("bench._everyday.loaders", {**asked, "arm": name}), ONE_THREAD)
        arms.run(rounds, seconds)
        table(arms.rows())
        table([("arm", "fact", "value"), *arms.facts()])
        how = f"median of {rounds} rounds of {seconds:g} s, {WORKERS} workers, batches of {BATCH}"
        return claim_ratios(arms, RATIOS, how)


def claim_ratios(arms: Comparison, ratios: Sequence[tuple[str, str, str]], how: str) -> list[Claim]:
    made = []
    for name, mine, other in ratios:
        if (ratio := arms.ratio(mine, other)) is not None:
            made.append(Claim(name, ratio[0], "", f"{mine} over {other}; {how}; 95 % [{ratio[1]:.3f}, {ratio[2]:.3f}]"))
    return made


SECTIONS: tuple[Section, ...] = (compare_loaders, compare_finetuning)


def main() -> None:
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        claims = [claim for section in SECTIONS for claim in section(Path(name), options)]
    report(claims, options)


if __name__ == "__main__":
    run_bench(main)
