"""Kept measurements of the deck's tables of speed and accuracy (bench/results/inference.jsonl), and their tables.

A line has one network: for `speed` at one batch, CPU seconds a call by arm and round; for `accuracy` top-1 and top-5
without and with oneDNN. The tables of docs/inference-table.md are `format_speed` and `format_accuracy` of these lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from bench._accuracy.results import FOLDER, Results
from bench._common import median
from bench._export.networks import EVALUATED
from headway.export.deck import ACCURACY, judge_accuracy, judge_gain, read_deck

RESULTS = FOLDER / "inference.jsonl"
WITH, WITHOUT, LAST = "with", "without", "with, channels last"
ALONE = "faster_rcnn"
"""The network whose images/s in the deck are 1 / latency: its images came one at a time, so they do here."""
NOT_YET = "not measured yet"
BATCH = 128
"""Of most of the deck's images/s."""
Interval = tuple[float, float, float]


@final
@dataclass(frozen=True)
class Record:
    """A line of the results."""

    values: Mapping[str, Any]

    @property
    def batch(self) -> int:
        """Images of a call."""
        return int(self.values["batch"])

    @property
    def thread(self) -> str:
        """Processor and threads, such as `one thread of an AMD EPYC with AVX2`."""
        processor, _, units, *_ = str(self.values["machine"]).split(", ")
        return f"one thread of an {processor} with {units}"

    def compute_gain(self, arm: str = WITH) -> Interval:
        """Computes the median of the ratios within a round, without oneDNN over an arm, and its interval."""
        times = self.values["seconds"]
        return median([a / b for a, b in zip(times[WITHOUT], times[arm], strict=True)])

    def compute_ms(self, arm: str) -> float:
        """Computes the median CPU milliseconds of an image."""
        return 1e3 * median(self.values["seconds"][arm])[0] / self.batch


@final
class DeckResults:
    """The kept lines of one machine.

    Args:
        machine: as `this_machine` names it; None: the one whose lines are the first, which the documentation shows.
            Accuracies come from any machine then.
    """

    def __init__(self, results: Results, machine: str | None = None) -> None:
        lines = results.all()
        self.machine = machine or (lines[0]["machine"] if lines else "")
        own = [one for one in lines if one["machine"] == self.machine]
        self.speed = [Record(one) for one in own if one["table"] == "speed"]
        self.accuracy = [Record(one) for one in (own if machine else lines) if one["table"] == "accuracy"]

    def find_speed(self, network: str) -> list[Record]:
        """Finds the lines of a network, the smallest batch first."""
        return sorted((one for one in self.speed if one.values["network"] == network), key=lambda one: one.batch)

    def find_both(self, network: str) -> tuple[Record | None, Record | None]:
        """Finds the lines of a network at batch 1 and at a larger one; None where it was not measured."""
        found = self.find_speed(network)
        small = next((one for one in found if one.batch == 1), None)
        return small, small if network == ALONE else next((one for one in found if one.batch > 1), None)

    def find_accuracy(self, network: str) -> Record | None:
        """Finds the line of a network."""
        return next((one for one in self.accuracy if one.values["network"] == network), None)


def format_speed(results: DeckResults) -> str:
    """Formats the table of speed as Markdown: gains of the deck and of this machine, and verdicts."""
    head = (
        "network",
        "deck, batch 1",
        "here",
        "deck, batch 128 if not said",
        "here, larger batch",
        "with channels last",
        "verdict",
    )
    rows: list[Sequence[str]] = [head]
    for row in read_deck():
        found = results.find_both(row.name)
        gains = [None if one is None else one.compute_gain() for one in found]
        printed = row.latency_gain, row.speed_gain
        shown = f"{printed[0]:.2f}", f"{printed[1]:.2f}" + (f" at {row.batch:g}" if row.batch != BATCH else "")
        cells = [f"{deck} | {_format_gain(gain)}" for deck, gain in zip(shown, gains, strict=True)]
        if found[1] is not None:
            cells[1] += f" at {found[1].batch}"
        last = [
            f"{one.compute_gain(LAST)[0]:.2f}" for one in found if one is not None and LAST in one.values["seconds"]
        ]
        verdicts = [_judge(deck, gain) for deck, gain in zip(printed, gains, strict=True)]
        rows.append((row.network, *cells, ", ".join(last) or "-", _join(*verdicts)))
    return format_markdown(rows)


def _format_gain(interval: Interval | None) -> str:
    return "-" if interval is None else "{:.2f} [{:.2f}, {:.2f}]".format(*interval)


def _judge(deck: float, gain: Interval | None) -> str:
    """Names the verdict. The reason, which is the same in all rows, stands below the table."""
    return NOT_YET if gain is None else judge_gain(deck, gain[0], gain[2]).partition(":")[0]


def _join(small: str, large: str) -> str:
    """Joins the verdicts at both batches; where they differ, each names its batch."""
    if small == large:
        return small
    return f"batch 1: {small}; larger: {large}"


def format_accuracy(results: DeckResults) -> str:
    """Formats the table of accuracy as Markdown."""
    rows: list[Sequence[str]] = [
        ("network", "top-1 without, with oneDNN", "delta", "top-5 without, with oneDNN", "delta", "flips", "verdict")
    ]
    for label, name in ACCURACY:
        record = results.find_accuracy(name)
        if record is None:
            rows.append((label, *["-"] * 5, NOT_YET))
            continue
        cells, deltas = list[str](), compute_deltas(record)
        for key, delta in zip(("top1", "top5"), deltas, strict=True):
            without, own = record.values[key]
            cells += [f"{without:.8f}, {own:.8f}", f"{delta + 0.0:.8f}"]
        rows.append((label, *cells, str(record.values["flips"]), judge_accuracy(deltas, f"{EVALUATED} digits")))
    return format_markdown(rows)


def compute_deltas(record: Record) -> list[float]:
    """Computes the changes of top-1 and top-5 by oneDNN."""
    return [own - without for without, own in (record.values[key] for key in ("top1", "top5"))]


def format_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows, the first of them the heading, as a table of Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:], ""])
