"""The choice: a random arm always, the best scores beside it, and options that cannot be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.lifecycle.mining.choose import STRATEGIES, Candidates, choose
from headway.lifecycle.mining.quotas import Share
from headway.lifecycle.mining.scores import compute_entropy, compute_margin

MINING = [name for name in STRATEGIES if name != "random"]


def make_candidates(seed: int = 0, count: int = 60) -> Candidates:
    generator = np.random.default_rng(seed)
    members = generator.dirichlet(np.ones(4), (3, count)).astype(np.float32)
    return Candidates(
        samples=np.sort(generator.choice(1000, count, replace=False)),
        names=[f"{'night' if number % 3 else 'day'}/{number}" for number in range(count)],
        classes=("a", "b", "c", "d"),
        probabilities=members.mean(axis=0),
        mean_entropy=compute_entropy(members).mean(axis=0),
        members=3,
        features=generator.normal(size=(count, 6)).astype(np.float32),
    )


@given(st.sampled_from(STRATEGIES), st.integers(0, 50), st.integers(1, 70), st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_each_image_once_and_always_a_random_arm(strategy: str, seed: int, count: int, share: float) -> None:
    candidates = make_candidates(seed)
    picks = choose(candidates, strategy, count, random_share=share, seed=seed)
    total = min(count, 60)
    assert len(picks) == len({pick.place for pick in picks}) == total
    arms = Counter(pick.arm for pick in picks)
    expected = total if strategy == "random" else min(total, max(1, round(total * share)))
    assert arms["random"] == expected
    assert set(arms) <= {"random", strategy}
    assert [pick.arm for pick in picks[:expected]] == ["random"] * expected
    assert all((pick.score is None) == (pick.arm == "random") for pick in picks)
    assert picks == choose(candidates, strategy, count, random_share=share, seed=seed)


@given(st.integers(0, 100))
def test_the_random_arm_depends_on_nothing_but_seed_and_pool(seed: int) -> None:
    """Neither on the strategy, nor on weights and quotas, nor on what the networks say."""
    candidates = make_candidates(1)
    other = replace(candidates, probabilities=candidates.probabilities[::-1].copy())
    options: list[tuple[Candidates, str, dict[str, Any]]] = [
        (candidates, "margin", {}),
        (other, "badge", {"weights": [Share("a", 9.0)]}),
        (candidates, "entropy", {"quotas": [Share("night/*", 1.0)]}),
    ]
    drawn = [
        [pick.place for pick in choose(one, name, 20, seed=seed, **more) if pick.arm == "random"]
        for one, name, more in options
    ]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(drawn[0]) == 4


def test_the_random_arm_is_uniform() -> None:
    candidates, counts = make_candidates(), np.zeros(60)
    for seed in range(600):
        counts[[pick.place for pick in choose(candidates, "random", 6, seed=seed)]] += 1
    # 60 expected, variance below 60: five standard deviations.
    assert np.abs(counts - 60).max() < 5 * np.sqrt(60)


@pytest.mark.parametrize(("strategy", "score"), [("margin", compute_margin), ("entropy", compute_entropy)])
def test_the_best_scores_are_taken(strategy: str, score: Any) -> None:
    candidates = make_candidates()
    picks = choose(candidates, strategy, 20)
    mined = [pick.place for pick in picks if pick.arm != "random"]
    scores = score(candidates.probabilities)
    left = [place for place in range(60) if place not in {pick.place for pick in picks}]
    assert scores[mined].tolist() == sorted(scores[mined].tolist(), reverse=True)
    assert scores[mined].min() >= scores[left].max()
    assert [pick.score for pick in picks if pick.arm != "random"] == pytest.approx(scores[mined].tolist())


@pytest.mark.parametrize("strategy", MINING)
def test_quotas_and_weights_hold_for_every_strategy(strategy: str) -> None:
    candidates = make_candidates()
    predicted = candidates.probabilities.argmax(axis=1)
    quotas = [Share("day/*", 0.5), Share("b", 0.25)]
    mined = [pick.place for pick in choose(candidates, strategy, 20, quotas=quotas) if pick.arm == strategy]
    day = [place for place in mined if candidates.names[place].startswith("day")]
    assert len(day) == 8
    assert sum(predicted[place] == 1 for place in mined if place not in day) == 4
    heavy = [pick for pick in choose(candidates, strategy, 11, weights=[Share("c", 1e4)]) if pick.arm == strategy]
    assert sum(predicted[pick.place] == 2 for pick in heavy) >= min(7, int((predicted == 2).sum()) - 2)


def test_labelled_images_are_centres() -> None:
    candidates = make_candidates()
    assert candidates.features is not None
    near = candidates.features[:50]
    mined = [pick.place for pick in choose(candidates, "k-center", 8, labelled_features=near) if pick.arm != "random"]
    assert all(place >= 50 for place in mined)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "magic"}, "there is no strategy 'magic'"),
        ({"count": 0}, "0 images"),
        ({"random_share": 0.0}, "a random share of 0"),
        ({"random_share": 1.5}, "a random share of 1.5"),
        ({"strategy": "random", "weights": [Share("a", 2)]}, "no weights and no quotas"),
        ({"strategy": "bald", "members": 1}, "compares the answers of several networks"),
        ({"strategy": "badge", "features": None}, "badge needs features"),
        ({"weights": [Share("e", 2)]}, "'e' is not a class"),
        ({"samples": np.empty(0, np.int64)}, "no image to choose from"),
    ],
)
def test_impossible_options(options: dict[str, Any], words: str) -> None:
    changes = {name: options.pop(name) for name in ("members", "features", "samples") if name in options}
    candidates = replace(make_candidates(), **changes)
    with pytest.raises(UsageError, match=words):
        choose(candidates, **{"strategy": "margin", "count": 5, **options})
