"""Business weights and quotas: how much classes, and slices of a pool, matter to the one who pays for the labels."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError, suggest_nearest

_PATTERN = re.compile(r"[*?\[/]")


@final
@dataclass(frozen=True)
class Share:
    """A number for a class or a slice: a weight, or a quota.

    Attributes:
        name: a class, which holds for images that are predicted as it; or a pattern of names, such as `night/*`.
        value: a weight above 0, or a quota from 0 to 1.
    """

    name: str
    value: float


def parse_share(text: str, option: str, *, most: float = math.inf) -> Share:
    """Parses `NAME=NUMBER`, for example `cat=3` or `night/*=0.25`.

    Args:
        option: the option that has the text, for messages.
        most: largest number.

    Raises:
        UsageError: it has another form, or the number is not above 0 and at most `most`.
    """
    name, equals, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not equals or not name.strip() or not (0 < value <= most and math.isfinite(value)):
        limit = "above 0" if math.isinf(most) else f"above 0 and at most {most:g}"
        fix = f"Write {option} NAME=NUMBER, NAME a class or a pattern such as 'night/*', NUMBER {limit}."
        raise UsageError(f"{text!r} is not of the form NAME=NUMBER", where=option, fix=fix)
    return Share(name.strip(), value)


def expect_once(shares: Sequence[Share], option: str) -> None:
    """Raises UsageError if a name has two numbers."""
    names = [share.name for share in shares]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{twice!r} is named twice", where=option, fix="Name it once.")


def find_matches(
    share: Share, classes: Sequence[str], predicted: NDArray[np.int64], names: Sequence[str]
) -> NDArray[np.bool_]:
    """Returns a mask of the images that a share is about, bool [n].

    Args:
        classes: names of the network's classes.
        predicted: predicted class of each image.
        names: name of each image in its pool.

    Raises:
        UsageError: the name is neither a class nor a pattern; or no image of the pool fits the pattern.
    """
    # A class may look like a pattern, so classes come first.
    if share.name in classes:
        return np.asarray(predicted == classes.index(share.name))
    if not _PATTERN.search(share.name):
        fix = f"{suggest_nearest(share.name, classes)} Or give a pattern of names, such as 'night/*'."
        raise UsageError(f"{share.name!r} is not a class of the network", fix=fix.strip())
    found = np.array([fnmatchcase(name, share.name) for name in names], np.bool_)
    if not found.any():
        hint = f" Names are such as {names[0]!r}." if len(names) else ""
        raise UsageError(f"no image of the pool fits the pattern {share.name!r}", fix=f"Correct the pattern.{hint}")
    return found


def compute_weights(
    weights: Sequence[Share], classes: Sequence[str], predicted: NDArray[np.int64], names: Sequence[str]
) -> NDArray[np.float32] | None:
    """Returns the product of the weights of each image, float32 [n]; None if there are no weights.

    Raises:
        UsageError: a name has two weights; or as `find_matches`.
    """
    if not weights:
        return None
    expect_once(weights, "--weight")
    out = np.ones(len(predicted), np.float32)
    for one in weights:
        out[find_matches(one, classes, predicted, names)] *= one.value
    return out


def divide_by_quota(
    quotas: Sequence[Share], classes: Sequence[str], predicted: NDArray[np.int64], names: Sequence[str]
) -> tuple[list[NDArray[np.bool_]], list[float]]:
    """Divides a pool into groups, each with its share of the picks.

    An image belongs to the first quota that it fits. All others are one group, with the share that is left.

    Returns:
        a mask of each group, bool [n], and its share; shares add up to 1.

    Raises:
        UsageError: quotas add up to more than 1, or a name has two; or as `find_matches`.
    """
    expect_once(quotas, "--quota")
    total = math.fsum(one.value for one in quotas)
    if total > 1 + 1e-9:
        raise UsageError(f"the quotas add up to {total:g}", where="--quota", fix="Let them add up to 1 at most.")
    left = np.ones(len(predicted), np.bool_)
    masks = []
    for one in quotas:
        masks.append(left & find_matches(one, classes, predicted, names))
        left = left & ~masks[-1]
    return [*masks, left], [*(one.value for one in quotas), max(0.0, 1 - total)]


def apportion(count: int, shares: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Divides `count` by shares with the method of largest remainders (Hamilton).

    Each gets its quota rounded down; those with the largest remainders get one more, of equal ones the first. A group
    that has fewer images than its part leaves the rest to the others, by their shares; groups with a share of 0 come
    last.

    Args:
        limits: images of each group.

    Returns:
        the part of each group; they add up to `count`, or to all images if there are fewer.
    """
    # Fractions: the float 0.1 times 30 would be a little more than 3.
    exact = [Fraction(share).limit_denominator(10**6) for share in shares]
    out, count = [0] * len(shares), min(count, sum(limits))
    while (left := count - sum(out)) > 0:
        open_groups = [group for group, limit in enumerate(limits) if out[group] < limit]
        total = sum(exact[group] for group in open_groups)
        # Only groups without a share are left: they share alike.
        parts = {group: left * (exact[group] / total if total else Fraction(1, len(open_groups)))
                 for group in open_groups}  # fmt: skip
        floors = {group: math.floor(part) for group, part in parts.items()}
        ranked = sorted(open_groups, key=lambda group: floors[group] - parts[group])
        for group in ranked[: left - sum(floors.values())]:
            floors[group] += 1
        for group, part in floors.items():
            out[group] = min(limits[group], out[group] + part)
    return out
