"""What the planner predicts, beside what others have published and what this machine measures.

Nothing here is fitted to what is predicted: devices, links and latencies are the catalog's (src/headway/plan/catalog,
each with its source), one rule for a kind of link; a device's step comes from the smallest runs of the same series.

plan_median_error    |predicted - published| / published images/s or efficiency, of rows on several nodes, or with less
                     than 95 % of linear scaling: the median
plan_p90_error       the same: the ninetieth percentile
plan_vs_linear       plan_median_error over that of linear scaling, on the same rows
epochs_worst_error   epochs to the target by batch: of each point between others, predicted by a fit without it
ttt_median_error     minutes to the target: predicted images/s, and epochs by the fit
allreduce_median_error  seconds of published all-reduces: latency and bandwidth from every second size, others predicted

Every row is in the tables, misses included.
"""

from __future__ import annotations

import numpy as np

from bench._common import Claim, arguments, report, table
from bench._plan.scaling import Predicted, predicted, rows
from bench._plan.sweeps import sweeps
from bench._plan.times import times
from headway.plan.convergence import left_one_out, official


def main() -> None:
    options = arguments(__doc__ or "")
    found = [predicted(row) for row in rows() if row.role == "predict"]
    table([SCALING, *map(of_scaling, found)])
    scored = [one for one in found if one.scored]
    errors = np.abs([one.error for one in scored])
    linear = np.abs([one.linear_error for one in scored])
    how = f"of {len(scored)} published rows"
    claims = [
        Claim("plan_median_error", float(np.median(errors)), "", how),
        Claim("plan_p90_error", float(np.percentile(errors, 90)), "", how),
        Claim(
            "plan_vs_linear",
            float(np.median(errors) / np.median(linear)),
            "",
            f"{how}; linear scaling is {np.median(linear):.3f} off",
        ),
    ]

    left = left_one_out(official())
    heading = ("batch", "epochs", "predicted without it", "off")
    table([heading, *((f"{one.batch:,.0f}", f"{one.epochs:g}", f"{one.epochs * (1 + off):.1f}", f"{off:+.1%}")
                      for one, off in left)])  # fmt: skip
    worst = max(abs(off) for _, off in left)
    claims.append(Claim("epochs_worst_error", worst, "", f"of {len(left)} official points, each left out"))

    minutes = times()
    heading = ("series", "devices", "batch", "epochs", "minutes", "predicted", "off")
    table([heading, *((one.series, f"{one.gpus:,}", f"{one.batch:,}", f"{one.epochs:.1f}", f"{one.minutes:g}",
                       f"{one.planned:.3f}", f"{one.error:+.1%}") for one in minutes)])  # fmt: skip
    off = float(np.median(np.abs([one.error for one in minutes])))
    claims.append(Claim("ttt_median_error", off, "", f"of {len(minutes)} published runs"))

    swept = sweeps()
    heading = ("all-reduce", "devices", "latency", "bandwidth", "sizes", "median off", "worst")
    cells = []
    for one in swept:
        line, errors_of = one.line, np.abs(one.errors)
        bandwidth = f"{1e-9 / line.s_per_byte:,.1f} GB/s" if line.s_per_byte else "-"
        cells.append(
            (f"{one.system}: {one.hardware}", f"{one.gpus}", f"{line.latency_s * 1e6:,.0f} us", bandwidth,
             f"{len(errors_of)}", f"{np.median(errors_of):.1%}", f"{errors_of.max():.1%}")
        )  # fmt: skip
    table([heading, *cells])
    every = np.abs([error for one in swept for error in one.errors])
    how = f"of {len(every)} sizes in {len(swept)} published sweeps"
    claims.append(Claim("allreduce_median_error", float(np.median(every)), "", how))
    report(claims, options)


SCALING = (
    "series",
    "devices",
    "batch each",
    "published",
    "predicted",
    "off",
    "linear off",
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
        "yes" if one.scored else "",
        one.basis,
    )


if __name__ == "__main__":
    main()
