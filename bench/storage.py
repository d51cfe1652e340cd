"""Puts the load of training on a folder or an address, beside the rates that a number of nodes needs.

    python -m bench.storage /mnt/storage --nodes 12
    python -m bench.storage s3://bucket/folder --objects 100000 --streams 64

Objects are read in random order, each once an epoch, and one is written for 90 that are read (NVIDIA's designs for
DGX-1). Their sizes vary as those of ImageNet's files do. They are laid down first, in the folder headway-storage-bench
below the target. Clients that run at once share them, and the last one removes the folder; with --keep it stays. An
http server, which cannot be written to, serves a folder that was laid down with --keep before, and is only read.

storage_read_bytes_s   bytes/s of all reads
storage_opens_s        objects read per second
storage_of_required    bytes/s of reads over those that the nodes need: what this one client got. Run it on all nodes at
                       once, each with --nodes 1 --seed N, and add their rates
Files of a folder are dropped from the page cache after each read. A server caches as it likes: give it more objects
than its memory holds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from bench._common import Claim, parser, report
from bench._family import run_bench
from bench._storage.load import Count, Load, lay_objects, run_stream
from bench._storage.store import Folder, Store, open_store
from bench._storage.visit import name_client, visit
from headway.core.errors import HeadwayError, UsageError
from headway.core.files import expect_writable
from headway.core.text_format import format_bytes, pluralise
from headway.plan.facility.design import plan_facility
from headway.plan.facility.request import IMAGE_BYTES, FacilityRequest
from headway.plan.facility.storage import READS_PER_WRITE

# Standard deviation over mean of the sizes of 250 ImageNet files.
VARIATION = 0.62


def build_parser() -> argparse.ArgumentParser:
    found = parser(__doc__ or "")
    found.add_argument("target", nargs="?", help="folder that exists, or URL; default: a temporary folder")
    found.add_argument("--keep", action="store_true", help="leave the objects there, for an http server or another run")
    found.add_argument("--objects", type=int, default=5_000)
    found.add_argument("--mean-kb", type=float, default=IMAGE_BYTES / 1e3, help="mean size of an object")
    found.add_argument("--variation", type=float, default=VARIATION, help="standard deviation of the sizes over it")
    found.add_argument("--reads-per-write", type=int, default=READS_PER_WRITE, help="0: reads alone")
    found.add_argument("--streams", type=int, default=4, help="processes that read and write at once")
    found.add_argument("--seconds", type=float, default=20.0)
    found.add_argument("--seed", type=int, default=0, help="of the order of reads: another one on each client")
    found.add_argument("--nodes", type=int, default=1, help="nodes whose need is compared")
    found.add_argument("--node", default="dgx-1", help="their type, by its name in the catalog of headway plan")
    return found


def run_load(load: Load, store: Store, streams: int, seconds: float) -> list[Count]:
    """Runs all streams at once, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(streams, mp_context=context) as pool:
        # The processes start before the clock of the first one does.
        list(pool.map(run_stream, *zip(*[(load, store, one, streams, 0.0) for one in range(streams)], strict=True)))
        work = [(load, store, one, streams, seconds) for one in range(streams)]
        return list(pool.map(run_stream, *zip(*work, strict=True)))


def check_options(options: argparse.Namespace) -> None:
    """Raises UsageError if a number is impossible."""
    smallest = {"objects": 1, "streams": 1, "nodes": 1, "reads_per_write": 0, "variation": 0, "seed": 0}
    for name, least in smallest.items():
        if not getattr(options, name) >= least:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is {getattr(options, name):g}", fix=f"Set it to {least} or more.")
    for name, most in (("mean_kb", 1e6), ("seconds", 1e6)):
        if not 0.01 <= getattr(options, name) <= most:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is {getattr(options, name):g}", fix=f"Set it to 0.01 to {most:,.0f}.")
    if options.streams > options.objects:
        what = f"{options.streams} streams have {pluralise(options.objects, 'object')}, and each needs one of its own"
        raise UsageError(what, fix="Set --streams to less, or --objects to more.")
    if options.keep and options.target is None:
        raise UsageError("--keep is for a folder or a URL, and none is named", fix="Name one, or leave --keep out.")
    expect_writable(options.json)


