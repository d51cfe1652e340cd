"""Averages of outputs and of weights, and the figures of an ensemble, as identities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from headway.core.errors import UsageError
from headway.setup.task import Activation
from headway.training.average_outputs import average_outputs
from headway.training.ensemble_study import compute_ece, count_differences
from headway.training.soup import average_weights

ACTIVATIONS: list[Activation] = ["softmax", "sigmoid", "identity"]
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(2, 12))
SCALES = st.sampled_from([0.1, 3.0, 300.0])


def draw(shape: tuple[int, ...], scale: float, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def losses(activation: Activation, outputs: torch.Tensor, seed: int) -> torch.Tensor:
    """The loss of each sample for random labels, float64 [b]."""
    outputs, chance = outputs.double(), torch.Generator().manual_seed(seed)
    if activation == "softmax":
        labels = torch.randint(outputs.shape[1], outputs.shape[:1], generator=chance)
        return F.cross_entropy(outputs, labels, reduction="none")
    if activation == "sigmoid":
        labels = torch.randint(2, outputs.shape, generator=chance).double()
        return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(1)
    return (outputs - torch.randn(outputs.shape, generator=chance)).square().mean(1)


def probabilities(activation: Activation, outputs: torch.Tensor) -> torch.Tensor:
    outputs = outputs.double()
    return {"softmax": lambda: outputs.softmax(-1), "sigmoid": outputs.sigmoid, "identity": lambda: outputs}[
        activation
    ]()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(shape=SHAPES, scale=SCALES, seed=st.integers(0, 99))
def test_the_average_has_the_mean_probabilities(
    activation: Activation, shape: tuple[int, ...], scale: float, seed: int
) -> None:
    members = draw(shape, scale, seed)
    found = average_outputs(activation, list(members))
    assert bool(found.isfinite().all())
    wanted = probabilities(activation, members).mean(0)
    torch.testing.assert_close(probabilities(activation, found), wanted, atol=2e-6, rtol=2e-6)
    # One member, and twins, are that member.
    for same in ([members[0]], [members[0]] * 3):
        once = average_outputs(activation, same)
        wanted = probabilities(activation, members[0])
        torch.testing.assert_close(probabilities(activation, once), wanted, atol=1e-6, rtol=1e-6)
    other = average_outputs(activation, list(members.flip(0)))
    torch.testing.assert_close(other, found, atol=1e-6, rtol=3e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(shape=SHAPES, scale=SCALES, seed=st.integers(0, 99))
def test_jensen_in_every_batch(activation: Activation, shape: tuple[int, ...], scale: float, seed: int) -> None:
    members = draw(shape, scale, seed)
    together = losses(activation, average_outputs(activation, list(members)), seed)
    alone = torch.stack([losses(activation, one, seed) for one in members]).mean(0)
    assert bool((together <= alone * (1 + 1e-6) + 1e-6).all())


def test_a_task_of_the_users_own_says_how_it_is_averaged() -> None:
    with pytest.raises(UsageError, match='Set the attribute activation = "softmax", "sigmoid" or "identity"'):
        average_outputs(None, [torch.zeros(1, 2)])


@given(seed=st.integers(0, 99), count=st.integers(1, 60), bins=st.sampled_from([1, 2, 8, 16]))
def test_the_calibration_error_is_that_of_its_definition(seed: int, count: int, bins: int) -> None:
    chance = np.random.default_rng(seed)
    # Many lie on the edge of a bin, which belongs to the lower one.
    confidence, right = chance.integers(1, 33, count).astype(np.float32) / 32, chance.random(count) < 0.5
    error = 0.0
    for place in range(bins):
        inside = (confidence > place / bins) & (confidence <= (place + 1) / bins)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean(dtype=np.float64))
    assert compute_ece(torch.from_numpy(confidence), torch.from_numpy(right), bins) == pytest.approx(error, abs=1e-6)


def test_the_calibration_error_of_the_extremes() -> None:
    sure = torch.ones(20)
    assert compute_ece(sure, sure) == 0
    assert compute_ece(sure, torch.zeros(20)) == 1
    half = (torch.arange(20) % 2).float()
    assert compute_ece(torch.full((20,), 0.5), half) == pytest.approx(0)


@given(seed=st.integers(0, 99), shape=SHAPES)
def test_pairs_that_differ(seed: int, shape: tuple[int, ...]) -> None:
    predicted = torch.randint(3, shape, generator=torch.Generator().manual_seed(seed))
    wanted = sum(
        (predicted[one] != predicted[other]).long() for one in range(shape[0]) for other in range(one)
    ) + torch.zeros(shape[1:], dtype=torch.long)
    assert torch.equal(count_differences(predicted), wanted)


@given(seed=st.integers(0, 99), count=st.integers(1, 5))
def test_the_mean_of_weights(seed: int, count: int) -> None:
    states = [
        {"w": draw((3, 4), 1, seed + place), "half": draw((5,), 1, place).bfloat16(), "steps": torch.tensor(7 + place)}
        for place in range(count)
    ]
    states[0]["w"][0, :2] = torch.tensor([-0.0, math.inf])
    twins = average_weights([states[0]] * count)
    for name, value in states[0].items():
        assert twins[name].dtype == value.dtype
        # The bits, as 0 equals -0.
        assert torch.equal(twins[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    mean = average_weights(states)
    wanted = torch.stack([state["w"] for state in states]).double().mean(0)
    torch.testing.assert_close(mean["w"].double(), wanted, atol=1e-7, rtol=1e-7)
    other = average_weights(states[::-1])
    torch.testing.assert_close(other["w"], mean["w"], atol=0, rtol=2**-23)
    assert int(mean["steps"]) == 7


def test_weights_of_other_networks_have_no_mean() -> None:
    with pytest.raises(UsageError, match=r"'b' is missing\. Average runs of one network"):
        average_weights([{"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(2)}])
    with pytest.raises(UsageError, match="'a' is"):
        average_weights([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}])
