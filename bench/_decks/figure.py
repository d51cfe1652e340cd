"""The decks' figures as figures.csv has them, and what Headway has beside one."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

FILE = Path(__file__).with_name("figures.csv")
DECKS = {
    "A": "Making DL training times shorter",
    "B": "Highly Scalable Deep Learning Training System with Mixed Precision: Training ImageNet in Four Minutes",
    "C": "Deep learning data centers",
    "D": "Fundamentals of Deep Learning for Multi-GPUs",
    "E": "The Steady State: Reduce Spikiness from GPU Utilization",
}
SOURCES = {
    "A": "NVIDIA, 2018",
    "B": "Tencent and Hong Kong Baptist University, 2018; arXiv 1807.11205",
    "C": "NVIDIA, 2018, on clusters of DGX-1",
    "D": "NVIDIA Deep Learning Institute",
    "E": "C. M. Vahid, AWS, 2019",
}


@final
@dataclass(frozen=True)
class Figure:
    """A figure of a deck.

    Attributes:
        says: the deck's statement, without its number.
        value: the number; empty if the statement has none.
        ours: where to look up what Headway has, as KIND:NAME; empty if it has nothing.
        rule: how the two are compared; see `verdict`. Empty if they cannot be.
        note: the reason of a refutation, or what is missing for a comparison.
    """

    id: str
    deck: str
    slide: str
    says: str
    value: str
    unit: str
    ours: str
    rule: str
    note: str

    @property
    def number(self) -> float | None:
        """The deck's number, if it has one."""
        return float(self.value) if self.value else None


def read_figures() -> list[Figure]:
    """Reads all figures in the order of the page: by deck, then by slide."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [Figure(**row) for row in csv.DictReader(file)]


Kind = Literal["measured", "counted", "planned", "published", "taken over"]


@final
@dataclass(frozen=True)
class Ours:
    """What Headway has beside a figure.

    Attributes:
        value: in the figure's unit; None: a statement without a number.
        low, high: ends of its interval, if it has one.
        more: said behind the value, such as its conditions or its source.
        holds: whether the figure's statement is so, where no number tells.
    """

    kind: Kind
    value: float | None = None
    more: str = ""
    low: float | None = None
    high: float | None = None
    holds: bool | None = None
