"""Review of picks that have come back with labels: what the mined images gave, beside the random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from headway.core.statistics import compute_share_difference
from headway.core.text_format import align_table, pluralise
from headway.export.drop_bound import compute_share_bound
from headway.lifecycle.mining.choose import RANDOM

PICKS, RESULT = "picks.csv", "mine.json"
SHOWN_CLASSES = 5
"""Labels outside of the network's classes that are named."""


@final
@dataclass(frozen=True, kw_only=True)
class Arm:
    """Picks of one arm.

    Attributes:
        name: `random`, or a strategy.
        picks: number of images.
        labelled: those with a label.
        wrong: those of them whose label is not what the network proposed.
        low, high: 95 % interval of the share of wrong ones (Clopper and Pearson, exact).
    """

    name: str
    picks: int
    labelled: int
    wrong: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Share of wrong proposals among the labelled picks; 0 if there are none."""
        return self.wrong / self.labelled if self.labelled else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Gain:
    """Wrong proposals that an arm found beyond the random one.

    Attributes:
        name: the arm.
        difference: its share of wrong proposals less that of the random arm.
        low, high: 95 % interval of the difference; above 0, mining has been shown to find more than chance.
    """

    name: str
    difference: float
    low: float
    high: float


@final
@dataclass(frozen=True, kw_only=True)
class Review:
    """Wrong proposals of each arm.

    The random arm is an unbiased sample of the images to choose from, so 1 less its share of wrong proposals is the
    network's accuracy there, once all of it is labelled.

    Attributes:
        arms: the random arm first.
        outside: number of images of each label that is not one of the network's classes. They count as wrong.
    """

    arms: tuple[Arm, ...]
    outside: Mapping[str, int]

    @property
    def is_complete(self) -> bool:
        """True if every pick has a label."""
        return all(arm.labelled == arm.picks for arm in self.arms)

    @property
    def accuracy(self) -> tuple[float, float, float] | None:
        """Accuracy of the network with its 95 % interval; None unless all of the random arm is labelled."""
        first = next((arm for arm in self.arms if arm.name == RANDOM), None)
        # People skip images that are hard, so what they have labelled so far is not a fair sample.
        if first is None or not first.picks or first.labelled < first.picks:
            return None
        return 1 - first.share, 1 - first.high, 1 - first.low

    def list_gains(self) -> list[Gain]:
        """Returns the gain of each arm over the random one, as far as both have labels."""
        base = next((arm for arm in self.arms if arm.name == RANDOM and arm.labelled), None)
        gains = []
        for arm in self.arms:
            if base is not None and arm is not base and arm.labelled:
                found = compute_share_difference((arm.wrong, arm.labelled), (base.wrong, base.labelled))
                gains.append(Gain(name=arm.name, difference=found[0], low=found[1], high=found[2]))
        return gains

    def to_json(self) -> dict[str, Any]:
        """Returns the arms, gains, accuracy, and labels that the network does not know."""
        return {
            "arms": [asdict(arm) | {"share": arm.share} for arm in self.arms],
            "gains": [asdict(gain) for gain in self.list_gains()],
            "accuracy": None if self.accuracy is None else list(self.accuracy),
            "outside": dict(self.outside),
        }

    def build_table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the columns and rows of the table of the arms."""
        rows = []
        for arm in self.arms:
            found = [f"{arm.share:.1%}", f"{arm.low:.1%} to {arm.high:.1%}"] if arm.labelled else ["-", "-"]
            rows.append([arm.name, f"{arm.picks:,}", f"{arm.labelled:,}", f"{arm.wrong:,}", *found])
        return ["arm", "picks", "labelled", "network wrong", "share", "95 % interval"], rows

    def list_sentences(self) -> list[str]:
        """Returns what the table says: gains, the accuracy, and labels that the network does not know."""
        sentences = [_describe_gain(gain) for gain in self.list_gains()]
        if self.accuracy is not None:
            share, low, high = self.accuracy
            where = "the images to choose from"
            sentences.append(
                f"Accuracy of the network on {where}, by the random arm: {share:.1%} ({low:.1%} to {high:.1%})."
            )
        elif missing := sum(arm.picks - arm.labelled for arm in self.arms if arm.name == RANDOM):
            sentences.append(
                f"{pluralise(missing, 'random pick')} without a label yet: with all of them you get the accuracy."
            )
        if self.outside:
            names = ", ".join(sorted(self.outside)[:SHOWN_CLASSES])
            more = ", ..." if len(self.outside) > SHOWN_CLASSES else ""
            count = pluralise(sum(self.outside.values()), "label")
            sentences.append(f"{count} outside of the classes of the network, which was wrong there: {names}{more}.")
        return sentences

    def describe(self) -> str:
        """Returns the table and its sentences, for the terminal."""
        columns, rows = self.build_table()
        return "\n".join([*align_table([columns, *rows]), *self.list_sentences()])


def _describe_gain(gain: Gain) -> str:
    interval = f"({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
    shown = "" if gain.low > 0 else ": not shown to find more than chance"
    return f"{gain.name} less random: {100 * gain.difference:+.1f} points {interval}{shown}."


def review_rows(
    rows: Sequence[Mapping[str, Any]], classes: Sequence[str], before: Mapping[str, str] | None = None
) -> Review:
    """Counts the wrong proposals of each arm.

    Args:
        rows: rows of `picks.csv`, with `label`, `proposed`, `arm` and `name`. An empty label is none.
        classes: the network's classes.
        before: label of each image in the pool, by its name. If it is not one of the classes and still there, such as
            `unknown`, nobody has labelled the image yet. None: all labels count.
    """
    known, arms, outside = set(classes), list[Arm](), dict[str, int]()
    # The random arm first, the others in the order in which they occur.
    for name in sorted(dict.fromkeys(row["arm"] for row in rows), key=lambda name: name != RANDOM):
        own = [row for row in rows if row["arm"] == name]
        labelled = [row for row in own if is_labelled(row, known, before)]
        for label in [row["label"] for row in labelled if row["label"] not in known]:
            outside[label] = outside.get(label, 0) + 1
        wrong, total = sum(row["label"] != row["proposed"] for row in labelled), len(labelled)
        # Two bounds of 97.5 % are an interval of 95 %.
        low = 1 - compute_share_bound(total - wrong, total, 0.975) if total else 0.0
        high = compute_share_bound(wrong, total, 0.975)
        arms.append(Arm(name=name, picks=len(own), labelled=total, wrong=wrong, low=max(low, 0.0), high=high))
    return Review(arms=tuple(arms), outside=outside)


def is_labelled(row: Mapping[str, Any], classes: set[str], before: Mapping[str, str] | None) -> bool:
    """Returns True if a pick has a label; see `review_rows`."""
    label = row["label"]
    if not label:
        return False
    return label in classes or before is None or label != before.get(row["name"])
