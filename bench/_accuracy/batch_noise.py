"""The critical batch by the gradient noise scale of one run, beside that of the curve of steps against the batch.

McCandlish et al. 2018 (arXiv 1812.06162): steps(B) = least * (1 + critical / B), and the noise scale, measured in a run
with any batch, predicts `critical`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping

from bench._accuracy import batch_curve
from bench._accuracy.batch_arms import SEEDS
from bench._accuracy.batch_curve import SAMPLES, Curve, Job
from bench._accuracy.batch_worker import run_recipe
from bench._accuracy.results import Results, commit
from bench._common import Claim, report
from headway.plan.convergence import ConvergencePoint, fit_epochs

BATCH, LR = 256, 0.1
"""Those of the runs that measure the noise scale: the curve's own, until they come to its target."""
EVERY_STEPS = 10


def fit_critical_batch(steps: Mapping[int, float]) -> tuple[float, float]:
    """Returns the (critical batch, least steps) of the planner's law of epochs by batch that fits steps by batch."""
    law = fit_epochs([ConvergencePoint(batch, found * batch / SAMPLES) for batch, found in steps.items()])
    return law.critical, law.least * SAMPLES / law.critical


def key(seed: int) -> dict[str, object]:
    """Returns what a kept run is found by."""
    return {"bench": "noise", "batch": BATCH, "lr": LR, "seed": seed, "settings": batch_curve.settings(BATCH)}


def run(results: Results, packed: str, options: argparse.Namespace) -> None:
    """Does what is missing, one run at a time, and tells what is there."""
    for seed in SEEDS:
        if results.where(**key(seed)) or options.minutes == 0:
            continue
        tree = batch_curve.recipe(Job(BATCH, LR, seed), packed)
        tree |= {"observe": {"noise_scale": True}, "log_every_steps": EVERY_STEPS}
        found, records = run_recipe(tree)
        names = ("noise_scale", "noise_scale_low", "noise_scale_high")
        last = next((one for one in reversed(records) if names[0] in one), None)
        if last is None:
            print(f"seed {seed}: it ended before its first measurement, and is not kept", file=sys.stderr)
            continue
        results.add({**key(seed), "commit": commit(), **found, **{name: last[name] for name in names}})
        print(f"seed {seed}: noise scale {last[names[0]]:.0f} in {found['seconds']:.0f} s", file=sys.stderr)
    kept = [one for seed in SEEDS for one in results.where(**key(seed))[:1]]
    points = {batch: steps for batch, steps, _ in Curve(results.all()).points()}
    claims = []
    if len(kept) == len(SEEDS):
        scales = [one["noise_scale"] for one in kept]
        spread = ", ".join(f"{one:.0f}" for one in scales)
        how = f"mean of {len(SEEDS)} seeds ({spread}), SGD at {BATCH}, when {batch_curve.TARGET:.0%} are right"
        claims.append(Claim("critical_batch_noise", statistics.fmean(scales), "samples", how))
    if len(points) > 2:
        critical, least = fit_critical_batch(points)
        how = f"{least:.0f} (1 + critical / batch) steps, the nearest to the curve of SGD"
        claims.append(Claim("critical_batch_curve", critical, "samples", how))
    report(claims, options)
