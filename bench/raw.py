"""Input from raw pixels of CIFAR's size (50,000 x 32 x 32 x 3), in memory: flip and translate by up to 2 pixels.

raw_vs_ffcv              images/s of Headway's Loader over FFCV's, two threads each, each at its better batch
raw_vs_numpy_take        over a bare numpy.take of as many images into a buffer: no order, flip, move, labels or threads
order_keys_us_per_sample cost of the numbers of a batch: Order (which samples) and Keys (their random words), at the
                         better of these batches

Each arm is a process of its own. They take turns, and the others are stopped meanwhile. Ratios are computed within a
round; a claim is the median over rounds. FFCV's epoch is made of repetitions, since it starts each with an empty queue.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

import headway
from bench._arms import Comparison, ours, peer
from bench._common import Claim, arguments, median, report
from bench._family import run_bench

SAMPLES, SIDE, TRANSLATE, THREADS = 50_000, 32, 2, 2
BATCHES = (512, 1024)


def start(arms: Comparison, folder: Path, batches: Sequence[int]) -> None:
    """Writes the pixels in each form and starts every arm."""
    pixels, pack = folder / "pixels.npy", folder / "packed"
    np.save(pixels, np.random.default_rng(1).integers(0, 256, (SAMPLES, SIDE, SIDE, 3), np.uint8))
    np.save(folder / "pixels.labels.npy", np.arange(SAMPLES) % 10)
    headway.pack(pixels, pack, mode="raw")
    common = {"pixels": str(pixels), "pack": str(pack), "folder": str(folder), "threads": THREADS, "kernel": "copy"}
    for batch in batches:
        how = {"flip": True, "translate": TRANSLATE}
        arms.add(f"Headway, {batch}", ours("headway", {**common, "batch": batch, "how": how}))
        arms.add(f"FFCV, {batch}", peer("ffcv", {**common, "batch": batch, "translate": TRANSLATE}))
        arms.add(f"numpy.take, {batch}", ours("take", {**common, "batch": batch}))


def numbers_us(batch: int, rounds: int) -> list[float]:
    """us a sample of Order and Keys, in each round."""
    order, times = headway.Order(SAMPLES, seed=1), []
    for _ in range(rounds):
        began, repeats = perf_counter(), 200
        for step in range(repeats):
            epochs, samples = order(np.arange(step * batch, (step + 1) * batch))
            headway.make_keys(order.seed, epochs, samples)
        times.append((perf_counter() - began) / repeats / batch * 1e6)
    return times


def main() -> None:
    options = arguments(__doc__ or "")
    rounds, seconds = (2, 0.3) if options.quick else (9, 2.0)
    how = f"median of {rounds} rounds of {seconds:g} s"
    claims, batches = [], BATCHES[-1:] if options.quick else BATCHES
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name, Comparison(Path(name)) as arms:
        start(arms, Path(name), batches)
        arms.run(rounds, seconds)
        mine = arms.fastest([f"Headway, {batch}" for batch in batches])
        for claim, peers in (("raw_vs_ffcv", "FFCV"), ("raw_vs_numpy_take", "numpy.take")):
            other = arms.fastest([f"{peers}, {batch}" for batch in batches])
            ratio = arms.ratio(mine, other) if mine and other else None
            if ratio:
                middle, low, high = ratio
                claims.append(Claim(claim, middle, "", f"{mine} over {other}; {how}; 95 % [{low:.3f}, {high:.3f}]"))
        rows = arms.rows()
    times = {batch: median(numbers_us(batch, 5 * rounds)) for batch in batches}
    batch = min(times, key=lambda size: times[size][0])
    shown = "; ".join(
        f"batch {size}: {middle:.3f} [{low:.3f}, {high:.3f}]" for size, (middle, low, high) in times.items()
    )
    claims.append(Claim("order_keys_us_per_sample", times[batch][0], "us", f"one thread; 95 % of {shown}"))
    report(claims, options, rows)


if __name__ == "__main__":
    run_bench(main)
