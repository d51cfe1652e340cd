"""Shared parts of all benches: arguments, medians with intervals, the table, the JSON file."""

from __future__ import annotations

import argparse
import json
import platform
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from headway.core.statistics import compute_median_interval as median

__all__ = ["Claim", "arguments", "machine", "median", "parser", "report", "table", "take_turns"]


@dataclass(frozen=True)
class Claim:
    """One number that is claimed, and how it was measured."""

    name: str
    value: float
    unit: str
    how: str


def arguments(description: str) -> argparse.Namespace:
    return parser(description).parse_args()


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments of every bench, for one that has more."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--quick", action="store_true", help="fewer rounds: shows that it works, not a figure to quote")
    found.add_argument("--json", type=Path, metavar="FILE", help="write machine and claims here")
    return found


def take_turns(
    arms: Mapping[str, Callable[[], object]], rounds: int, wait: Callable[[], object] = lambda: None, *, warm: int = 0
) -> dict[str, list[float]]:
    """Seconds of each arm's call in each round; each round is begun by another arm.

    Args:
        wait: for the device, before the clock starts and before it stops.
        warm: rounds before those, which are left out.
    """
    taken: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(warm + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            wait()
            started = perf_counter()
            arms[name]()
            wait()
            taken[name].append(perf_counter() - started)
    return {name: times[warm:] for name, times in taken.items()}


Part = Callable[[Path, argparse.Namespace], list[Claim]]
"""A part of a bench: measures in an empty folder, prints its own tables, and returns its claims."""


def run_parts(parts: Mapping[str, Part], options: argparse.Namespace, usual: Sequence[str] = ()) -> None:
    """Runs the part that `--only` names, else the usual ones, each in an empty folder, and reports their claims.

    Args:
        usual: names of parts; by default all.
    """
    claims = []
    for name in [options.only] if options.only else usual or parts:
        with tempfile.TemporaryDirectory(prefix=f"headway-bench-{name}-") as folder:
            claims += parts[name](Path(folder), options)
    report(claims, options)


def add_only(asked: argparse.ArgumentParser, parts: Mapping[str, Part]) -> None:
    """Adds the option `--only PART`."""
    asked.add_argument("--only", choices=parts, metavar="PART", help=f"one part: {', '.join(parts)}")


def report(claims: Sequence[Claim], options: argparse.Namespace, rows: Sequence[Sequence[str]] = ()) -> None:
    """Prints the table and the claims; writes the JSON file where one is asked for."""
    if rows:
        table(rows)
    for claim in claims:
        print(f"{claim.name:<20} {claim.value:.4g} {claim.unit}   ({claim.how})")
    if options.quick:
        print("A quick run shows that the bench works. These are no figures to quote.")
    if options.json:
        found = {"machine": machine(), "quick": options.quick, "claims": [asdict(claim) for claim in claims]}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of equal length, the first of them the heading, and an empty line."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Lets torch compute on one thread inside the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_children_s() -> float:
    """Returns the core seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def machine() -> dict[str, Any]:
    """Processor, cores, and versions."""
    import torch

    from headway.core.run_folder import collect_provenance

    found = collect_provenance({}, Path.cwd())
    return {
        **found["host"],
        **found["versions"],
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python_build": platform.python_build()[1],
    }
