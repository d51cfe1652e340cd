"""Answers of networks on the pinned evaluation split, and how the networks of two rounds compare by them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from headway.core.errors import DataError, UsageError
from headway.core.files import read_regular, write_atomically
from headway.core.run_folder import RunFolder
from headway.export.drop_bound import compute_flip_bound
from headway.training.evaluate import evaluate, open_evaluation_set
from headway.training.runs import load_trained

RIGHT = "right"
DRAWS = 2000
"""Draws of the bootstrap: the ends of a 95 % interval then move by some 1.5 % of its width from seed to seed."""


def judge_runs(runs: Sequence[Path]) -> NDArray[np.bool_]:
    """Returns which images of their evaluation set the best weights of runs have right, bool [runs, images].

    Raises:
        UsageError: the labels are not classes.
    """
    rows = []
    for run in runs:
        setup = load_trained(RunFolder.open(run))
        with closing(setup.inputs), closing(open_evaluation_set(setup, None, run)) as held_out:
            found = evaluate(setup, held_out)
            if found.predicted is None:
                what = "a loop compares networks that choose one of several classes"
                raise UsageError(what, where=str(run), fix="Use a recipe whose labels are classes.")
            # An image that cannot be decoded counts as wrong, for all networks.
            right = np.zeros(len(held_out), np.bool_)
            right[found.samples] = found.predicted == held_out.label[found.samples]
            rows.append(right)
    return np.stack(rows)


def write_answers(path: Path, right: NDArray[np.bool_]) -> None:
    """Writes the answers of a round."""
    write_atomically(path, save({RIGHT: right.astype(np.uint8)}))


def read_answers(path: Path) -> NDArray[np.bool_]:
    """Reads the answers of a round. Raises DataError if the file is damaged."""
    try:
        right: NDArray[Any] = load(read_regular(path))[RIGHT]
    # safetensors raises an error of its own class for damaged bytes.
    except Exception as error:
        fix = "Begin the loop anew with another --out."
        raise DataError(f"the answers cannot be read ({error})", where=str(path), fix=fix) from error
    return right.astype(np.bool_)


def describe_points(mean: float, low: float, high: float) -> str:
    """Returns a difference of shares and its interval in percentage points."""
    return f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


@final
@dataclass(frozen=True, kw_only=True)
class Gain:
    """Difference of mean accuracy between the members of two rounds, as a share.

    Attributes:
        mean: accuracy of the later members less that of the earlier ones.
        low, high: 95 % interval.
    """

    mean: float
    low: float
    high: float

    def describe(self) -> str:
        """Returns it in percentage points."""
        return describe_points(self.mean, self.low, self.high)


def compute_gain(before: NDArray[np.bool_], after: NDArray[np.bool_], seed: int = 0) -> Gain:
    """Compares the members of two rounds by a bootstrap that draws members and images.

    All of them have answered the same images, so each draw takes one sample of images for both rounds, and members of
    each round of its own. With few members the interval is somewhat too narrow.

    Args:
        before, after: right answers, bool [members, images].
    """
    generator = np.random.default_rng(seed)
    images = before.shape[1]
    gains = np.empty(DRAWS)
    for draw in range(DRAWS):
        shares = generator.integers(len(before), size=len(before)), generator.integers(len(after), size=len(after))
        difference = after[shares[1]].mean(axis=0) - before[shares[0]].mean(axis=0)
        gains[draw] = difference[generator.integers(images, size=images)].mean()
    low, high = np.quantile(gains, [0.025, 0.975])
    return Gain(mean=float(after.mean() - before.mean()), low=float(low), high=float(high))


@final
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Answer of the gate: may a new network take the place of the accepted one?

    Attributes:
        images: images of the pinned evaluation split.
        lost: images on which only the accepted network is right.
        won: images on which only the new one is.
        drop: accuracy of the accepted network less that of the new one, in points.
        bound: the drop is at most so large, with 95 % (exact, by the images on which the two differ), in points.
        allowed: largest drop that passes, in points.
        allowed_bound: largest bound that passes; None: any.
    """

    images: int
    lost: int
    won: int
    drop: float
    bound: float
    allowed: float
    allowed_bound: float | None

    @property
    def passed(self) -> bool:
        """True if the new network is accepted."""
        # Points are computed from counts, so that equal networks pass a gate of 0 exactly.
        return self.drop <= self.allowed and (self.allowed_bound is None or self.bound <= self.allowed_bound)

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return asdict(self) | {"passed": self.passed}

    def describe(self) -> str:
        """Returns a sentence for the terminal."""
        word = "accepted" if self.passed else "refused"
        return (
            f"{word}: {-self.drop:+.1f} points on {self.images:,} images, {self.won:,} won and {self.lost:,} lost; "
            f"worse by at most {max(self.bound, 0):.1f} points (95 %)"
        )


def compare(before: NDArray[np.bool_], after: NDArray[np.bool_], *, drop: float, bound: float | None) -> Verdict:
    """Compares two networks on the same images.

    Args:
        before, after: right answers of the accepted and of the new network, bool [images].
        drop, bound: what passes, in points; see `Verdict`.
    """
    lost, won, images = int((before & ~after).sum()), int((after & ~before).sum()), len(before)
    return Verdict(
        images=images,
        lost=lost,
        won=won,
        drop=100 * (lost - won) / images,
        bound=100 * compute_flip_bound(lost, won, images),
        allowed=drop,
        allowed_bound=bound,
    )
