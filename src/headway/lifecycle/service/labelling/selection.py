"""Selection of the samples of a grid: what a person wants to see, less what others have or have done. Pure arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.data.store_address import TRAIN, UNLABELLED
from headway.lifecycle.mining.choose import is_mined
from headway.lifecycle.service.labelling.records import Mark, Pick, Wish
from headway.lifecycle.store.rows import NO_LABEL, Rows

DOUBLE_ONE_IN = 20
"""One sample in this many is given to a second person too, for the agreement: 5 %."""

Keys = NDArray[np.bytes_]


@final
@dataclass(frozen=True, eq=False)
class Order:
    """The samples of a queue as arrays, in their order.

    Attributes:
        keys: IDs, [n].
        picks: what the queue says of each; empty: all samples of a version, of which no queue says anything.
        proposed: the classes that the queue proposes, sorted.
        places: the place of each ID in the queue.
    """

    keys: Keys
    picks: Sequence[Pick] = ()
    proposed: tuple[str, ...] = ()
    places: Mapping[bytes, int] = field(default_factory=dict)

    @staticmethod
    def build(picks: Sequence[Pick]) -> Order:
        """Builds the order of a queue."""
        proposed = sorted({pick.proposed for pick in picks} - {""})
        places = {pick.sample: place for place, pick in enumerate(picks)}
        return Order(build_keys(list(places)), picks, tuple(proposed), places)

    def find(self, samples: Sequence[bytes], rows: Rows) -> NDArray[np.int64]:
        """Returns the place of each ID, -1 where there is none. Args: rows: samples of the version."""
        if not self.picks:
            return rows.find(build_keys(samples))
        return np.array([self.places.get(sample, -1) for sample in samples], np.int64)


def build_keys(samples: Sequence[bytes]) -> Keys:
    """Returns IDs as one array, in the form of `Rows.keys`."""
    return np.array(samples, "S32") if samples else np.zeros(0, "S32")


def choose_mined_split(order: Order, rows: Rows, row: int, sample: bytes) -> str:
    """Returns the split for the first label of a sample: `train` if a strategy mined it; empty: as its name says."""
    place, splits = order.places.get(sample, -1), rows.schema.splits
    is_first = splits[int(rows.split[row])] == UNLABELLED
    return TRAIN if place >= 0 and is_mined(order.picks[place].arm) and is_first and TRAIN in splits else ""


def is_double(sample: bytes) -> bool:
    """Tells whether two people get a sample. Its ID is a hash, so any 4 bytes of it are a draw."""
    return int.from_bytes(sample[:4]) % DOUBLE_ONE_IN == 0


def needs_second(key: bytes, marks: Sequence[Mark], by: str) -> bool:
    """Tells whether a sample that somebody else has looked at is one that this person gets too."""
    return len(marks) == 1 and marks[0].by != by and is_double(key)


def select_samples(
    order: Order,
    rows: Rows,
    wish: Wish,
    by: str,
    marks: Mapping[bytes, Sequence[Mark]],
    leased: Sequence[bytes],
    in_slice: NDArray[np.bool_] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the places in the order, and the rows of the version, of all samples that a person can get now.

    Args:
        by: the person.
        marks: what was said already, by ID.
        leased: IDs of samples that somebody has at the moment.
        in_slice: True for the rows of the wanted slice, bool [n]; None: all of them.
    """
    found = rows.find(order.keys) if order.picks else np.arange(len(rows))
    is_wanted = found >= 0
    own = np.where(is_wanted, found, 0)
    # An empty version has no row to look at.
    label = rows.label[own] if len(rows) else np.zeros(len(own), np.int64)
    split = rows.split[own] if len(rows) else np.zeros(len(own), np.uint8)
    # Whoever labels a sample as the second one sees it as if it had no label yet.
    seconds = [key for key, known in marks.items() if needs_second(key, known, by)] if not wish.again else []
    is_second = _build_mask(order, rows, seconds)
    if wish.split:
        number = rows.schema.splits.index(wish.split) if wish.split in rows.schema.splits else -1
        is_wanted &= (split == number) | (is_second & (wish.split == UNLABELLED))
    if in_slice is not None:
        is_wanted &= in_slice[own] if len(rows) else False
    proposed = np.array([pick.proposed for pick in order.picks], object)
    if wish.label:
        number = rows.classes.index(wish.label) if wish.label in rows.classes else NO_LABEL - 1
        is_class = label == number
        if order.picks:
            is_class |= proposed == wish.label
        is_wanted &= is_class
    if wish.differs and order.picks:
        names = np.array([*rows.classes, ""], object)
        is_wanted &= (label != NO_LABEL) & (names[label] != proposed)
    if wish.has_copies and order.picks:
        is_wanted &= np.array([pick.copies for pick in order.picks]) > 0
    waiting = set(seconds)
    if wish.again:
        done = [key for key, known in marks.items() if any(mark.time_s >= wish.again for mark in known)]
    else:
        done = [key for key in marks if key not in waiting]
    is_wanted &= ~_build_mask(order, rows, [*done, *leased])
    places = np.flatnonzero(is_wanted)
    return places, found[places]


def describe_sample(
    order: Order, place: int, rows: Rows, row: int, marks: Sequence[Mark], by: str, is_open: bool
) -> dict[str, Any]:
    """Returns what the page shows of a sample. Args: is_open: show the label that somebody else has set."""
    sample = rows.get_sample(row)
    tree: dict[str, Any] = {"sha256": sample.sample, "name": sample.name, "label": sample.label, "split": sample.split}
    if order.picks:
        pick = order.picks[place]
        tree |= {name: getattr(pick, name) for name in ("proposed", "probability", "score", "arm", "copies")}
    if not is_open and needs_second(rows.keys[row].ljust(32, b"\0"), marks, by):
        # As it was before the first person looked.
        given = order.picks[place].given if order.picks else None
        tree |= {"label": given} | ({} if given is not None else {"split": UNLABELLED})
    return tree


def _build_mask(order: Order, rows: Rows, samples: Sequence[bytes]) -> NDArray[np.bool_]:
    """Returns True for these samples of an order."""
    mask = np.zeros(len(order.keys), np.bool_)
    places = order.find(samples, rows)
    mask[places[places >= 0]] = True
    return mask
