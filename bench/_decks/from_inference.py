"""Kept measurements of the deck's inference tables: bench/results/inference.jsonl, made by `bench.export --only deck`.

Each function takes the part of a figure's `ours` behind the colon.
"""

from __future__ import annotations

from functools import cache

from bench._accuracy.results import Results
from bench._decks.figure import Ours
from bench._export.deck_results import RESULTS, WITH, WITHOUT, DeckResults, compute_deltas
from bench._export.networks import EVALUATED


@cache
def read_inference() -> DeckResults:
    """Reads the kept lines of the machine that the documentation shows."""
    return DeckResults(Results(RESULTS))


def find_speed(asked: str) -> Ours | None:
    """Finds what was measured of a network: NAME/KIND/BATCH; None until it is.

    Args:
        asked: kinds are gain, and with and without: ms of CPU time at batch `small`, images/s of it at batch `large`.
    """
    name, kind, batch = asked.split("/")
    record = read_inference().find_both(name)[batch == "large"]
    if record is None:
        return None
    more = record.thread if record.batch == 1 else f"{record.thread}, a batch of {record.batch}"
    if kind == "gain":
        middle, low, high = record.compute_gain()
        return Ours("measured", middle, more, low, high)
    ms = record.compute_ms({"with": WITH, "without": WITHOUT}[kind])
    return Ours("measured", ms if batch == "small" else 1e3 / ms, more)


def find_delta(name: str) -> Ours | None:
    """Finds the larger change of top-1 and top-5 by oneDNN; None until it is measured."""
    record = read_inference().find_accuracy(name)
    if record is None:
        return None
    return Ours("measured", max(compute_deltas(record), key=abs), f"{EVALUATED} digits, last layer fitted")
