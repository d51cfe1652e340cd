"""The gradient noise scale, where it is known."""

from __future__ import annotations

import math

import pytest
import torch
from tests._waits import counted
from tests.comm._ranks import Rank, run_ranks
from torch import Tensor

from headway.comm.noise import Estimate, NoiseScale, local_term, squared_norm
from headway.core.errors import UsageError


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def run_of(sizes: tuple[int, ...], steps: int, seed: int, decay: float) -> Estimate:
    """Ranks of some sizes on E |theta - x|^2 / 2 at a fixed theta: gradients of samples are N(G, Sigma)."""
    make = torch.Generator().manual_seed(seed)
    mean, spread = quadratic()
    scale, big = NoiseScale(decay), sum(sizes)
    for _ in range(steps):
        samples = mean + spread * torch.randn(big, len(mean), generator=make, dtype=torch.float64)
        parts = [part.sum(0) / big for part in samples.split(sizes)]
        terms = [local_term([part], size / big) for part, size in zip(parts, sizes, strict=True)]
        total = torch.stack(parts).sum(0)
        small = big / sum(size > 0 for size in sizes)
        scale.update(torch.stack(terms).sum(), squared_norm([total]), small, big)
    return scale.value()


def quadratic() -> tuple[Tensor, Tensor]:
    """(G, standard deviations): |G|^2 = 4, tr(Sigma) = 100, noise scale 25."""
    mean, spread = torch.linspace(-1, 2, 40).double(), torch.linspace(0.1, 3, 40).double()
    return mean * (2 / mean.norm()), spread * (10 / spread.norm())


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4, 4, 4), (13, 2, 1), (7, 0, 9)])
def test_it_gives_the_known_answer_within_its_error(sizes: tuple[int, ...]) -> None:
    found = run_of(sizes, steps=2000, seed=1, decay=0.998)
    assert 0 < found.error < 5
    assert abs(found.scale - 25) < 3 * found.error
    assert found.noise == pytest.approx(100, rel=0.1)
    assert found.signal == pytest.approx(4, rel=0.2)


def test_its_error_is_as_large_as_it_says() -> None:
    """Over 60 runs: about 68 % lie within one standard error and 95 % within two."""
    found = [run_of((8, 8), steps=200, seed=seed, decay=0.99) for seed in range(60)]
    away = [abs(one.scale - 25) / one.error for one in found]
    assert 30 <= sum(distance < 1 for distance in away) <= 51
    assert sum(distance < 2 for distance in away) >= 51


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99999])
def test_its_error_is_that_of_a_ratio_of_weighted_means(decay: float) -> None:
    """The delta method, with every step's weight written out."""
    scale, make = NoiseScale(decay), torch.Generator().manual_seed(2)
    local, reduced = (30 + torch.randn(2, 40, generator=make, dtype=torch.float64) * 2) - torch.tensor([[0], [13]])
    for one, other in zip(local, reduced, strict=True):
        scale.update(one, other, 4, 8)
    weights = decay ** torch.arange(39, -1, -1, dtype=torch.float64)
    weights /= weights.sum()
    noise, signal = (local - reduced) * 8, 2 * reduced - local
    ratio = float((weights @ noise) / (weights @ signal))
    residuals = noise - ratio * signal
    variance = weights @ residuals.square() - (weights @ residuals).square()
    steps = 1 / weights.square().sum()
    found = scale.value()
    assert found.scale == pytest.approx(ratio, rel=1e-9)
    assert found.error == pytest.approx(float((variance / (steps - 1)).sqrt() / (weights @ signal)), rel=1e-7)


@pytest.mark.parametrize(("small", "big"), [(1.0, 2.0), (32.0, 4096.0), (2.5, 7.0)])
def test_expected_norms_give_both_terms_exactly(small: float, big: float) -> None:
    scale = NoiseScale(0.9)
    for _ in range(3):
        scale.update(number(4 + 100 / small), number(4 + 100 / big), small, big)
    found = scale.value()
    assert (found.noise, found.signal, found.scale) == pytest.approx((100, 4, 25), rel=1e-12)
    assert found.error == pytest.approx(0, abs=1e-4)


def test_terms_add_up_over_buckets_and_scale_with_the_share() -> None:
    grads = [torch.randn(3, 4), torch.randn(5).bfloat16(), torch.randn(7).half(), torch.zeros(0)]
    whole = local_term(grads, 0.25)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, sum(local_term([grad], 0.25) for grad in grads))
    torch.testing.assert_close(whole, sum(grad.float().square().sum() for grad in grads) / 0.25)
    assert local_term([torch.ones(2, dtype=torch.float64)], 1).dtype == torch.float64
    assert local_term([torch.zeros(4)], 0) == 0


def meeting(rank: Rank) -> tuple[Estimate, Estimate]:
    """Real ranks: the term rides behind the gradients in one all-reduce."""
    group, sizes = rank.world.group(name="test"), (3, 0, 5)
    mean, spread = quadratic()
    make = torch.Generator().manual_seed(3)
    ours, here = NoiseScale(), NoiseScale()
    for _ in range(20):
        samples = (mean + spread * torch.randn(8, 40, generator=make, dtype=torch.float64)).split(sizes)
        mine = samples[rank.rank].sum(0) / 8
        message = torch.cat([mine, local_term([mine], sizes[rank.rank] / 8).view(1)])
        group.all_reduce(message).wait()
        ours.update(message[-1], squared_norm([message[:-1]]), 4, 8)
        local = 3 / 8 * samples[0].mean(0).square().sum() + 5 / 8 * samples[2].mean(0).square().sum()
        here.update(local, torch.cat(samples).mean(0).square().sum(), 4, 8)
    return ours.value(), here.value()


def test_real_ranks_agree() -> None:
    for ours, here in run_ranks(3, meeting):
        assert vars(ours) == pytest.approx(vars(here), rel=1e-9)
        assert math.isfinite(ours.scale)


def test_nothing_waits_for_a_device_before_it_is_read() -> None:
    scale, grads = NoiseScale(), [torch.randn(4), torch.randn(5)]
    with counted() as waits:
        for _ in range(3):
            scale.update(local_term(grads, 0.5), squared_norm(grads), 4, 8)
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
    assert dirty.value() == clean.value()


def test_what_is_not_known_is_not_said() -> None:
    scale = NoiseScale()
    assert math.isnan(scale.value().scale)
    scale.update(number(29), number(16.5), 4, 8)  # one step: no spread yet
    assert scale.value().scale == pytest.approx(25)
    assert scale.value().error == math.inf
    lost = NoiseScale()
    for _ in range(3):
        lost.update(number(10), number(4), 4, 8)
    assert (lost.value().scale, lost.value().error) == (math.inf, math.inf)
    assert lost.value().signal < 0


def test_it_goes_on_from_a_checkpoint() -> None:
    whole, first, second = NoiseScale(), NoiseScale(), NoiseScale()
    for step in range(10):
        if step == 5:
            second.load_state_dict(first.state_dict())
        for one in (whole, first if step < 5 else second):
            one.update(number(30 + step % 3), number(20 - step % 2), 4, 8)
    assert second.value() == whole.value()


def test_wrong_arguments_say_so() -> None:
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(UsageError, match="share of the batch"):
            local_term([torch.ones(1)], share)
    for decay in (1.0, -0.1, math.nan):
        with pytest.raises(UsageError, match="a decay of"):
            NoiseScale(decay)
    for small, big in ((8, 8), (9, 8), (0, 8), (math.nan, 8)):
        with pytest.raises(UsageError, match="two ranks, or accumulate"):
            NoiseScale().update(number(1), number(1), small, big)
