"""The verdict about a figure: one of `NAMES`.

Rules of figures.csv, for what was measured or counted (`ours`) beside the deck's number (`value`):

=            equal
~P           within P % of the deck's
at least P % ours is at least P % of the deck's, as a gain is
>=X, <=X     ours is at least, or at most X. If ours has an interval, all of it; undecided if X lies within
gain         the interval of ours lies above 0. Refuted: it lies below 0, or below the deck's value. Else undecided
onednn       a gain by oneDNN: the rule of inference tables, `headway.export.deck.judge_gain`
order        of the same order of magnitude
plan         planned, within as many percent as it is off; or a statement, which the plan confirms or not
plan-order   planned, of the same order of magnitude
(none)       nothing here can tell: the note names what is missing
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, final, get_args

from bench._decks.figure import Figure, Ours
from headway.export.deck import judge_gain

Name = Literal["reproduced", "planned", "refuted here", "undecided here", "not measurable here", "not measured yet"]
NAMES: tuple[Name, ...] = get_args(Name)
MEASURES = dict.fromkeys(("inference", "delta"), "bench.export --only deck")
"""Command that makes what a kind of `ours` lacks; `bench.decks --train` for the others."""
# Rounding of doubles.
EQUAL = 1e-9


@final
@dataclass(frozen=True)
class Verdict:
    """A verdict by name, and its sentence in the page."""

    name: Name
    text: str


def judge(figure: Figure, ours: Ours | None) -> Verdict:
    """Judges a figure by its rule. Args: ours: None, if there is nothing, or if its runs were not made yet."""
    kind = figure.ours.partition(":")[0]
    # A time of another machine could not be measured here anyway.
    if kind and ours is None and (figure.rule or kind not in MEASURES):
        command = MEASURES.get(kind, "bench.decks --train")
        return Verdict("not measured yet", f"not measured yet: `python -m {command}` does it")
    if not figure.rule:
        return _miss(figure.note)
    assert ours is not None, f"{figure.id} has a rule, and nothing to compare"
    if figure.rule.startswith("plan"):
        return _judge_plan(figure, ours)
    if figure.rule == "gain":
        return _judge_gain(figure, ours)
    if figure.rule == "onednn":
        return _judge_onednn(figure, ours)
    held = is_held(figure, ours)
    if held is None:
        return Verdict("undecided here", f"undecided here: the interval includes the bar, {figure.rule[2:]}")
    return Verdict("reproduced", "reproduced") if held else _refute(figure.note)


def is_held(figure: Figure, ours: Ours) -> bool | None:
    """Returns True if what was measured or counted is as the figure's rule asks. None: its interval does not decide."""
    rule, value = figure.rule, ours.value
    assert value is not None, f"{figure.id}: nothing to compare"
    low, high = (value if end is None else end for end in (ours.low, ours.high))
    if found := re.fullmatch(r"(>=|<=)(-?[\d.]+)", rule):
        bar = float(found[2])
        if low < bar < high:
            return None
        return low >= bar if found[1] == ">=" else high <= bar
    deck = figure.number
    assert deck is not None, f"{figure.id} has no number"
    if rule == "=":
        return math.isclose(value, deck, rel_tol=EQUAL, abs_tol=EQUAL)
    if rule == "order":
        return _is_same_order(value, deck)
    if found := re.fullmatch(r"~(\d+)", rule):
        return abs(value / deck - 1) <= float(found[1]) / 100
    if found := re.fullmatch(r"at least (\d+) %", rule):
        return value >= float(found[1]) / 100 * deck
    raise ValueError(f"{figure.id} has the rule {rule!r}")


def _is_same_order(value: float, deck: float) -> bool:
    return math.floor(math.log10(value)) == math.floor(math.log10(deck))


def _judge_plan(figure: Figure, ours: Ours) -> Verdict:
    deck = figure.number
    if deck is None:
        if ours.holds:
            return Verdict("planned", "planned: it holds")
        return Verdict("refuted here", "refuted here: the plan says otherwise")
    assert ours.value is not None
    if figure.rule == "plan-order":
        same = _is_same_order(ours.value, deck)
        return Verdict("planned", f"planned: {'of the same' if same else 'not of the same'} order of magnitude")
    off = abs(ours.value / deck - 1)
    text = f"planned within {math.ceil(100 * off - EQUAL)} %"
    band = {True: "; in the band of 90 %", False: "; outside the band of 90 %", None: ""}[ours.holds]
    return Verdict("planned", text + band)


def _judge_gain(figure: Figure, ours: Ours) -> Verdict:
    low, high, deck = ours.low, ours.high, figure.number
    assert low is not None
    assert high is not None
    if low > 0:
        return Verdict("reproduced", "reproduced")
    if high < 0:
        return _refute("it is a loss")
    if deck is not None and high < deck:
        return _refute(f"it is at most {high:.2g}" if high >= 0.05 else "there is none")
    return Verdict("undecided here", "undecided here: the interval of three seeds holds 0")


def _judge_onednn(figure: Figure, ours: Ours) -> Verdict:
    assert figure.number is not None
    assert ours.value is not None
    text = judge_gain(figure.number, ours.value, ours.high)
    return Verdict(text.partition(":")[0], text)


def _refute(reason: str) -> Verdict:
    return Verdict("refuted here", f"refuted here: {reason}" if reason else "refuted here")


def _miss(what: str) -> Verdict:
    return Verdict("not measurable here", f"not measurable here: {what}")
