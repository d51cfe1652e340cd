"""The claims about asynchronous training."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench._common import Claim, median, table
from bench._parallel.delay import EPOCHS, PAPER, PER_CLASS, compare_rules, find_cifar
from bench._parallel.slow_worker import FAST_S, SLOW_S, measure_kill, measure_rate

# Recipe of each arm, and the number of workers whose batches make one step.
ARMS = {
    "synchronous": ("{strategy: data}", 2),
    "ahead: 0": ("{strategy: async, ahead: 0}", 1),
    "ahead: 4": ("{strategy: async, ahead: 4}", 1),
    "ahead: null": ("{strategy: async}", 1),
}
QUICK_ARMS = ("synchronous", "ahead: null")


def measure_speed(options: argparse.Namespace) -> list[Claim]:
    """Returns the claims about a slow worker, and about a killed one."""
    batches, rounds = (60, 1) if options.quick else (300, 5)
    arms = {name: ARMS[name] for name in (QUICK_ARMS if options.quick else ARMS)}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    gaps = []
    with tempfile.TemporaryDirectory() as aside:
        for number in range(rounds):
            for arm, (name, (parallel, merge)) in enumerate(arms.items()):
                rates[name].append(measure_rate(Path(aside), f"{arm}-{number}", parallel, batches, merge))
            gaps.append(measure_kill(Path(aside), f"kill-{number}"))
    table([("", "batches/s"), *((name, f"{median(values)[0]:.1f}") for name, values in rates.items())])
    claims = []
    for claim, name in (("async_slow_worker", "ahead: null"), ("async_bounded_worker", "ahead: 4")):
        if name not in arms:
            continue
        ratios = [one / other for one, other in zip(rates[name], rates["synchronous"], strict=True)]
        middle, low, high = median(ratios)
        speeds = f"{1e3 * FAST_S:.0f} and {1e3 * SLOW_S:.0f} ms for a batch"
        how = f"[{low:.2f}, {high:.2f}], {rounds} rounds of {batches} batches; {speeds}"
        claims.append(Claim(claim, middle, "", how))
    how = f"the worst of {rounds} ({', '.join(f'{gap:.3f}' for gap in gaps)}); {1e3 * FAST_S:.0f} ms for a batch"
    return [*claims, Claim("async_kill_gap", max(gaps), "s", how)]


def compare_delays(options: argparse.Namespace) -> list[Claim]:
    """Prints the accuracy of each rule beside the paper's; returns what compensation gains."""
    if (source := find_cifar()) is None:
        return []
    seeds, per_class, epochs = (1, 20, 1) if options.quick else (5, PER_CLASS, EPOCHS)
    claims = []
    for workers, arms in compare_rules(source, (4, 8), seeds, per_class, epochs).items():
        print(f"{workers} workers: accuracy in %, {seeds} seeds, 95 % intervals; the paper's test error in %")
        rows = [
            (name, f"{mean:.1f} +- {half:.1f}", f"{PAPER[workers].get(name, '')}")
            for name, (mean, half) in arms.items()
        ]
        table([("", "here", "the paper"), *rows])
        (ours, _), (plain, half), (careful, _) = (arms[name] for name in ("DC-a, strength 8", "ASGD", "ASGD, half lr"))
        how = f"DC-a {ours:.1f}, ASGD {plain:.1f} +- {half:.1f}, ASGD at half the learning rate {careful:.1f}"
        claims.append(Claim(f"async_dc_{workers}", ours - plain, "points", f"{how}; {seeds} seeds, {epochs} epochs"))
    return claims
