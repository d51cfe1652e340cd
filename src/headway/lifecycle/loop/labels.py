"""Picks of a round in the store: which samples they are, how many have a label, and the version that has all."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.core.errors import DataError
from headway.core.files import read_text, write_atomically
from headway.core.untrusted_json import JsonError, expect_entries, is_sha256, is_text, parse_object
from headway.data.store_address import TRAIN
from headway.lifecycle.mining.choose import is_mined
from headway.lifecycle.mining.review import RESULT
from headway.lifecycle.store.records import Change, Sample, Version
from headway.lifecycle.store.rows import NO_LABEL, Rows
from headway.lifecycle.store.store import Store


@final
@dataclass(frozen=True, kw_only=True)
class LoopPick:
    """An image that waits for a label.

    Attributes:
        sha256: ID of the sample.
        name: its name in the version that was mined.
        proposed: class that the networks propose.
        arm: `random`, or the strategy that chose it.
    """

    sha256: str
    name: str
    proposed: str
    arm: str


_CHECKS: Any = {
    "sha256": (is_sha256, "a SHA-256"),
    "name": (is_text, "a text"),
    "proposed": (is_text, "a text"),
    "arm": (is_text, "a text"),
}


def write_picks(path: Path, mined: Path, pool: Mapping[str, Sample]) -> list[LoopPick]:
    """Writes the IDs of the picks in a folder of `headway mine`.

    Args:
        pool: samples of the pool by their names.
    """
    try:
        rows = parse_object(read_text(mined / RESULT))["picks"]
        found = [
            LoopPick(sha256=pool[one["name"]].sample, name=one["name"], proposed=one["proposed"], arm=one["arm"])
            for one in rows
        ]
    except (OSError, JsonError, KeyError, TypeError) as error:
        fix = "Remove this folder, and the loop mines again."
        raise DataError(f"the picks cannot be read ({error})", where=str(mined / RESULT), fix=fix) from error
    write_atomically(path, json.dumps({"picks": [asdict(one) for one in found]}, indent=1, ensure_ascii=False) + "\n")
    return found


def read_picks(path: Path) -> list[LoopPick]:
    """Reads what `write_picks` has written. Raises DataError if it is damaged."""
    try:
        entries = parse_object(read_text(path)).get("picks")
        if not isinstance(entries, list):
            raise JsonError("it has no picks")
        for place, entry in enumerate(entries):
            expect_entries(entry, _CHECKS, f"picks[{place}].")
        return [LoopPick(**{name: entry[name] for name in _CHECKS}) for entry in entries]
    except (OSError, UnicodeDecodeError, JsonError) as error:
        fix = "Begin the loop anew with another --out."
        raise DataError(f"the picks cannot be read ({error})", where=str(path), fix=fix) from None


@final
@dataclass(frozen=True, kw_only=True)
class LabelCount:
    """How far the labels of a round are.

    Attributes:
        picks: images of the round.
        labels: label of each pick, in their order; None: it has none, or the image was removed.
        removed: picks that are not in the data set any more.
        unsure: picks without a label about which people are not sure.
        elsewhere: IDs of the mined picks with a label that lie in another split than `train`.
    """

    picks: int
    labels: tuple[str | None, ...]
    removed: int
    unsure: int
    elsewhere: tuple[str, ...]

    @property
    def labelled(self) -> int:
        """Number of picks with a label."""
        return sum(label is not None for label in self.labels)

    @property
    def missing(self) -> int:
        """Number of picks that still wait for a label."""
        return self.picks - self.labelled - self.removed - self.unsure

    def is_enough(self, share: float) -> bool:
        """Returns True if at least this share of the picks is done."""
        # Counted, because 0.9 * 10 is not 9 in every arithmetic.
        return self.missing <= self.picks - share * self.picks + 1e-9


def count_labels(rows: Rows, picks: Sequence[LoopPick], unsure: Collection[str] = ()) -> LabelCount:
    """Looks for the labels of picks in a version.

    Args:
        unsure: IDs of samples about which people are not sure, so that nobody waits for their labels.
    """
    found = rows.find(np.array([bytes.fromhex(pick.sha256) for pick in picks], "S32"))
    labels, elsewhere, train = list[str | None](), list[str](), rows.schema.find_split(TRAIN)
    for pick, row in zip(picks, found.tolist(), strict=True):
        label = NO_LABEL if row < 0 else int(rows.label[row])
        labels.append(None if label == NO_LABEL else rows.classes[label])
        if label != NO_LABEL and is_mined(pick.arm) and int(rows.split[row]) != train:
            elsewhere.append(pick.sha256)
    doubtful = sum(
        row >= 0 and label is None and pick.sha256 in unsure
        for pick, row, label in zip(picks, found.tolist(), labels, strict=True)
    )
    return LabelCount(
        picks=len(picks),
        labels=tuple(labels),
        removed=int((found < 0).sum()),
        unsure=doubtful,
        elsewhere=tuple(elsewhere),
    )


def settle_picks(store: Store, name: str, picks: Sequence[LoopPick], message: str) -> Version:
    """Moves mined picks with a label into the split `train`, and returns the version in which all of them are there.

    The name of a sample says where it goes when it gets its label. Images that networks chose are hard ones, so an
    evaluation set must not grow by them. Killed and called again, this makes no second version.
    """
    while True:
        _, head = store.history.find(name)
        count = count_labels(store.read_rows(f"{name}@{head.version}"), picks)
        if not count.elsewhere:
            return head
        moves = [Change(operation="move", sample=sample, split=TRAIN) for sample in count.elsewhere]
        store.apply(name, moves, by="headway loop", message=message)
