"""Sweeps: what trials save that share their input, what halving saves, ensembles, and a recurrent network.

share_gain_k4, share_gain_k8   CPU seconds of 4 and 8 trials with a Loader each, over those of trials that share one:
                               photographs cropped to 64 pixels, a small network (bench/_sweep/sharing.py)
share_predicted                k (d + s) / (d + k s) over the measured gain of 4; decoding d and step s measured alone
feeder_gain                    core seconds of two processes of two trials that decode for themselves, over those of two
                               that read from a feeder, without the starts of processes (bench/_sweep/feeding.py)
halving_vs_random              error that `headway sweep --method halving` finds with 8 full trainings, over that of
                               random search with 24, on digits; the winners are trained again with three new seeds
                               (bench/_sweep/halving.py)
coordinator_cpu_share          CPU seconds of the coordinating process over those of 40 trials on digits, a quarter of a
                               second each (bench/_sweep/coordinator.py)
kills_survived                 share of 20 kills at random moments after which a sweep, continued, ends with the same
                               decisions and weights, bit for bit (bench/_sweep/kills.py)
lr_proposal, lr_confirmed      NLL of the learning rate that `headway sweep --lr` finds over that of the best of 16
                               (bench/_sweep/range_test.py); with `_share`, its cost over the grid's
sweep_vs_optuna                epochs of all trials per core second of `headway sweep`, over those of Optuna with a
                               PyTorch loop; JPEG files, equal core seconds (bench/_sweep/optuna_race.py); with
                               `_accuracy`, the points that the best network is better on test images
makespan_error                 core seconds of a sweep as predicted before it, mean error over three sweeps that were
                               not run before (bench/_sweep/makespan.py)
lr_cifar_share, lr_cifar_cost  accuracy and steps of `--lr` over those of a grid of 16 rates: LARS, LAMB and Muon on
                               CIFAR-10 (bench/_sweep/rates_cifar.py)
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
from pathlib import Path

from bench._common import Claim, Part, add_only, parser, run_parts, table
from bench._family import run_bench
from bench._sweep.coordinator import compare_coordinator
from bench._sweep.ensemble import measure
from bench._sweep.feeding import compare_feeding
from bench._sweep.fuse import compare_fusing
from bench._sweep.halving import compare_halving
from bench._sweep.kills import compare_kills
from bench._sweep.makespan import compare_predictions
from bench._sweep.optuna_race import compare_optuna
from bench._sweep.range_test import measure as measure_rates
from bench._sweep.rates_cifar import compare_cifar_rates
from bench._sweep.recurrent import compare_optimizers
from bench._sweep.sharing import compare_loaders


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
    "feed": compare_feeding,
    "fuse": compare_fusing,
    "halving": compare_halving,
    "coordinator": compare_coordinator,
    "kills": compare_kills,
    "optuna": compare_optuna,
    "makespan": compare_predictions,
    "lr": compare_rates,
    "lr_cifar": compare_cifar_rates,
    "ensemble": compare_ensembles,
    "recurrent": compare_optimizers,
}


def main() -> None:
    asked = parser(__doc__ or "")
    add_only(asked, PARTS)
    asked.add_argument("--minutes", type=float, metavar="M", help="begin no kept run or sweep after so long")
    asked.add_argument("--seed", type=int, metavar="N", help="of the kills; by default another one each time")
    options = asked.parse_args()
    # Tests of the lab, of the range test and of kills do as much as these would shortly.
    left_out = ("kills", "lr", "lr_cifar", "recurrent") if options.quick else ()
    run_parts(PARTS, options, [name for name in PARTS if name not in left_out])


if __name__ == "__main__":
    run_bench(main)