def expect_space(path: Path, load: Load) -> None:
    """Raises UsageError if a folder has no room for the objects, and as much again for what is written."""
    needed, free = 2 * load.objects * load.mean_bytes, shutil.disk_usage(path).free
    if free < needed:
        what = f"{load.objects:,} objects and what is written need {format_bytes(needed)}"
        what += f", and {format_bytes(free)} are free"
        raise UsageError(what, where=str(path), fix="Free space there, or set --objects to less.")


def main() -> None:
    options = build_parser().parse_args()
    if options.quick:
        options.objects, options.seconds = min(options.objects, 200), min(options.seconds, 1.0)
    try:
        measure_storage(options)
    except HeadwayError as error:
        print(f"bench.storage: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except OSError as error:
        print(f"bench.storage: {error.filename or options.target}: {error.strerror}.", file=sys.stderr)
        sys.exit(1)


def measure_storage(options: argparse.Namespace) -> None:
    """Lays the objects down, runs the load, and prints the rates. Raises UsageError or OSError, which name the cure."""
    check_options(options)
    wanted = FacilityRequest(nodes=options.nodes, node=options.node, image_bytes=options.mean_kb * 1e3)
    feed = plan_facility(wanted).feed
    with tempfile.TemporaryDirectory() as name:
        store = open_store(options.target or name)
        load = Load(
            objects=options.objects, mean_bytes=options.mean_kb * 1e3, variation=options.variation,
            order_seed=options.seed, client=name_client(),
            reads_per_write=None if store.is_read_only else options.reads_per_write or None,
        )  # fmt: skip
        if isinstance(store, Folder):
            expect_space(store.path.parent, load)
        with visit(store, load.client, keeps=options.keep):
            print(f"{lay_objects(load, store):,} of {load.objects:,} objects laid down in {store.place}")
            found = run_load(load, store, options.streams, options.seconds)
    if not any(one.reads for one in found):
        fix = f"Set --seconds to more than {options.seconds:g}."
        raise UsageError("no object was read before the time was over", fix=fix)
    print_report(load, found, feed.bytes_s, feed.opens_s, feed.write_bytes_s, options)


def print_report(
    load: Load,
    found: Sequence[Count],
    bytes_s: float,
    opens_s: float,
    write_bytes_s: float,
    options: argparse.Namespace,
) -> None:
    """Prints each rate beside the required one."""
    rates = {
        name: sum(getattr(one, name) / one.seconds for one in found)
        for name in ("read_bytes", "written_bytes", "reads")
    }
    taken = np.concatenate([one.taken for one in found])
    sizes = load.draw_sizes()
    print(
        f"{load.objects:,} objects of {format_bytes(sizes.mean())} in the mean, {format_bytes(sizes.min())} to"
        f" {format_bytes(sizes.max())}; {len(found)} streams; a read takes {np.median(taken) * 1e3:.2f} ms in the"
        f" median and {np.quantile(taken, 0.99) * 1e3:.2f} ms at the 99th percentile"
    )
    rows = [
        ("", "measured", f"{options.nodes} x {options.node} need"),
        ("reads", f"{format_bytes(rates['read_bytes'])}/s", f"{format_bytes(bytes_s)}/s"),
        ("objects read", f"{rates['reads']:,.0f} /s", f"{opens_s:,.0f} /s"),
        ("writes", f"{format_bytes(rates['written_bytes'])}/s", f"{format_bytes(write_bytes_s)}/s"),
    ]
    how = f"{load.objects:,} objects, {len(found)} streams, on {options.target or 'a temporary folder'}"
    claims = [
        Claim("storage_read_bytes_s", rates["read_bytes"], "bytes/s", how),
        Claim("storage_opens_s", rates["reads"], "objects/s", how),
        Claim("storage_of_required", rates["read_bytes"] / bytes_s, "", f"{options.nodes} x {options.node}"),
    ]
    report(claims, options, rows)


if __name__ == "__main__":
    run_bench(main)
