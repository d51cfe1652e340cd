"""Sweeps: what trials save that share their input, what halving saves, ensembles, and a recurrent network.

share_gain_k4, share_gain_k8   CPU seconds of 4 and 8 trials with a Loader each, over those of trials that share one:
                               photographs cropped to 64 pixels, a small network (bench/_sweep/sharing.py)
share_predicted                k (d + s) / (d + k s) over the measured gain of 4; decoding d and step s measured alone
halving_vs_random              error that `headway sweep --method halving` finds with 8 full trainings, over that of
                               random search with 24, on digits; the winners are trained again with three new seeds
                               (bench/_sweep/halving.py)
coordinator_cpu_share          CPU seconds of the coordinating process over those of the trials, in the same sweeps
lr_proposal, lr_confirmed      NLL of the learning rate that `headway sweep --lr` finds over that of the best of 16
                               (bench/_sweep/range_test.py); with `_share`, its cost over the grid's
fuse_gain_k8                   CPU seconds of whole steps of 8 trials in turns over those of fused ones: two
                               convolutions of 8 pixels, batch 64 (bench/_sweep/fuse.py)
fuse_auto_worst                the same with the measurement of `--fuse auto`: the worst of five networks
fuse_difference                largest relative difference of weights after 100 steps, fused and in turns
ensemble_nll_k4                NLL of the mean of four networks over that of one (bench/_sweep/ensemble.py)
recurrent_..., conv_...        LARS, LAMB and large batches on a recurrent network (bench/_sweep/recurrent.py)

CPU seconds are those of all threads of a process, so other programs change them less than wall time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench._common import Claim, parser, report, table
from bench._family import run_bench
from bench._sweep.ensemble import measure
from bench._sweep.fuse import compare_fusing
from bench._sweep.halving import compare_halving
from bench._sweep.range_test import measure as measure_rates
from bench._sweep.recurrent import compare_optimizers
from bench._sweep.sharing import compare_loaders

Part = Callable[[Path, argparse.Namespace], list[Claim]]
"""A part of the bench: measures in an empty folder, prints its own tables, and returns its claims."""


def compare_ensembles(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Ensembles of 1 to 8 networks."""
    claims, rows = measure(folder, quick=options.quick, tell=lambda text: print(text, file=sys.stderr))
    table(rows)
    return claims


def compare_rates(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Learning rates that are found, against a grid."""
    claims, rows = measure_rates(folder, quick=options.quick, tell=lambda text: print(text, file=sys.stderr))
    table(rows)
    return claims


PARTS: dict[str, Part] = {
    "share": compare_loaders,
    "fuse": compare_fusing,
    "halving": compare_halving,
    "lr": compare_rates,
    "ensemble": compare_ensembles,
    "recurrent": compare_optimizers,
}


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--only", choices=PARTS, metavar="PART", help=f"one part: {', '.join(PARTS)}")
    asked.add_argument("--minutes", type=float, metavar="M", help="begin no kept run or sweep after so long")
    options = asked.parse_args()
    claims = []
    # Tests of the lab and of the range test do as much as these would shortly.
    usual = [name for name in PARTS if not (options.quick and name in ("lr", "recurrent"))]
    for name in [options.only] if options.only else usual:
        part = PARTS[name]
        with tempfile.TemporaryDirectory(prefix=f"headway-bench-{name}-") as folder:
            claims += part(Path(folder), options)
    report(claims, options)


if __name__ == "__main__":
    run_bench(main)
