"""The numbers that the decks' texts print, and which figure each belongs to.

numbers.csv has a row for each line of a text that prints numbers: deck, line, the numbers, and for each number the
figure that it belongs to, or the reason why it is none. One word stands for all numbers of a line.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bench._decks.figure import DECKS, Figure

FILE = Path(__file__).with_name("numbers.csv")
NUMBER = re.compile(r"(?<![0-9.])\.[0-9]+|[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
REASONS = {
    "again": "printed in another place too, where it belongs to a figure",
    "axis": "a mark on the axis of a chart",
    "code": "part of a program, a command or an output of one",
    "condition": "a condition of a figure in the same slide: a batch, devices, epochs, the size of an image",
    "date": "a date or a year",
    "fault": "a letter that was taken for a digit, or a digit out of place",
    "formula": "part of a formula",
    "heading": "the number of a chapter, a table, a chart, an item or a page",
    "name": "part of the name of a device, a network, a data set, a format or a product",
    "reading": "a reading of nvidia-smi beside the utilisation: power, temperature, memory, versions",
    "source": "part of the address or the number of a source",
}


@final
@dataclass(frozen=True)
class Line:
    """A line of a deck's text: its numbers, and the figure or the reason of each."""

    deck: str
    line: int
    numbers: tuple[str, ...]
    marks: tuple[str, ...]


def read_lines() -> list[Line]:
    """Reads numbers.csv."""
    found = []
    with FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            numbers, marks = tuple(row["numbers"].split()), tuple(row["marks"].split())
            marks = marks * len(numbers) if len(marks) == 1 else marks
            found.append(Line(row["deck"], int(row["line"]), numbers, marks))
    return found


def extract_numbers(text: str) -> dict[int, tuple[str, ...]]:
    """Extracts all numbers of a text, by line, the first of which is 1."""
    found = {place: tuple(NUMBER.findall(line)) for place, line in enumerate(text.split("\n"), 1)}
    return {place: numbers for place, numbers in found.items() if numbers}


def find_faults(lines: list[Line], figures: list[Figure]) -> Iterator[str]:
    """Yields a sentence for each number without a figure or a reason, and for each figure whose number is not there."""
    known = {figure.id: figure for figure in figures}
    printed: dict[str, set[float]] = {}
    for line in lines:
        where = f"deck {line.deck}, line {line.line}"
        if len(line.marks) != len(line.numbers):
            yield f"{where}: {len(line.numbers)} numbers, and marks for {len(line.marks)}"
        for number, mark in zip(line.numbers, line.marks, strict=False):
            if mark not in known and mark not in REASONS:
                yield f"{where}: {number} belongs to {mark!r}, which is neither a figure nor a reason"
            elif mark in known and known[mark].deck != line.deck:
                yield f"{where}: {number} belongs to {mark!r}, a figure of another deck"
            printed.setdefault(mark, set()).add(float(number.replace(",", "")))
    for figure in figures:
        if figure.id in printed and not _is_printed(figure, printed[figure.id]):
            yield f"{figure.id} is {figure.value}, and the deck prints {sorted(printed[figure.id])}"


def _is_printed(figure: Figure, printed: set[float]) -> bool:
    value = figure.number
    # Hours and minutes that the deck prints are minutes in the page.
    hours = {60 * one for one in printed} | {60 * one + other for one in printed for other in printed}
    return value is None or value in printed or (figure.unit == "min" and value in hours)


def compare_texts(folder: Path) -> Iterator[str]:
    """Yields a sentence for each line whose numbers are not those of numbers.csv.

    Args:
        folder: with a text for each deck, whose names begin with 000 to 004 in the order of `DECKS`.
    """
    for place, deck in enumerate(DECKS):
        (path,) = folder.glob(f"{place:03d}*")
        found = extract_numbers(path.read_text(encoding="utf-8"))
        known = {line.line: line.numbers for line in read_lines() if line.deck == deck}
        for line in sorted(found.keys() | known.keys()):
            if found.get(line) != known.get(line):
                yield f"deck {deck}, line {line}: the text has {found.get(line)}, the list {known.get(line)}"
