"""Writes docs/decks.md: every figure of the decks, what Headway has beside it, and a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import final

from bench._arms import ROOT
from bench._decks import from_catalog, from_code, from_inference, from_plan, from_results
from bench._decks.figure import DECKS, SOURCES, Figure, Ours, read_figures
from bench._decks.numbers import read_lines
from bench._decks.verdict import NAMES, Verdict, judge

PAGE = ROOT / "docs/decks.md"
HEAD = ("figure", "deck", "ours", "ratio", "verdict", "made by")
NOT_YET = "- **not measured yet**: the command in the row measures it.\n"
FINDERS: Mapping[str, Callable[[str], Ours | None]] = {
    "claim": from_results.find_claim,
    "proof": from_results.find_statement,
    "derived": from_results.derive_pixels,
    "published": from_results.find_published,
    "large": from_results.read_large_batch,
    "curve": from_results.read_batch_curve,
    "recurrent": from_results.read_recurrent,
    "lamb": from_results.compare_lamb,
    "recipe": from_results.read_recipe_value,
    "study": from_results.read_study,
    "inference": from_inference.find_speed,
    "delta": from_inference.find_delta,
    "plan": from_plan.find_plan,
    "facility": from_catalog.find_facility,
    "trend": from_catalog.find_trend,
    "split": from_code.find_split,
    "schedule": from_code.find_schedule,
    "memory": from_code.count_memory,
    "count": from_code.count_things,
}
_MADE_BY = {
    "claim": "claim `{}`",
    "derived": "claim `{}_gain`",
    "large": "`bench.large_batch`",
    "curve": "`bench.large_batch --curve`",
    "recurrent": "`bench._sweep.recurrent`",
    "lamb": "`bench._sweep.recurrent`",
    "inference": "`bench.export --only deck`",
    "delta": "`bench.export --only deck`",
    "proof": "`bench.decks --statements`",
    "plan": "`headway plan`",
    "facility": "`headway plan --facility`",
}
_STUDIES = {"log": "optimizers", "diverged": "divergence", "decay": "alexnet"}
"""Names of studies by the beginning of what figures.csv asks of them, where the two differ."""


@final
@dataclass(frozen=True)
class Row:
    """A line of the page."""

    figure: Figure
    ours: Ours | None
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """Ours over the deck's, where both are numbers; a number that was taken over tells nothing about itself."""
        deck = self.figure.number
        if self.ours is None or self.ours.value is None or self.ours.kind == "taken over" or not deck:
            return None
        return self.ours.value / deck


@cache
def build_rows() -> tuple[Row, ...]:
    """Looks up and judges all figures."""
    rows = []
    for figure in read_figures():
        kind, _, name = figure.ours.partition(":")
        ours = FINDERS[kind](name) if kind else None
        rows.append(Row(figure, ours, judge(figure, ours)))
    return tuple(rows)


def format_number(value: float) -> str:
    """Formats a number with four digits or so."""
    if value and abs(value) < 1e-3:
        return f"{value:.2g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


@cache
def _list_printed() -> frozenset[str]:
    return frozenset(mark for line in read_lines() for mark in line.marks)


def _format_deck(figure: Figure) -> str:
    """All digits that the deck prints, with separators of thousands; in parentheses if it prints no such number."""
    if not figure.value:
        return ""
    whole, dot, rest = figure.value.partition(".")
    sign, whole = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
    text = f"{sign}{int(whole):,}{dot}{rest} {figure.unit}".strip()
    return text if figure.id in _list_printed() else f"({text})"


def _format_ours(ours: Ours | None) -> str:
    if ours is None:
        return ""
    text = ours.kind
    if ours.value is not None:
        text += f" {format_number(ours.value)}"
    if ours.low is not None and ours.high is not None:
        text += f" [{format_number(ours.low)}, {format_number(ours.high)}]"
    return text + (f"; {ours.more}" if ours.more else "")


def _format_table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def format_row(row: Row) -> tuple[str, ...]:
    """Formats a figure as cells: statement, deck, ours, ratio, verdict, what made ours."""
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    made_by = "" if row.ours is None else _name_maker(row.figure)
    return row.figure.says, _format_deck(row.figure), _format_ours(row.ours), ratio, row.verdict.text, made_by


def _name_maker(figure: Figure) -> str:
    """Names the claim, study or command behind a figure; nothing where the row itself has the source."""
    kind, _, name = figure.ours.partition(":")
    if kind == "study":
        first = name.partition("/")[0].partition("-")[0]
        return f"study `{_STUDIES.get(first, first)}`"
    if figure.ours == "large:knee":
        return "`bench.large_batch --error`"
    return _MADE_BY.get(kind, "").format(name)


def count_verdicts(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Counts the verdicts that there are by deck, and those of all decks, below a heading."""
    names = [name for name in NAMES if any(row.verdict.name == name for row in rows)]
    found: list[tuple[str, ...]] = [("deck", *names, "figures")]
    for key, title in [*DECKS.items(), ("", "all")]:
        count = Counter(row.verdict.name for row in rows if key in ("", row.figure.deck))
        found.append((title, *(str(count[one]) for one in names), str(count.total())))
    return found


def format_summary(rows: Sequence[Row]) -> list[str]:
    """Formats the verdicts of each deck in words: a column for each of them would not fit a narrow window."""
    (_, *names, _), *decks = count_verdicts(rows)
    lines = []
    for title, *counts, total in decks:
        words = ", ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True) if count != "0")
        lines.append((f"[{title}](#{_anchor(title)})" if title in DECKS.values() else title, total, words))
    return _format_table(("deck", "figures", "of them"), *lines)


def _anchor(title: str) -> str:
    return "-".join("".join(one for one in title.lower() if one.isalnum() or one in " -").split())


def format_page(rows: Sequence[Row]) -> str:
    """Formats the page as Markdown."""
    counts = "\n".join(format_summary(rows))
    refuted = [f"- {_format_short(row)}" for row in rows if row.verdict.name == "refuted here"]
    template = Path(__file__).with_name("head.md").read_text(encoding="utf-8")
    waiting = any(row.verdict.name == "not measured yet" for row in rows)
    found = template.format(counts=counts, refuted="\n".join(refuted), missing=NOT_YET if waiting else "")
    lines = [found.rstrip()]
    for deck, slides in groupby(rows, lambda row: row.figure.deck):
        lines += ["", f"## {DECKS[deck]}", "", f"{SOURCES[deck]}."]
        for slide, found in groupby(slides, lambda row: row.figure.slide):
            cells = [format_row(row) for row in found]
            lines += ["", f"### {slide}", "", *_format_table(HEAD, *cells)]
    return "\n".join(lines) + "\n"


def _format_short(row: Row) -> str:
    deck = f"; deck {_format_deck(row.figure)}" if row.figure.value else ""
    return f"{row.figure.slide}: {row.figure.says}{deck}; {_format_ours(row.ours)}"
