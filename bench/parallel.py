"""Images that several processes share: which operations are right, what is kept, and what the exchange costs.

spatial_right           operations of 16 whose outputs and gradients on two ranks are those of one process
dtensor_right           the same of PyTorch's DTensor
spatial_saved_bytes_2   bytes that the backward pass of ResNet-50 needs on the worst of 2 ranks, over one process's
spatial_saved_bytes_4   the same with 4 ranks; both are counted
spatial_overlap         time of a 3 x 3 convolution of images that two hosts share, over that of the exchange followed
                        by the convolution. Halos of 459 kB, links of 200 Mbit/s, and images of a height at which the
                        convolution takes as long as the exchange. Needs root.
"""

from __future__ import annotations

import argparse
import signal
import sys

import torch

from bench._common import Claim, arguments, median, report, table
from bench._family import run_bench
from bench._hosts import Hosts, why_not
from bench._network.layout import Layout
from bench._network.ranks import Ranks
from bench._parallel.operations import HEIGHTS as HEIGHTS_TRIED
from bench._parallel.operations import compare_operations
from bench._parallel.overlap import HALO_BYTES, HEIGHTS
from bench._parallel.saved import SIZE, measure_shares


def compare_peers() -> list[Claim]:
    found = compare_operations()
    table([("operation", *found), *((name, *(found[way][name] for way in found)) for name in found["ours"])])
    heights = " and ".join(map(str, HEIGHTS_TRIED))
    how = f"of {len(found['ours'])} operations, maps of {heights} rows, torch {torch.__version__}"
    return [
        Claim(claim, sum(verdict == "right" for verdict in found[way].values()), "", how)
        for claim, way in (("spatial_right", "ours"), ("dtensor_right", "DTensor"))
    ]


def measure_saved(options: argparse.Namespace) -> list[Claim]:
    claims = []
    for ranks in (2,) if options.quick else (2, 4):
        shares = measure_shares(ranks)
        how = f"ResNet-50 at {SIZE} pixels; ranks: {', '.join(f'{share:.3f}' for share in shares)}"
        claims.append(Claim(f"spatial_saved_bytes_{ranks}", max(shares), "", how))
    return claims


def measure_overlap(hosts: Hosts, rounds: int) -> Claim:
    """Finds the height at which convolution and exchange take equally long, and lets both ways take turns there."""
    with Ranks(hosts, Layout(2, 1), {"arms": "bench._parallel.overlap"}) as ranks:

        def time_arm(name: str, rows: int, turns: int) -> list[float]:
            return [ranks.turn(f"{name} {rows}", 5).seconds for _ in range(turns)]

        probes = {
            rows: (median(time_arm("exchange", rows, 5))[0], median(time_arm("compute", rows, 5))[0])
            for rows in HEIGHTS
        }
        rows = min(probes, key=lambda one: abs(probes[one][1] / probes[one][0] - 1))
        taken: dict[str, list[float]] = {name: [] for name in ("exchange", "compute", "in turn", "beside")}
        names = list(taken)
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                taken[name] += time_arm(name, rows, 1)
    ratios = [one / other for one, other in zip(taken["beside"], taken["in turn"], strict=True)]
    middle, low, high = median(ratios)
    table([("", "ms"), *((name, f"{median(times)[0] * 1e3:.1f}") for name, times in taken.items())])
    exchange, compute = median(taken["exchange"])[0], median(taken["compute"])[0]
    how = (
        f"[{low:.3f}, {high:.3f}], {rounds} rounds; {rows} rows a rank, halos of {HALO_BYTES:,} bytes, the convolution"
        f" takes {compute / exchange:.2f} of the exchange"
    )
    return Claim("spatial_overlap", middle, "", how)


def main() -> None:
    options = arguments(__doc__ or "")
    claims = compare_peers() + measure_saved(options)
    if reason := why_not():
        print(f"There can be no hosts here: {reason}.")
    else:
        # So that the hosts are removed then too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with Hosts(2) as hosts:
            claims.append(measure_overlap(hosts, 3 if options.quick else 15))
    report(claims, options)


if __name__ == "__main__":
    run_bench(main)
