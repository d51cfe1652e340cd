"""Records of the label page: queues, picks, what a person wants to see, and the marks that people set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

QueueKind = Literal["mine", "label-errors"]
Role = Literal["first", "second", "again"]
"""`first`: nobody had labelled the sample; `second`: unseen, after somebody else, for the agreement alone; `again`: by
somebody who has seen the label, and whose own one stands."""
EVERYTHING = ""
"""Stands in the place of a queue for all samples of the newest version, in the order of their IDs."""


class Pick(NamedTuple):
    """One sample of a queue, in the order in which people see it."""

    sample: bytes
    """ID: 32 bytes."""
    given: str | None
    """Label when the queue was made."""
    proposed: str
    """Class that a network proposes; empty: none."""
    probability: float | None
    score: float | None
    arm: str
    """`random` or a strategy; `suspect` or empty in a queue of label errors."""
    copies: int
    """Near copies of it that were left out of the queue."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """Samples to look at, in an order that does not change.

    Attributes:
        queue: its ID: equal content has the same one.
        kind: `mine`: images worth a label; `label-errors`: labels that look wrong.
        version: ID of the version that it was made from.
        about: strategy, runs and further facts, for people.
    """

    queue: str
    dataset: str
    name: str
    kind: QueueKind
    version: str
    by: str
    created_s: float
    size: int
    about: Mapping[str, Any]


class Mark(NamedTuple):
    """A label that a person gave to a sample of a queue."""

    sample: bytes
    by: str
    label: str | None
    """None: not sure."""
    role: Role
    seconds: float
    """Time that it took."""
    time_s: float
    version: str
    """ID of the version that has the label."""


def find_standing(marks: Sequence[Mark]) -> Mark:
    """Returns the mark whose label the sample has: the newest one apart from second opinions."""
    return max((mark for mark in marks if mark.role != "second"), key=lambda mark: mark.time_s, default=marks[0])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Which samples a person wants to see.

    Attributes:
        queue: ID of a queue, or EVERYTHING.
        label: only those that have this class or are proposed as it; empty: all.
        split: only this split; empty: all.
        slice: only those whose names fit this pattern, such as `night/*`; empty: all.
        differs: only those whose label is not the proposed class.
        has_copies: only those with near copies.
        again: also those that somebody has looked at before this time (seconds since 1970); 0: none of them.
        count: most samples of a grid; 0: none but those that it has already.
    """

    queue: str = EVERYTHING
    label: str = ""
    split: str = ""
    slice: str = ""
    differs: bool = False
    has_copies: bool = False
    again: float = 0.0
    count: int = 24


class GivenLabel(NamedTuple):
    """One label of a grid that comes back."""

    sample: bytes
    label: str | None
    """None: not sure."""
    seconds: float
    is_accepted: bool = False
    """True if the person has touched nothing: it is the label that was shown, or a proposal."""
