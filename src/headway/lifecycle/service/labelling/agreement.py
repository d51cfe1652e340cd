"""Agreement of people who have labelled the same samples, without having seen each other's labels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from headway.lifecycle.service.labelling.records import Mark


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Agreement of two people.

    Attributes:
        first, second: their names.
        samples: samples that both have labelled. Those of which one was not sure are left out.
        equal: samples with the same label.
        kappa: Cohen's kappa: agreement beyond chance, 1 if they always agree, 0 if chance alone would give it. None:
            there is no sample, or both used one class alone, so that chance gives everything.
    """

    first: str
    second: str
    samples: int
    equal: int
    kappa: float | None

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        kappa = None if self.kappa is None else round(self.kappa, 4)
        return {
            "first": self.first,
            "second": self.second,
            "samples": self.samples,
            "equal": self.equal,
            "kappa": kappa,
        }


def compute_kappa(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Returns Cohen's kappa (1960) of pairs of labels; None if it is not defined."""
    total = len(pairs)
    if not total:
        return None
    seen = sum(first == second for first, second in pairs) / total
    left, right = Counter(first for first, _ in pairs), Counter(second for _, second in pairs)
    chance = sum(left[label] * right[label] for label in left) / total**2
    return None if chance == 1 else (seen - chance) / (1 - chance)


def compare_people(marks: Iterable[Sequence[Mark]]) -> list[Agreement]:
    """Compares all people who have labelled the same samples, two by two.

    Args:
        marks: what different people said about each sample.
    """
    pairs = defaultdict[tuple[str, str], list[tuple[str, str]]](list)
    for group in marks:
        # Who looks again has seen the others' labels.
        unseen = [mark for mark in group if mark.role != "again"]
        sure = sorted((mark.by, mark.label) for mark in unseen if mark.label is not None)
        for place, (first, label) in enumerate(sure):
            for second, other in sure[place + 1 :]:
                pairs[first, second].append((label, other))
    return [
        Agreement(
            first=first,
            second=second,
            samples=len(found),
            equal=sum(label == other for label, other in found),
            kappa=compute_kappa(found),
        )
        for (first, second), found in sorted(pairs.items())
    ]
