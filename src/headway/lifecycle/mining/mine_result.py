"""Options and result of mining: what was asked, what was chosen, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from headway.core.text_format import align_table, pluralise
from headway.lifecycle.mining.choose import RANDOM_SHARE, Candidates, Pick
from headway.lifecycle.mining.copies_out import CopiesOut
from headway.lifecycle.mining.known_sets import HELD_OUT, LABELLED
from headway.lifecycle.mining.quotas import Share
from headway.lifecycle.mining.review import Review

FORMAT = 1
PAGE = "mine.html"


@final
@dataclass(frozen=True, kw_only=True)
class MineOptions:
    """Options of `mine`.

    Attributes:
        strategy, count, random_share, weights, quotas, seed: see `choose`.
        labelled: sets of images that are labelled already; empty: the training sets of the networks.
        held_out: sets of images for evaluation, whose copies are not chosen; empty: the evaluation sets of the
            networks, if they have any.
        keeps_copies: skip the search for near copies. Images whose bytes are in a known set are out nevertheless.
    """

    strategy: str = "margin"
    count: int = 100
    random_share: float = RANDOM_SHARE
    weights: tuple[Share, ...] = ()
    quotas: tuple[Share, ...] = ()
    seed: int = 0
    labelled: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    keeps_copies: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class MineResult:
    """The result of `mine`.

    Attributes:
        folder: the folder written.
        pool: the pool, and `fingerprint` its fingerprint.
        images: images of the pool.
        damaged: images that cannot be decoded.
        candidates: what the networks say about the images that could be chosen.
        picks: the choice.
        rows: rows of `picks.csv`, with the number of each image in the pool as `sample`.
        copies: near copies that were out; None: not searched for.
        equal: images that were out because a known set has their bytes; counted if copies were not searched for.
        review: what the arms gave, if the pool has true labels already; else None.
        about: options and runs, for `mine.json`.
    """

    folder: Path
    pool: str
    fingerprint: str
    images: int
    damaged: int
    candidates: Candidates
    picks: tuple[Pick, ...]
    rows: tuple[dict[str, Any], ...]
    copies: CopiesOut | None
    equal: int
    review: Review | None
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the networks' outputs."""
        return {
            "format": FORMAT,
            "pool": self.pool,
            "fingerprint": self.fingerprint,
            "images": self.images,
            "damaged": self.damaged,
            "candidates": len(self.candidates),
            **self.about,
            "classes": list(self.candidates.classes),
            "near_copies": None if self.copies is None else self.copies.to_json(),
            "equal_copies": self.equal,
            "review": None if self.review is None else self.review.to_json(),
            "picks": list(self.rows),
        }

    def describe(self) -> str:
        """Returns what was chosen, for the terminal."""
        lines = [f"{self.pool}: {pluralise(self.images, 'image')}, {len(self.candidates):,} to choose from."]
        if self.damaged:
            lines.append(f"{pluralise(self.damaged, 'image')} cannot be decoded.")
        if self.copies is not None and self.copies.is_out.any():
            counts = self.copies.count_by_set()
            phrases = {LABELLED: "labelled images", HELD_OUT: "held-out ones", "pool": "each other"}
            parts = [f"{counts[name]:,} of {text}" for name, text in phrases.items() if counts[name]]
            lines.append(f"Near copies that are out: {', '.join(parts)}.")
        if self.equal:
            lines.append(f"{pluralise(self.equal, 'image')} that are labelled or held out already are left out.")
        rows = [["arm", "images"]]
        for name in dict.fromkeys(pick.arm for pick in self.picks):
            rows.append([name, f"{sum(pick.arm == name for pick in self.picks):,}"])
        lines += align_table(rows)
        if self.review is not None:
            lines += ["The pool has labels of these classes, so the choice can be judged:", self.review.describe()]
        return "\n".join(lines)
