"""Records of a sweep's journal: the plan, decisions, and results, to and from JSON objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, final

from headway.core.untrusted_json import Check, JsonError, expect_entries, is_any_number, is_object, is_text
from headway.core.untrusted_json import is_number as is_number_within
from headway.core.untrusted_json import is_whole_number as is_natural
from headway.sweep.budget import METHODS, Plan
from headway.sweep.rungs import Bracket

# Version of the journal's format; journals of another version are refused.
VERSION = 1

Values = Mapping[str, Any]
"""The recipe keys that a trial sets, and their values."""


@final
@dataclass(frozen=True)
class Planned:
    """The first record: what the sweep was started with."""

    plan: Plan


@final
@dataclass(frozen=True)
class Created:
    """A new trial starts at the first rung."""

    trial: int
    values: Values


@final
@dataclass(frozen=True)
class Promoted:
    """A trial resumes and trains to the end of `rung`."""

    trial: int
    rung: int


@final
@dataclass(frozen=True)
class Stopped:
    """A trial does not go on from `rung`."""

    trial: int
    rung: int


@final
@dataclass(frozen=True)
class Forked:
    """A new trial starts from its parent's checkpoint at the end of `rung - 1`, with other values."""

    trial: int
    parent: int
    rung: int
    values: Values


@final
@dataclass(frozen=True)
class Result:
    """A trial has reached the end of `rung`, or failed on the way: `score` is None, and `reason` says why."""

    trial: int
    rung: int
    score: float | None
    reason: str = ""


@final
@dataclass(frozen=True)
class Fused:
    """Trials take forward and backward together, `at_once` of them, to the end of their rung; 0: each by itself.

    `gain` was measured for a `network` with its batch and number of trials, or follows from a measurement before.
    """

    trials: tuple[int, ...]
    at_once: int
    gain: float
    network: str

    def find_places(self, trial: int) -> tuple[int, ...]:
        """Returns the trials that take a pass together with this one, in their places; none if it trains by itself."""
        if not self.at_once:
            return ()
        # Groups of nearly equal size.
        size, count = len(self.trials), -(-len(self.trials) // self.at_once)
        bounds = [part * size // count for part in range(count + 1)]
        groups = (self.trials[start:end] for start, end in pairwise(bounds))
        return next(group for group in groups if trial in group)


Decision = Created | Promoted | Stopped | Forked | Fused
Record = Planned | Decision | Result


@final
class UnknownRecordError(ValueError):
    """The record is of a kind or a version that this version of Headway does not know."""


def build_result(trial: int, rung: int, score: float) -> Result:
    """Returns the result of a trial that reached a rung; a score that is not finite counts as failed."""
    if math.isfinite(score):
        return Result(trial, rung, float(score))
    return Result(trial, rung, None, f"the score is {score}")


def encode_record(record: Record) -> dict[str, Any]:
    """Returns a record as a JSON object."""
    kind = _NAMES[type(record)]
    if not isinstance(record, Planned):
        return {"kind": kind, **asdict(record)}
    plan = record.plan
    brackets = [
        {"first_trial": one.first_trial, "levels": [str(level) for level in one.levels], "sizes": list(one.sizes)}
        for one in plan.brackets
    ]
    entries = {name: getattr(plan, name) for name in ("method", "eta", "higher_is_better", "seed")}
    return {"kind": kind, "version": VERSION, **entries, "budget": str(plan.budget), "brackets": brackets}


def decode_record(tree: dict[str, Any]) -> Record:
    """Returns the record of a JSON object.

    Raises:
        UnknownRecordError: it is of an unknown kind, or of another version of the format.
        JsonError: it is no record.
    """
    kind = tree.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnknownRecordError(f"its kind is {str(kind)[:100]!r}, which this version of Headway does not know")
    checks, build = _KINDS[kind]
    expect_entries(tree, checks)
    if extra := set(tree) - set(checks) - {"kind"}:
        raise JsonError(f"it has the unknown entry {min(extra)[:100]!r}")
    return build({name: tree[name] for name in checks})


def _decode_plan(tree: dict[str, Any]) -> Record:
    if tree.pop("version") != VERSION:
        raise UnknownRecordError("another version of Headway wrote it")
    for bracket in tree["brackets"]:
        expect_entries(bracket, _BRACKET, "brackets.")
        if not 0 < len(bracket["levels"]) == len(bracket["sizes"]):
            raise JsonError("a bracket needs as many levels as sizes")
    brackets = tuple(
        Bracket(one["first_trial"], tuple(map(Fraction, one["levels"])), tuple(one["sizes"]))
        for one in tree["brackets"]
    )
    return Planned(Plan(**tree | {"budget": Fraction(tree["budget"]), "brackets": brackets}))


def _is_fraction(value: Any) -> bool:
    parts = value.split("/") if is_text(value) else []
    # Fraction itself takes "1e999999999" too, and fills the memory with it.
    return len(parts) in (1, 2) and all(part.isdecimal() and len(part) <= 100 and int(part) > 0 for part in parts)


def _is_list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and bool(value) and all(map(check, value))


def _is_finite(value: Any) -> bool:
    return is_number_within(value) and math.isfinite(value)


_NATURAL = (is_natural, "a whole number")
_VALUES = (is_object, "an object")
_FRACTION = (_is_fraction, "a fraction above 0, as a text")
_BRACKET = {
    "first_trial": _NATURAL,
    "levels": (_is_list(_is_fraction), "a list of fractions"),
    "sizes": (_is_list(is_natural), "a list of whole numbers"),
}
_PLAN = {
    "version": (is_any_number, "a number"),
    "method": (METHODS.__contains__, f"one of {', '.join(METHODS)}"),
    "eta": (lambda value: is_natural(value, 2), "a whole number of at least 2"),
    "higher_is_better": (lambda value: isinstance(value, bool), "a truth value"),
    "seed": (lambda value: type(value) is int, "a whole number"),
    "budget": _FRACTION,
    "brackets": (_is_list(is_object), "a list of objects"),
}
_RUNG = {"trial": _NATURAL, "rung": _NATURAL}
_SCORE = {
    "score": (lambda value: value is None or _is_finite(value), "a finite number or null"),
    "reason": (is_text, "a text"),
}
_FUSED = {
    "trials": (_is_list(is_natural), "a list of whole numbers"),
    "at_once": _NATURAL,
    "gain": (_is_finite, "a finite number"),
    "network": (is_text, "a text"),
}
_KINDS: dict[str, tuple[Mapping[str, tuple[Check, str]], Callable[[dict[str, Any]], Record]]] = {
    "planned": (_PLAN, _decode_plan),
    "created": ({"trial": _NATURAL, "values": _VALUES}, lambda tree: Created(**tree)),
    "promoted": (_RUNG, lambda tree: Promoted(**tree)),
    "stopped": (_RUNG, lambda tree: Stopped(**tree)),
    "forked": ({**_RUNG, "parent": _NATURAL, "values": _VALUES}, lambda tree: Forked(**tree)),
    "result": ({**_RUNG, **_SCORE}, lambda tree: Result(**tree)),
    "fused": (_FUSED, lambda tree: Fused(**tree | {"trials": tuple(tree["trials"])})),
}
_NAMES = {
    Planned: "planned",
    Created: "created",
    Promoted: "promoted",
    Stopped: "stopped",
    Forked: "forked",
    Result: "result",
    Fused: "fused",
}
