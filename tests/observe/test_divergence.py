"""A run that diverges is told within few logging steps, with its layer; a healthy one never is."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.observe.divergence import DivergenceDetector

Losses = NDArray[np.float64]

LENGTH = 600


def told(losses: Losses, every: int, watch: DivergenceDetector | None = None) -> tuple[int, str] | None:
    """(step, sentence) of the first logging step that says something."""
    watch = watch or DivergenceDetector()
    for step in range(every, len(losses) + 1, every):
        said = watch.check(step, losses[step - every : step])
        if said is not None:
            return step, said
    return None


@st.composite
def healthy(draw: st.DrawFn) -> Losses:
    """From any level down to a share of it, by any speed, behind a bump of the warm-up; noise as of small batches, and
    spikes."""
    make = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps = np.arange(LENGTH)
    level, floor = draw(st.sampled_from([1e-3, 0.7, 2.3, 6.9, 400.0])), draw(st.floats(0, 0.98))
    curve = level * (floor + (1 - floor) * np.exp(-steps / draw(st.floats(3, 2000))))
    bump, width = draw(st.floats(0, 0.4)), draw(st.integers(1, 60))
    curve *= 1 + bump * np.exp(-(((steps - width) / width) ** 2))
    noise = draw(st.floats(0, 0.5))
    curve *= np.exp(noise * make.standard_normal(LENGTH) - noise**2 / 2)
    for _ in range(draw(st.integers(0, 6))):
        start = 40 * draw(st.integers(0, LENGTH // 40 - 1)) + draw(st.integers(5, 30))
        curve[start : start + draw(st.integers(1, 4))] *= draw(st.floats(1, 100))
    return curve


@settings(max_examples=15, deadline=None)
@given(healthy(), st.sampled_from([1, 3, 10, 50, 120]))
def test_noise_spikes_and_warm_up_are_no_divergence(losses: Losses, every: int) -> None:
    assert told(losses, every) is None


@settings(max_examples=30, deadline=None)
@given(healthy(), st.sampled_from([1, 3, 10, 50]), st.integers(20, 300), st.floats(0.02, 1.0), st.floats(0.0, 0.6))
def test_a_loss_that_grows_is_told_within_four_logging_steps(
    losses: Losses, every: int, start: int, speed: float, jumps: float
) -> None:
    """Counted from when it is eight times that of the first step; where they are short, within 60 steps."""
    make = np.random.default_rng(start)
    steps = np.arange(LENGTH - start)
    blown = np.minimum(np.exp(speed * steps + jumps * make.standard_normal(len(steps))), 1e30)
    losses = losses.copy()
    losses[start:] = np.maximum(losses[start:], losses[0] * blown)
    high = start + math.ceil(math.log(8) / speed)
    if (found := told(losses, every)) is None:
        assert high + 4 * every + 60 > LENGTH
    else:
        assert start <= found[0] <= high + 4 * every + 60
        assert "The run diverges: at step" in found[1] or "lost its progress" in found[1]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 3, 10, 50]), st.floats(7, 1000), st.floats(0, 0.3), st.integers(0, 2**32))
def test_a_run_that_is_lost_in_its_first_steps_is_told(every: int, high: float, jumps: float, seed: int) -> None:
    """From step 2 on, and at seven times the first loss or more; it need not go on growing."""
    losses = math.log(3) * high * np.exp(jumps * np.random.default_rng(seed).standard_normal(160))
    losses[1:4] = [369.0, 540.0, 208.0]
    losses[0] = 1.0986
    found = told(losses, every, DivergenceDetector(batch=64))
    assert found is not None
    assert found[0] <= 60 + 2 * every
    assert found[1].startswith("The run diverges: at step ")
    assert found[1].endswith("; at step 1, before any update, it was 1.099.")


def test_a_run_that_is_seen_later_than_its_first_step_says_so() -> None:
    watch, losses = DivergenceDetector(batch=64), np.exp(np.arange(200) / 5)
    said = [watch.check(step, losses[step - 10 : step]) for step in range(40, 201, 10)]
    assert any(one is not None and one.endswith("; at step 31 it was 403.4.") for one in said)


def test_a_first_batch_that_is_easy_by_chance_is_no_measure_of_a_small_batch() -> None:
    """One sample's loss says little of the network's: that of a large batch does."""
    make = np.random.default_rng(5)
    losses = 2.3 * np.exp(0.02 * make.standard_normal(300))
    losses[0] = 0.7
    assert told(losses, 10, DivergenceDetector(batch=2)) is None
    assert told(losses, 10, DivergenceDetector(batch=4096)) is not None


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([5, 20, 50]), st.integers(0, 2**32))
def test_a_run_that_falls_back_to_chance_is_told(every: int, seed: int) -> None:
    make = np.random.default_rng(seed)
    losses = np.concatenate([2.3 * np.exp(-np.arange(200) / 40), np.full(250, 2.31)])
    losses += 0.05 * make.standard_normal(len(losses))
    found = told(losses, every)
    assert found is not None
    assert 200 < found[0] <= 200 + 60 + 4 * every
    assert "lost its progress" in found[1]
    for climbing_back in (2.0, 1.2):  # a restart of the schedule, say
        losses[200:] = climbing_back * np.exp(-np.arange(250) / 30)
        assert told(losses, every) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_told_at_its_step(value: float) -> None:
    losses = np.full(60, 2.0)
    losses[33] = value
    assert told(losses, 20) == (40, "The run diverges: the loss is not finite at step 34.")


def test_it_is_said_once() -> None:
    watch, losses = DivergenceDetector(), np.exp(np.arange(200) / 5)
    said = [watch.check(step, losses[step - 10 : step]) for step in range(10, 201, 10)]
    assert len([one for one in said if one]) == 1


NAMES = ("first", "middle", "last")


def norms(moved: tuple[float, ...], weights: tuple[float, ...] = (5.0, 5.0, 5.0)) -> NDArray[np.float32]:
    return np.array([[w, 1.0, m * w, math.nan] for m, w in zip(moved, weights, strict=True)], np.float32)


def watched() -> DivergenceDetector:
    """Behind six looks at a healthy run, whose steps grow with the learning rate of a warm-up."""
    watch = DivergenceDetector(NAMES, (25, 25, 25), (5.0, 5.0, 5.0))
    for number in range(1, 7):
        lr = 0.01 * 4**number
        said = watch.check(
            10 * number, np.linspace(2.3, 2.2, 10), norms((1e-3 * lr, 2e-3 * lr, 5e-3 * lr)), 1.0, None, lr
        )
        assert said is None
    return watch


def test_it_names_the_layer_that_jumped_first() -> None:
    """Not the one that moves most, and not what a warm-up makes grow."""
    watch, lr = watched(), 41.0
    assert watch.check(70, np.linspace(2.2, 9, 10), norms((1e-3 * lr, 4e-2 * lr, 6e-3 * lr)), 1.0, None, lr) is None
    watch.check(80, np.linspace(9, 900, 10), norms((10 * lr, 20 * lr, 90 * lr)), 1.0, None, lr)
    found = watch.check(90, np.linspace(900, 9e5, 10), norms((10 * lr, 20 * lr, 90 * lr)), 1.0, None, lr)
    assert found is not None
    assert "Look at middle: it was the first to jump: |dw| / (lr |w|) was 20 times its median at step 70." in found


def test_layers_that_break_at_once_are_not_told_apart() -> None:
    one, all_of_them = watched(), watched()
    one.check(70, np.full(10, math.nan), norms((1.0, 1.0, math.inf)))
    assert one.describe_culprit() == " Look at last: it was the first layer with |dw| / |w| not finite, at step 70."
    all_of_them.check(70, np.full(10, math.nan), norms((math.nan, math.nan, math.inf)))
    assert "3 layers was not finite at step 70. A lower log_every_steps shows" in all_of_them.describe_culprit()
    assert DivergenceDetector().describe_culprit() == ""


def test_weights_and_gradients_that_grow_without_learning_are_told() -> None:
    watch = watched()
    found = watch.check(70, np.full(10, 2.5), norms((1e-3, 2e-3, 5e-3), (5.0, 5.0, 500.0)))
    assert found == "The run diverges: at step 70 the weights of last are 100 times as large as at the start."
    learning = watched()
    assert learning.check(70, np.full(10, 0.5), norms((1e-3, 2e-3, 5e-3), (5.0, 5.0, 500.0))) is None
    steep = watched()
    assert steep.check(70, np.full(10, 5.0), norms((1e-3, 2e-3, 5e-3)), 5e4) is None
    found = steep.check(80, np.full(10, 5.0), norms((1e-3, 2e-3, 5e-3)), 5e4)
    assert found is not None
    assert "the gradient at step 80 is 50,000 times its median before" in found


def test_a_layer_that_begins_at_zero_may_grow() -> None:
    watch = DivergenceDetector(("zero",), (4,), (0.0,))
    for step, weight in enumerate((0.0, 1e-3, 0.1, 1.0), 1):
        assert watch.check(10 * step, np.full(10, 2.5), norms((1.0,), (weight,))) is None


def test_weights_that_blew_up_before_the_first_logging_step_are_told() -> None:
    watch = DivergenceDetector(NAMES, (25, 25, 25), (5.0, 5.0, 5.0))
    found = watch.check(50, np.array([1.1, *[9.0] * 49]), norms((1e-3, 2e-3, 5e-3), (5.0, 2e4, 2e4)))
    assert found is not None
    assert "at step 50 the weights of middle are 4,000 times as large as at the start" in found


def test_fp16_that_overflows_is_told() -> None:
    assert "overflow fp16 at step 10" in (DivergenceDetector().check(10, np.full(10, 2.0), loss_scale=2.0**-3) or "")
    assert DivergenceDetector().check(10, np.full(10, 2.0), loss_scale=1.0) is None


def test_it_goes_on_from_a_checkpoint() -> None:
    losses = np.concatenate([2.3 * np.exp(-np.arange(100) / 40), np.exp(np.arange(80) / 8)])
    for cut in range(10, 180, 10):
        first, second = DivergenceDetector(), DivergenceDetector()
        said = [first.check(step, losses[step - 10 : step]) for step in range(10, cut + 1, 10)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        said += [second.check(step, losses[step - 10 : step]) for step in range(cut + 10, 181, 10)]
        whole = DivergenceDetector()
        assert said == [whole.check(step, losses[step - 10 : step]) for step in range(10, 181, 10)]
