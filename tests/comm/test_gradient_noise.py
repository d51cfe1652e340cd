"""The gradient noise scale, where it is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests._waits import counted
from tests.comm._ranks import Rank, run_ranks
from torch import Tensor

from headway.comm.gradient_noise import (
    NoiseEstimate,
    NoiseScale,
    compute_local_term,
    compute_squared_norm,
    estimate_ratio,
    predict_sample_ratio,
)
from headway.core.errors import UsageError


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def run_of(sizes: tuple[int, ...], steps: int, seed: int, window: int) -> NoiseEstimate:
    """Ranks of some sizes on E |theta - x|^2 / 2 at a fixed theta: gradients of samples are N(G, Sigma)."""
    make = torch.Generator().manual_seed(seed)
    mean, spread = quadratic()
    scale, big = NoiseScale(window), sum(sizes)
    for _ in range(steps):
        samples = mean + spread * torch.randn(big, len(mean), generator=make, dtype=torch.float64)
        parts = [part.sum(0) / big for part in samples.split(sizes)]
        terms = [compute_local_term([part], size / big) for part, size in zip(parts, sizes, strict=True)]
        total = torch.stack(parts).sum(0)
        small = big / sum(size > 0 for size in sizes)
        scale.update(torch.stack(terms).sum(), compute_squared_norm([total]), small, big)
    return scale.estimate()


def quadratic() -> tuple[Tensor, Tensor]:
    """(G, standard deviations): |G|^2 = 4, tr(Sigma) = 100, noise scale 25."""
    mean, spread = torch.linspace(-1, 2, 40).double(), torch.linspace(0.1, 3, 40).double()
    return mean * (2 / mean.norm()), spread * (10 / spread.norm())


@pytest.mark.thin(1)
@pytest.mark.parametrize("sizes", [(8, 8), (4, 4, 4, 4), (13, 2, 1), (7, 0, 9)])
def test_it_gives_the_known_answer_within_its_interval(sizes: tuple[int, ...]) -> None:
    found = run_of(sizes, steps=2000, seed=1, window=2000)
    assert 15 < found.low < 25 < found.high < 40
    assert found.noise == pytest.approx(100, rel=0.1)
    assert found.signal == pytest.approx(4, rel=0.2)
    assert found.scale == found.noise / found.signal


def pairs_of(runs: int, steps: int, half: int, seed: int = 0) -> NDArray[np.float64]:
    """(noise, signal) from two halves of `half` samples each, on the quadratic, at steps apart: [runs, steps, 2]."""
    make = np.random.default_rng(seed)
    mean, spread = (value.numpy() for value in quadratic())
    one, other = mean + spread / half**0.5 * make.standard_normal((2, runs, steps, len(mean)))
    return np.stack([half / 2 * ((one - other) ** 2).sum(-1), (one * other).sum(-1)], -1)


def missed(runs: NDArray[np.float64], truth: float) -> tuple[float, float]:
    """Shares of runs whose interval lies below the truth, and above it."""
    found = [estimate_ratio(pairs) for pairs in runs]
    below, above = sum(one.high < truth for one in found), sum(one.low > truth for one in found)
    return below / len(runs), above / len(runs)


@pytest.mark.parametrize("half", [2, 16, 128])
@pytest.mark.parametrize("steps", [8, 20, 64, 200])
@pytest.mark.thin(3)
def test_its_interval_holds_the_truth_as_often_as_it_says(steps: int, half: int) -> None:
    """95 %, from batches six times below the noise scale of 25 to ten times above; standard error of a share: 1 %."""
    below, above = missed(pairs_of(500, steps, half), 25)
    assert 0.01 <= below + above <= 0.085
    assert max(below, above) <= 0.06


@pytest.mark.check
def test_steps_that_follow_each_other_are_not_taken_as_independent() -> None:
    """Each measurement moves by a fifth towards a new one (autoregressive, 0.8): as if there were a ninth of them."""
    made = pairs_of(400, 960, 16)
    for step in range(1, made.shape[1]):
        made[:, step] = 0.8 * made[:, step - 1] + 0.2 * made[:, step]
    assert sum(missed(made, 25)) <= 0.09
    naive = 0
    for pairs in made:
        residuals = pairs[:, 0] - 25 * pairs[:, 1]
        naive += abs(residuals.mean()) > 1.96 * residuals.std() / len(pairs) ** 0.5
    assert naive / len(made) > 0.4, "the test would not see a wrong interval"


def test_a_drift_over_the_window_makes_the_interval_wider() -> None:
    still = pairs_of(1, 320, 128)[0]
    drifting = still + np.linspace(8, 0, 320)[:, None] * np.array([0, 1])
    level = still + np.array([0.0, 4.0])
    assert estimate_ratio(drifting).high - estimate_ratio(drifting).low > 2 * (
        estimate_ratio(level).high - estimate_ratio(level).low
    )
    assert estimate_ratio(drifting).scale == pytest.approx(estimate_ratio(level).scale, rel=1e-9)


def test_without_a_signal_there_is_no_upper_end() -> None:
    make = np.random.default_rng(1)
    noise = 100 + make.standard_normal(64)
    found = estimate_ratio(np.stack([noise, make.standard_normal(64)], 1))
    assert found.high == math.inf
    assert found.low > 100
    lost = estimate_ratio(np.stack([noise, make.standard_normal(64) - 3], 1))
    assert (lost.scale, lost.high) == (math.inf, math.inf)
    silent = estimate_ratio(np.stack([make.standard_normal(64) * 9, make.standard_normal(64) * 9], 1))
    assert silent.low < 1
    assert silent.high == math.inf


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_larger_batch_costs_what_the_law_says(factor: float) -> None:
    """(S / Smin - 1) (E / Emin - 1) = 1, with E = B S and the critical batch Emin / Smin."""
    critical, fewest = 2100.0, 1000.0
    for batch in (64.0, 512.0, 9000.0):
        samples = []
        for one in (batch, factor * batch):
            steps = fewest * (1 + critical / one)
            samples.append(one * steps)
            assert (steps / fewest - 1) * (samples[-1] / (critical * fewest) - 1) == pytest.approx(1)
        assert predict_sample_ratio(batch, critical, factor) == pytest.approx(samples[1] / samples[0])
    assert predict_sample_ratio(512, 2100) == pytest.approx(1.196, abs=1e-3)
    assert predict_sample_ratio(512, math.inf) == 1


@pytest.mark.parametrize(("small", "big"), [(1.0, 2.0), (32.0, 4096.0), (2.5, 7.0)])
def test_expected_norms_give_both_terms_exactly(small: float, big: float) -> None:
    scale = NoiseScale(8)
    for _ in range(5):
        scale.update(number(4 + 100 / small), number(4 + 100 / big), small, big)
    found = scale.estimate()
    assert (found.noise, found.signal, found.scale) == pytest.approx((100, 4, 25), rel=1e-12)
    assert (found.low, found.high) == pytest.approx((25, 25), rel=1e-6)


def test_terms_add_up_over_buckets_and_scale_with_the_share() -> None:
    grads = [torch.randn(3, 4), torch.randn(5).bfloat16(), torch.randn(7).half(), torch.zeros(0)]
    whole = compute_local_term(grads, 0.25)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, sum(compute_local_term([grad], 0.25) for grad in grads))
    torch.testing.assert_close(whole, sum(grad.float().square().sum() for grad in grads) / 0.25)
    assert compute_local_term([torch.ones(2, dtype=torch.float64)], 1).dtype == torch.float64
    assert compute_local_term([torch.zeros(4)], 0) == 0


def meeting(rank: Rank) -> tuple[NoiseEstimate, NoiseEstimate]:
    """Real ranks: the term rides behind the gradients in one all-reduce."""
    group, sizes = rank.world.create_group(name="test"), (3, 0, 5)
    mean, spread = quadratic()
    make = torch.Generator().manual_seed(3)
    ours, here = NoiseScale(), NoiseScale()
    for _ in range(20):
        samples = (mean + spread * torch.randn(8, 40, generator=make, dtype=torch.float64)).split(sizes)
        mine = samples[rank.rank].sum(0) / 8
        message = torch.cat([mine, compute_local_term([mine], sizes[rank.rank] / 8).view(1)])
        group.all_reduce(message).wait()
        ours.update(message[-1], compute_squared_norm([message[:-1]]), 4, 8)
        local = 3 / 8 * samples[0].mean(0).square().sum() + 5 / 8 * samples[2].mean(0).square().sum()
        here.update(local, torch.cat(samples).mean(0).square().sum(), 4, 8)
    return ours.estimate(), here.estimate()


def test_real_ranks_agree() -> None:
    for ours, here in run_ranks(3, meeting):
        assert vars(ours) == pytest.approx(vars(here), rel=1e-9)
        assert math.isfinite(ours.scale)


def test_nothing_waits_for_a_device_before_it_is_read() -> None:
    scale, grads = NoiseScale(), [torch.randn(4), torch.randn(5)]
    with counted() as waits:
        for _ in range(3):
            scale.update(compute_local_term(grads, 0.5), compute_squared_norm(grads), 4, 8)
    assert not waits


def test_a_step_that_is_not_finite_is_left_out() -> None:
    clean, dirty = NoiseScale(), NoiseScale()
    for step in range(6):
        if step % 2:
            dirty.update(number(math.inf if step == 1 else 30 + step), number(math.nan if step == 3 else 20), 4, 8)
        if step % 2 == 0 or step == 5:
            clean.update(number(30 + step), number(20), 4, 8)
            if step != 5:
                dirty.update(number(30 + step), number(20), 4, 8)
    assert dirty.estimate() == clean.estimate()


def test_what_is_not_known_is_not_said() -> None:
    scale = NoiseScale()
    assert math.isnan(scale.estimate().scale)
    for _ in range(3):
        scale.update(number(29), number(16.5), 4, 8)  # too few for a spread
        assert scale.estimate().scale == pytest.approx(25)
        assert (scale.estimate().low, scale.estimate().high) == (0, math.inf)
    lost = NoiseScale()
    for _ in range(5):
        lost.update(number(10), number(4), 4, 8)
    assert (lost.estimate().scale, lost.estimate().high) == (math.inf, math.inf)
    assert lost.estimate().signal < 0


def test_only_the_newest_measurements_count() -> None:
    long, short = NoiseScale(8), NoiseScale(8)
    for step in range(21):
        for one in (long, short) if step >= 13 else (long,):
            one.update(number(30 + step % 5), number(20 - step % 3), 4, 8)
    assert long.estimate() == short.estimate()


def test_steps_are_put_together_to_one_measurement() -> None:
    """Their mean, from which what is not finite is left out."""
    steps, means = NoiseScale(8), NoiseScale(8)
    for place in range(6):
        values = [(30.0 + place, 20.0), (32.0, 21.0 - place), (math.inf, 3.0)]
        for number_of_step, (local, reduced) in enumerate(values, 1):
            steps.update(number(local), number(reduced), 4, 8, last=number_of_step == 3)
        means.update(number(31 + place / 2), number(20.5 - place / 2), 4, 8)
    assert vars(steps.estimate()) == pytest.approx(vars(means.estimate()), rel=1e-12)


def test_it_goes_on_from_a_checkpoint() -> None:
    whole, first, second = NoiseScale(8), NoiseScale(8), NoiseScale(8)
    for step in range(30):
        if step == 17:
            second.load_state_dict(first.state_dict())
        for one in (whole, first if step < 17 else second):
            one.update(number(30 + step % 3), number(20 - step % 2), 4, 8, last=step % 2 == 1)
    assert second.estimate() == whole.estimate()
    assert len(second.state_dict()["pairs"]) == 8


def test_wrong_arguments_say_so() -> None:
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(UsageError, match="share of the batch"):
            compute_local_term([torch.ones(1)], share)
    with pytest.raises(UsageError, match="a window of 7"):
        NoiseScale(7)
    for small, big in ((8, 8), (9, 8), (0, 8), (math.nan, 8)):
        with pytest.raises(UsageError, match="two ranks, or divide the batch"):
            NoiseScale().update(number(1), number(1), small, big)
