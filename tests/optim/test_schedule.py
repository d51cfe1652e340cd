from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import RecipeError, UsageError
from headway.optim import Schedule, read_schedule

EPOCH = 100
EVERY: list[dict[str, Any]] = [
    {"name": "constant"},
    {"name": "step", "every_epochs": 4},
    {"name": "multi_step", "milestones_epochs": [4, 8]},
    {"name": "exponential", "every_epochs": 2.5, "gamma": 0.5},
    {"name": "cosine", "end": 0.1},
    {"name": "polynomial", "power": 2, "end": 0.01},
    {"name": "triangular", "start": 0.2, "peak": 0.25, "end": 0.05},
]


def schedule(epochs: float = 10, **options: Any) -> Schedule:
    return Schedule(read_schedule(**options), total=round(epochs * EPOCH), epoch=EPOCH)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "constant"}, {0: 1, 500: 1, 1000: 1}),
        ({"name": "constant", "warmup_epochs": 2, "warmup_start": 0.5}, {0: 0.5, 50: 0.625, 100: 0.75, 200: 1, 999: 1}),
        ({"name": "multi_step", "milestones_epochs": [3, 6.5], "gamma": 0.5}, {299: 1, 300: 0.5, 649: 0.5, 650: 0.25}),
        ({"name": "multi_step", "milestones_epochs": [0.29], "gamma": 0.5}, {28: 1, 29: 0.5}),
        ({"name": "step", "every_epochs": 2.5, "gamma": 0.5}, {0: 1, 249: 1, 250: 0.5, 500: 0.25, 1000: 0.0625}),
        ({"name": "step", "every_epochs": 0.07, "gamma": 0.5}, {6: 1, 7: 0.5, 13: 0.5, 14: 0.25}),
        ({"name": "exponential", "every_epochs": 2, "gamma": 0.5}, {0: 1, 100: 0.5**0.5, 200: 0.5, 1000: 2**-5}),
        (
            {"name": "exponential", "every_epochs": 4, "gamma": 0.25, "warmup_epochs": 2},
            {0: 0, 100: 0.5, 200: 1, 400: 0.5, 1000: 0.0625},
        ),
        (
            {"name": "constant", "warmup_epochs": 4, "warmup_power": 2, "warmup_start": 0.2},
            {0: 0.2, 100: 0.25, 200: 0.4, 400: 1},
        ),
        ({"name": "constant", "warmup_epochs": 4, "warmup_power": 0.5}, {0: 0, 100: 0.5, 225: 0.75, 400: 1}),
        ({"name": "cosine"}, {0: 1, 250: 0.5 + 0.5**1.5, 500: 0.5, 1000: 0}),
        ({"name": "cosine", "warmup_epochs": 2, "end": 0.2}, {0: 0, 100: 0.5, 200: 1, 600: 0.6, 1000: 0.2}),
        ({"name": "polynomial"}, {0: 1, 500: 0.25, 900: 0.01, 1000: 0}),
        ({"name": "polynomial", "power": 1, "end": 0.5, "warmup_epochs": 5}, {250: 0.5, 500: 1, 750: 0.75, 1000: 0.5}),
        ({"name": "triangular", "start": 0.2, "peak": 0.2, "end": 0.1}, {0: 0.2, 100: 0.6, 600: 0.55, 1000: 0.1}),
    ],
)
def test_values_by_hand(options: dict[str, Any], expected: dict[int, float]) -> None:
    factor = schedule(**options)
    assert {position: factor(position) for position in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("options", EVERY)
def test_beyond_the_end_nothing_moves(options: dict[str, Any]) -> None:
    factor = schedule(**options)
    end = {"constant": 1.0, "step": 0.1**2, "multi_step": 0.1**2, "exponential": 0.5**4}.get(
        options["name"], options.get("end")
    )
    assert factor(1000) == factor(1001) == factor(10**9) == pytest.approx(end)


@pytest.mark.parametrize("options", EVERY[:-1])
@given(
    warmup=st.integers(0, 399),
    start=st.floats(0, 1),
    power=st.sampled_from([0.5, 1, 2]) | st.floats(0.1, 10),
    total=st.integers(400, 3000),
    cut=st.integers(0, 3000),
)
def test_it_rises_in_the_warmup_and_falls_after(
    options: dict[str, Any], warmup: int, start: float, power: float, total: int, cut: int
) -> None:
    warm = {"warmup_epochs": warmup / EPOCH, "warmup_start": start, "warmup_power": power} if warmup else {}
    factor = Schedule(read_schedule(**options, **warm), total=total, epoch=EPOCH)
    values = [factor(position) for position in range(total + 1)]
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    assert all(after <= before + 1e-12 for before, after in pairwise(values[warmup:]))
    assert values[warmup] == pytest.approx(1)
    if warmup:
        assert values[0] == start
        steps = np.diff(values[: warmup + 1])
        assert (steps >= -1e-12).all()
        if power == 1:  # a line up to the top: a constant increment, and no jump where the schedule proper begins
            assert np.allclose(steps, (1 - start) / warmup, rtol=0, atol=1e-9)
        else:  # 2 begins slowly, the square root fast; the last step is no jump either
            assert (np.diff(steps) * (power - 1) >= -1e-9).all()
            assert steps[-1] <= (1 - start) * (1 - (1 - 1 / warmup) ** power) + 1e-9
    assert Schedule(read_schedule(**options, **warm), total=total, epoch=EPOCH)(cut) == factor(cut)


@given(st.floats(0, 1), st.floats(0.01, 0.99), st.floats(0, 1), st.integers(1, 2000))
def test_a_triangle_is_two_lines(start: float, peak: float, end: float, total: int) -> None:
    recipe = read_schedule(name="triangular", start=start, peak=peak, end=end)
    factor = Schedule(recipe, total=total, epoch=EPOCH)
    assert factor(0) == pytest.approx(start)
    assert factor(total) == end
    slope = max((1 - start) / peak, (1 - end) / (1 - peak)) / total
    for position in range(total):
        assert 0 <= factor(position) <= 1 + 1e-12
        assert abs(factor(position + 1) - factor(position)) <= slope + 1e-9


def torch_factors(scheduler: Any, count: int) -> list[float]:
    factors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the order of optimizer.step() and scheduler.step() does not matter here
        for _ in range(count):
            factors.append(scheduler.get_last_lr()[0])
            scheduler.step()
    return factors


def mxnet_factors(falls_after: list[int], count: int) -> list[float]:
    """FactorScheduler and MultiFactorScheduler of MXNet, of the updates 1, 2, ...: once num_update is above a step, the
    rate has been halved there."""
    return [0.5 ** sum(update > step for step in falls_after) for update in range(1, count + 1)]


@pytest.mark.parametrize(("batch", "samples"), [(1, 1000), (256, 50_000), (32, 1_281_167), (8192, 1_281_167)])
def test_falls_after_so_many_steps_are_written_in_epochs(batch: int, samples: int) -> None:
    """steps * batch / samples epochs are so many steps: FactorScheduler(step=250, factor=0.5), and
    MultiFactorScheduler(step=[250, 750, 900], factor=0.5)."""
    every = read_schedule(name="step", every_epochs=250 * batch / samples, gamma=0.5)
    some = read_schedule(
        name="multi_step", milestones_epochs=tuple(step * batch / samples for step in (250, 750, 900)), gamma=0.5
    )
    for recipe, falls in ((every, [250, 500, 750]), (some, [250, 750, 900])):
        factor = Schedule(recipe, total=1000 * batch, epoch=samples)
        assert [factor(step * batch) for step in range(1000)] == mxnet_factors(falls, 1000)
        assert [turn.position for turn in factor.list_turns()] == [step * batch for step in falls]


def test_warm_up_from_the_small_batchs_rate_has_a_constant_increment() -> None:
    """Goyal et al. 2017: from eta, by a constant amount an iteration, to k eta after five epochs; then the schedule."""
    k, batch, samples = 32, 8192, 1_281_167
    recipe = read_schedule(name="multi_step", milestones_epochs=(30, 60, 80), warmup_epochs=5, warmup_start=1 / k)
    factor = Schedule(recipe, total=90 * samples, epoch=samples)
    lr = [0.1 * k * factor(step * batch) for step in range(90 * samples // batch)]
    last = 5 * samples // batch
    assert lr[0] == pytest.approx(0.1)
    assert np.allclose(np.diff(lr[: last + 1]), (3.2 - 0.1) * batch / (5 * samples), rtol=1e-9)
    assert set(np.round(lr[last + 1 :], 9)) == {3.2, 0.32, 0.032, 0.0032}


def test_marks_are_where_it_turns() -> None:
    def marks(**options: Any) -> list[tuple[int, str]]:
        return [tuple(turn) for turn in schedule(**options).list_turns()]

    assert marks(name="constant") == marks(name="cosine") == []
    assert marks(name="cosine", warmup_epochs=2) == [(200, "end of the warm-up")]
    assert marks(name="triangular", peak=0.3) == [(300, "peak")]
    assert marks(name="step", every_epochs=4, gamma=0.5) == [(400, "falls to x 0.5"), (800, "falls to x 0.25")]
    assert marks(name="multi_step", milestones_epochs=[5, 10]) == [(500, "falls to x 0.1")]
    assert marks(name="cosine", warmup_epochs=10) == []  # the run ends there


def test_agreement_with_torch() -> None:
    from torch.optim import lr_scheduler as peers

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    multi_step = read_schedule(name="multi_step", milestones_epochs=(0.3, 0.6), gamma=0.3)
    warm = read_schedule(name="constant", warmup_epochs=0.4, warmup_start=0.25)
    warm_cosine = read_schedule(name="cosine", warmup_epochs=0.2, warmup_start=0.1)
    linear, cosine = peers.LinearLR, peers.CosineAnnealingLR
    one = optimizer()
    step = read_schedule(name="step", every_epochs=0.3, gamma=0.5)
    exponential = read_schedule(name="exponential", every_epochs=0.01, gamma=0.97)
    pairs = [
        (step, peers.StepLR(optimizer(), 30, gamma=0.5)),
        (exponential, peers.ExponentialLR(optimizer(), gamma=0.97)),
        (read_schedule(name="cosine", end=0.1), cosine(optimizer(), 100, eta_min=0.1)),
        (read_schedule(name="polynomial", power=1.5), peers.PolynomialLR(optimizer(), 100, power=1.5)),
        (multi_step, peers.MultiStepLR(optimizer(), [30, 60], gamma=0.3)),
        (warm, linear(optimizer(), start_factor=0.25, total_iters=40)),
        (warm_cosine, peers.SequentialLR(one, [linear(one, 0.1, total_iters=20), cosine(one, 80)], [20])),
        (
            read_schedule(name="triangular", start=0.25, peak=0.5, end=0.25),
            peers.CyclicLR(optimizer(), 0.25, 1.0, step_size_up=50, cycle_momentum=False),
        ),
    ]
    for recipe, peer in pairs:
        ours = Schedule(recipe, total=100, epoch=100)
        expected = torch_factors(peer, 100)
        assert [ours(position) for position in range(100)] == pytest.approx(expected, abs=1e-9), recipe.name


def test_steps_across_an_epochs_end_move_on_evenly() -> None:
    # batches of 64 in epochs of 100: the factor is the position's, whatever the batch
    factor = schedule(name="cosine")
    assert [factor(p) for p in range(0, 1000, 64)] == [
        (1 + math.cos(math.pi * p / 1000)) / 2 for p in range(0, 1000, 64)
    ]


def test_a_run_of_nothing_but_warmup() -> None:
    for options in EVERY[:-1]:
        factor = schedule(epochs=3, **options, warmup_epochs=3)
        assert factor(150) == pytest.approx(0.5)
        assert factor(300) == pytest.approx(1)
    cut = schedule(epochs=2, name="cosine", warmup_epochs=3)  # as for a run that ends at a step just before its epochs
    assert cut(100) == pytest.approx(0.5)
    assert cut(200) == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "constant", "end": 0.1}, "belongs to"),
        ({"name": "cosine", "power": 2}, "belongs to"),
        ({"name": "cosine", "milestones_epochs": [1]}, "belongs to"),
        ({"name": "polynomial", "gamma": 0.1}, "belongs to"),
        ({"name": "cosine", "peak": 0.2}, "belongs to"),
        ({"name": "triangular", "warmup_epochs": 1}, "belongs to"),
        ({"name": "cosine", "warmup_start": 0.1}, "'warmup_start' counts only in a warm-up"),
        ({"name": "cosine", "warmup_power": 2}, "'warmup_power' counts only in a warm-up"),
        ({"name": "cosine", "warmup_start": "base"}, "'warmup_start' counts only in a warm-up"),
        ({"name": "cosine", "warmup_epochs": 1, "warmup_power": 0}, "more than 0"),
        (
            {"name": "cosine", "warmup_epochs": 1, "warmup_start": "bass"},
            "must be a number or 'base', not 'bass'. Did you mean 'base'?",
        ),
        ({"name": "cosine", "every_epochs": 1}, "belongs to"),
        ({"name": "exponential", "end": 0.1}, "belongs to"),
        ({"name": "step"}, "the key 'schedule.every_epochs' is missing"),
        ({"name": "exponential"}, "the key 'schedule.every_epochs' is missing"),
        ({"name": "step", "every_epochs": 0}, "more than 0"),
        ({"name": "step", "every_epochs": 1, "gamma": 1}, "less than 1"),
        (
            {"name": "step", "every_epochs": 2, "warmup_epochs": 5},
            "the first fall at epoch 2 lies inside the warm-up. Set warmup_epochs to at most 2",
        ),
        ({"name": "multi_step"}, "the key 'schedule.milestones_epochs' is missing"),
        ({"name": "multi_step", "milestones_epochs": []}, "must be a list of 1 or more"),
        ({"name": "multi_step", "milestones_epochs": [2, 2]}, "do not rise"),
        ({"name": "multi_step", "milestones_epochs": [2], "warmup_epochs": 5}, "lies inside the warm-up"),
        ({"name": "multi_step", "milestones_epochs": [0]}, "more than 0"),
        ({"name": "stair"}, "schedule.name must be 'constant', 'step',"),
        ({"name": "triangular", "peak": 1}, "less than 1"),
        ({"name": "cosine", "end": 1.5}, "at most 1"),
        ({"name": "cosine", "warmup_epochs": -1}, "at least 0"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_schedule(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize("options", EVERY)
def test_a_resolved_recipe_shows_what_counts_and_reads_back(options: dict[str, Any]) -> None:
    recipe = read_schedule(**options)
    shown = recipe.model_dump(mode="json")
    assert read_schedule(**shown) == recipe
    assert ("gamma" in shown) == (recipe.name in ("step", "multi_step", "exponential"))
    assert ("warmup_epochs" in shown) == (recipe.name != "triangular")


def test_a_base_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="warm-up starts at base, and the base of the learning rate is not known"):
        schedule(name="cosine", warmup_epochs=1, warmup_start="base")
