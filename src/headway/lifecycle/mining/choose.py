"""Chooses images of a pool by what networks say about them, beside a random sample that is always there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.random_keys import draw_words, make_keys
from headway.lifecycle.mining.badge import Badge
from headway.lifecycle.mining.k_center import KCenter
from headway.lifecycle.mining.quotas import Share, apportion, compute_weights, divide_by_quota
from headway.lifecycle.mining.scores import compute_bald, compute_entropy, compute_margin

Strategy = Literal["margin", "entropy", "bald", "k-center", "badge", "random"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
NEEDS_FEATURES = ("k-center", "badge")
RANDOM = "random"

RANDOM_SHARE, LEAST_RANDOM_SHARE = 0.2, 0.05
"""Share of the picks that is always random. Without it nobody could tell what mining is worth, and a set of mined
images alone says nothing about the accuracy on the pool."""

_STREAM_RANDOM_ARM = 1
"""Stream of the random arm's draws, from the key of (seed, image)."""


def is_mined(arm: str) -> bool:
    """Tells whether a strategy has chosen the picks of an arm: they become training images.

    By the hash of their names, some would go to the evaluation set, which would fill with hard images that a network
    chose. Random picks are a fair sample of the pool, and go where their names say.
    """
    return arm in STRATEGIES and arm != RANDOM


Take = Callable[[NDArray[np.bool_], int], list[tuple[int, float]]]
"""Takes a number of images of a mask; returns the place and the score of each."""


@final
@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Outputs of networks for n images that may be chosen.

    Attributes:
        samples: number of each image in its pool, int64 [n].
        names: name of each image in its pool.
        classes: names of the classes.
        probabilities: mean of the members' probabilities, float32 [n, classes].
        mean_entropy: mean of the members' entropies, float32 [n].
        members: number of networks.
        features: input of the last layer of the first member, float32 [n, d]; None: not computed.
    """

    samples: NDArray[np.int64]
    names: Sequence[str]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    mean_entropy: NDArray[np.float32]
    members: int
    features: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.samples)


@final
@dataclass(frozen=True, kw_only=True)
class Pick:
    """An image that is to be labelled.

    Attributes:
        place: its place among the candidates.
        arm: `random`, or the strategy that chose it.
        score: its score, with its weight; for k-center and badge its distance to what was taken before. None for a
            random pick.
    """

    place: int
    arm: str
    score: float | None


def choose(
    candidates: Candidates,
    strategy: str,
    count: int,
    *,
    random_share: float = RANDOM_SHARE,
    weights: Sequence[Share] = (),
    quotas: Sequence[Share] = (),
    labelled_features: NDArray[np.float32] | None = None,
    seed: int = 0,
) -> list[Pick]:
    """Chooses images to label: first a random sample of all candidates, then the others by a strategy.

    The random sample is uniform whatever weights and quotas say, so it is an unbiased sample of the candidates.

    Args:
        strategy: one of STRATEGIES.
        count: number of images; fewer if there are no more.
        random_share: share of them that is random, at least 0.05; rounded, and at least one image.
        weights: factors on the scores, or distances, of classes and slices.
        quotas: shares of the mined picks for classes and slices.
        labelled_features: features of images that are labelled already, for k-center.
        seed: seed of the random sample and of badge.

    Returns:
        the picks in the order in which they were taken, the random ones first.

    Raises:
        UsageError: an option is wrong, or the candidates lack what the strategy needs.
    """
    _check(candidates, strategy, count, random_share)
    if strategy == RANDOM and (weights or quotas):
        what = "a random choice has no weights and no quotas"
        raise UsageError(what, where="--strategy", fix="Leave them out, or use margin.")
    count = min(count, len(candidates))
    num_random = count if strategy == RANDOM else min(count, max(1, round(count * random_share)))
    # By the key of (seed, image): what the networks say has no part in it, and a larger sample holds a smaller one.
    words = draw_words(make_keys(seed, 0, candidates.samples), _STREAM_RANDOM_ARM)
    drawn = np.argsort(words, kind="stable")[:num_random].tolist()
    picks = [Pick(place=place, arm=RANDOM, score=None) for place in drawn]
    # A random pick is not mined again, even where its score is the best: the arms share no image.
    eligible = np.ones(len(candidates), np.bool_)
    eligible[drawn] = False
    if not (num_mined := count - num_random):
        return picks
    predicted = candidates.probabilities.argmax(axis=1)
    facts = (candidates.classes, predicted, candidates.names)
    factors = compute_weights(weights, *facts)
    take = _build_strategy(candidates, strategy, factors, labelled_features, drawn, seed)
    masks, shares = divide_by_quota(quotas, *facts)
    # Quotas are shares of the mined picks: the random arm stays a fair sample.
    masks = [mask & eligible for mask in masks]
    parts = apportion(num_mined, shares, [int(mask.sum()) for mask in masks])
    for mask, part in zip(masks, parts, strict=True):
        picks += [Pick(place=place, arm=strategy, score=score) for place, score in take(mask, part)]
    return picks


def _check(candidates: Candidates, strategy: str, count: int, random_share: float) -> None:
    if strategy not in STRATEGIES:
        raise UsageError(f"there is no strategy {strategy!r}", where="--strategy", fix=f"Use {', '.join(STRATEGIES)}.")
    if count < 1:
        raise UsageError(f"{count} images to choose", where="--count", fix="Set it to 1 or more.")
    if not LEAST_RANDOM_SHARE <= random_share <= 1:
        what = f"a random share of {random_share:g}"
        fix = f"Set it to {LEAST_RANDOM_SHARE} to 1: without random picks nobody can tell what mining is worth."
        raise UsageError(what, where="--random-share", fix=fix)
    if not len(candidates):
        raise UsageError("there is no image to choose from", fix="Name a pool with other images.")
    if strategy == "bald" and candidates.members < 2:
        what = "bald compares the answers of several networks, and there is one"
        raise UsageError(what, where="--runs", fix="Name several runs of other seeds, or use margin.")
    if strategy in NEEDS_FEATURES and candidates.features is None:
        raise UsageError(f"{strategy} needs features", fix="Compute them with the probabilities.")


def _build_strategy(
    candidates: Candidates,
    strategy: str,
    weights: NDArray[np.float32] | None,
    labelled_features: NDArray[np.float32] | None,
    drawn: Sequence[int],
    seed: int,
) -> Take:
    probabilities = candidates.probabilities
    if strategy in NEEDS_FEATURES:
        assert candidates.features is not None
        picker: KCenter | Badge
        if strategy == "k-center":
            picker = KCenter(candidates.features, weights, labelled_features)
        else:
            picker = Badge(probabilities, candidates.features, weights, seed)
        # Random picks are labelled too, so nothing near them is worth a second label.
        for place in drawn:
            picker.add(place)
        return picker.take
    if strategy == "margin":
        scores = compute_margin(probabilities)
    elif strategy == "entropy":
        scores = compute_entropy(probabilities)
    else:
        scores = compute_bald(probabilities, candidates.mean_entropy)
    if weights is not None:
        scores = scores * weights

    def take(mask: NDArray[np.bool_], count: int) -> list[tuple[int, float]]:
        # Stable: of equal scores the first image wins, on every machine.
        order = np.argsort(-scores, kind="stable")
        found = order[mask[order]][:count]
        return list(zip(found.tolist(), scores[found].tolist(), strict=True))

    return take
