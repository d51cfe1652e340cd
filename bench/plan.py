"""The planner's predictions, beside published measurements and those of this machine.

Nothing is fitted to the predicted numbers: devices, links and latencies are from the catalog (src/headway/plan/catalog,
each with its source), with one rule for each kind of link. Likely losses are fitted to one half of the publications
when the other half is predicted (bench/_plan/fit.py). The step time of a device comes from the smallest runs of the
same series; for several nodes, from that on one whole node too.

plan_median_error    |predicted - published| / published images/s or efficiency, of the first rows on several nodes, or
                     with less than 95 % of linear scaling: the median
plan_p90_error       the same: the ninetieth percentile
plan_vs_linear       plan_median_error over that of linear scaling, from the largest calibrating run, on the same rows
plan_new_...         the same three of rows that came later
plan_new_thin_median_error  of those, the rows on several nodes with at most 100 Gbit/s each
plan_band_coverage   share of the later rows that lie in the predicted band of 90 %
epochs_worst_error   epochs to the target by batch: each point between others, predicted by a fit without it
ttt_median_error     minutes to the target: predicted images/s, and epochs by the fit
allreduce_median_error  seconds of published all-reduces: latency and bandwidth from every second size, others predicted
allreduce_local_error   the same on this machine: four hosts (network namespaces, 200 Mbit/s), a process each
local_error          images/s of four processes on two hosts at 200 Mbit/s, planned from the doctor's profiles of one
                     and of two processes on one host
simulate_seconds     50 steps of 4,096 ranks, rank by rank and bucket by bucket, of ResNet-50 on DGX-1: processor time
plan_seconds         `headway plan WORKLOAD.json --cluster dgx-1` in a new process that has no torch: wall time

The tables contain every row, also the bad ones. Rows with hosts need root and iproute2.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from bench._common import Claim, arguments, median, report, table
from bench._family import run_bench
from bench._hosts import why_not
from bench._plan import local
from bench._plan.fit import fit_losses, folds
from bench._plan.links import measured
from bench._plan.scaling import Predicted, Row, cluster_of, predicted, rows
from bench._plan.sweeps import Sweep, sweeps
from bench._plan.times import leave_one_out, times
from headway.plan.cluster import load_clusters
from headway.plan.compute import estimate_from_data_sheet
from headway.plan.convergence import load_official_points
from headway.plan.job import build_job
from headway.plan.losses import build_priors
from headway.plan.scaling import predict_scaling
from headway.plan.step_simulation import simulate_prediction

THIN_GBIT_S = 100
SIMULATED = 4096
"""Ranks."""


def main() -> None:
    options = arguments(__doc__ or "")
    claims = [*scaled(), left_out(), timed(), swept()]
    claims.append(simulated(3 if options.quick else 5))
    claims.append(Claim("plan_seconds", *answers_in(3 if options.quick else 9)))
    if (reason := why_not()) is not None:
        print(f"No hosts here: {reason}.")
    elif not options.quick:
        claims += here()
    report(claims, options)


def scaled() -> list[Claim]:
    """Published runs on many devices: each half of the publications, by losses fitted to the other."""
    halves = folds(rows())
    found = []
    for half, other in (halves, halves[::-1]):
        priors = build_priors(fit_losses(other))
        found += [predicted(row, priors) for row in half if row.role == "predict"]
    order = {row: at for at, row in enumerate(rows())}
    found.sort(key=lambda one: order[one.row])
    table([SCALING, *map(of_scaling, found)])
    scored = [one for one in found if one.scored]
    first, second = ([one for one in scored if one.row.set == name] for name in ("first", "second"))
    return [
        *claims_of("plan", first),
        *claims_of("plan_new", second),
        off("plan_new_thin_median_error", [one for one in second if is_thin(one.row)], 50),
        Claim("plan_band_coverage", float(np.mean([one.in_band for one in second])), "", f"of {len(second)} rows"),
    ]


def claims_of(name: str, scored: Sequence[Predicted]) -> list[Claim]:
    """Errors of one set of rows."""
    linear = float(np.median(np.abs([one.linear_error for one in scored])))
    middle = off(f"{name}_median_error", scored, 50)
    how = f"{middle.how}; linear scaling is {linear:.3f} off"
    ratio = Claim(f"{name}_vs_linear", middle.value / linear, "", how)
    return [middle, off(f"{name}_p90_error", scored, 90), ratio]


def off(name: str, scored: Sequence[Predicted], percentile: float) -> Claim:
    """A percentile of |predicted - published| / published."""
    errors = np.abs([one.error for one in scored])
    return Claim(name, float(np.percentile(errors, percentile)), "", f"of {len(scored)} published rows")


def is_thin(row: Row) -> bool:
    """Several nodes of which each has one port of 100 Gbit/s at most."""
    between = cluster_of(row).between
    return row.nodes > 1 and between is not None and between.ports * between.gbit_s <= THIN_GBIT_S


def left_out() -> Claim:
    """Epochs by batch."""
    left = leave_one_out(load_official_points())
    heading = ("batch", "epochs", "predicted without it", "off")
    cells = [
        (f"{one.batch:,.0f}", f"{one.epochs:g}", f"{one.epochs * (1 + off):.1f}", f"{off:+.1%}") for one, off in left
    ]
    table([heading, *cells])
    worst = max(abs(off) for _, off in left)
    return Claim("epochs_worst_error", worst, "", f"of {len(left)} official points, each left out")


def timed() -> Claim:
    """Minutes to the target."""
    found = times()
    heading = ("series", "devices", "batch", "epochs", "minutes", "predicted", "band", "off")
    cells = [
        (one.series, f"{one.gpus:,}", f"{one.batch:,}", f"{one.epochs:.1f}", f"{one.minutes:g}", f"{one.planned:.3f}",
         f"{one.low:.3f} to {one.high:.3f}", f"{one.error:+.1%}")
        for one in found
    ]  # fmt: skip
    table([heading, *cells])
    off = float(np.median(np.abs([one.error for one in found])))
    inside = sum(one.low <= one.minutes <= one.high for one in found)
    return Claim(
        "ttt_median_error", off, "", f"of {len(found)} published runs; {inside} of them lie in the band of 90 %"
    )


def swept() -> Claim:
    """All-reduces by size."""
    found = sweeps()
    of_sweeps(found)
    every = np.abs([error for one in found for error in one.errors])
    how = f"of {len(every)} sizes in {len(found)} published sweeps"
    return Claim("allreduce_median_error", float(np.median(every)), "", how)


def of_sweeps(found: Sequence[Sweep]) -> None:
    """Prints them."""
    cells = [("all-reduce", "devices", "latency", "bandwidth", "sizes", "median off", "worst")]
    for one in found:
        line, errors = one.line, np.abs(one.errors)
        bandwidth = f"{1e-6 / line.s_per_byte:,.0f} MB/s" if line.s_per_byte else "-"
        cells.append(
            (f"{one.system}: {one.hardware}", f"{one.gpus}", f"{line.latency_s * 1e6:,.0f} us", bandwidth,
             f"{len(errors)}", f"{np.median(errors):.1%}", f"{errors.max():.1%}")
        )  # fmt: skip
    table(cells)


def here() -> list[Claim]:
    """What this machine measures."""
    claims = []
    for hosts, per_host in ((4, 1), (2, 4)):
        found = measured(hosts, per_host)
        of_sweeps(found.sweeps)
        if per_host == 1:
            off = float(np.median(np.abs(found.errors)))
            how = f"of {len(found.errors)} sizes by {len(found.sweeps)} algorithms"
            claims.append(Claim("allreduce_local_error", off, "", how))
    with tempfile.TemporaryDirectory(prefix="headway-bench-plan-") as name:
        run = local.found(Path(name))
    rates = ", ".join(f"{one:,.1f}" for one in run.measured)
    how = f"{run.planned:,.1f} planned, {rates} measured; {run.share:.0%} of a step is exposed exchange"
    if run.share < local.LEAST_SHARE:
        print(f"Less than {local.LEAST_SHARE:.0%} of a step is exchange: the local plan does not count.")
        return claims
    return [*claims, Claim("local_error", abs(run.error), "", how)]


def simulated(times: int) -> Claim:
    """The largest simulation that is promised."""
    workload, where = local.resnet50(), load_clusters()["dgx-1"]
    job = build_job(workload, estimate_from_data_sheet(workload, where.device_spec), 37.0, per_device=208.0)
    (answer,) = predict_scaling(job, where, [SIMULATED // where.devices])
    taken = []
    for seed in range(times):
        begun = process_time()
        found = simulate_prediction(job, where, answer, seed=seed)
        taken.append(process_time() - begun)
    middle, low, high = median(taken)
    off = found.step_s / answer.step.seconds - 1
    how = f"of {times} [{low:.2f}, {high:.2f}]; {len(found.seconds)} steps, {off:+.2%} from the plan's in the mean"
    return Claim("simulate_seconds", middle, "s", how)


def answers_in(times: int) -> tuple[float, str, str]:
    """(median seconds, unit, how) of a plan."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-plan-") as name:
        path = Path(name) / "resnet50.json"
        local.resnet50().write(path)
        program = (
            "import sys; sys.modules['torch'] = None; sys.argv = ['headway', 'plan', "
            f"{str(path)!r}, '--cluster', 'dgx-1']; from headway.cli.main import main; main()"
        )
        taken = []
        for _ in range(times):
            begun = perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
            taken.append(perf_counter() - begun)
    middle, low, high = median(taken)
    return middle, "s", f"of {times} [{low:.2f}, {high:.2f}]"


SCALING = (
    "series",
    "devices",
    "batch each",
    "published",
    "predicted",
    "off",
    "linear off",
    "in the band",
    "counts",
    "a step's source",
)


def of_scaling(one: Predicted) -> tuple[str, ...]:
    row = one.row
    unit = "" if row.images_s is not None else " %"
    return (
        row.series,
        f"{row.gpus:,}",
        str(row.samples or "-"),
        f"{one.published:,.0f}{unit}",
        f"{one.value:,.0f}{unit}",
        f"{one.error:+.1%}",
        f"{one.linear_error:+.1%}",
        "yes" if one.in_band else "no",
        "yes" if one.scored else "",
        one.basis,
    )


if __name__ == "__main__":
    run_bench(main)
