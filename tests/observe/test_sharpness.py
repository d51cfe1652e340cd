"""Sharpness of functions whose answer is known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headway.observe.directions import compute_filter_norms, draw_direction, move_weights
from headway.observe.sharpness import (
    HessianEigenvalue,
    SharpnessObjective,
    find_largest_eigenvalue,
    measure_epsilon_sharpness,
)


def quadratic(hessian: Tensor, at: Tensor) -> tuple[SharpnessObjective, list[Tensor]]:
    """x H x / 2 as a sum of two parts, x held in two tensors."""
    x = [at[:1].clone().requires_grad_(), at[1:].clone().requires_grad_()]

    def parts() -> Iterator[Tensor]:
        for share in (0.25, 0.75):
            whole = torch.cat(x)
            yield share * (whole @ hessian @ whole) / 2

    return SharpnessObjective(x, parts), x


def rotated(values: list[float], seed: int) -> Tensor:
    basis = torch.linalg.qr(
        torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed)).double()
    )[0]
    return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T


@example([0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0625, 0.0])  # one weight has a slope, another has none
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=2, max_size=5), st.lists(st.floats(-2, 2), min_size=5, max_size=5))
def test_keskars_measure_of_a_diagonal_quadratic_is_that_of_the_corner(values: list[float], place: list[float]) -> None:
    """The highest value in the box is at a corner: every |x_i| as large as may be."""
    h, x = torch.tensor(values, dtype=torch.float64), torch.tensor(place[: len(values)], dtype=torch.float64)
    objective, held = quadratic(torch.diag(h), x)
    found = measure_epsilon_sharpness(objective, epsilon=0.1, steps=10, starts=2)
    loss = float((h * x**2).sum() / 2)
    highest = float((h * (x.abs() + 0.1 * (x.abs() + 1)) ** 2).sum() / 2)
    assert found.loss == pytest.approx(loss, abs=1e-9)
    assert found.highest == pytest.approx(highest, abs=1e-9)
    assert found.percent == pytest.approx(100 * (highest - loss) / (1 + loss), abs=1e-6)
    assert torch.equal(torch.cat([one.detach() for one in held]), x), "the parameters are put back"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_it_is_never_above_the_highest_corner_and_seldom_below(seed: int) -> None:
    """A convex function is highest at a corner of a box; there are 16 here. Ascents may end at a lower corner."""
    hessian = rotated([9.0, 4.0, 1.0, 0.1], seed)
    objective, _ = quadratic(hessian, torch.zeros(4, dtype=torch.float64))
    found = measure_epsilon_sharpness(objective, epsilon=0.5, starts=4, seed=seed)
    corners = [torch.tensor(signs, dtype=torch.float64) / 2 for signs in itertools.product((-1, 1), repeat=4)]
    best = max(float(z @ hessian @ z / 2) for z in corners)
    assert 0.5 * best <= found.highest <= best * (1 + 1e-9)


def test_at_a_maximum_there_is_nothing_higher() -> None:
    objective, _ = quadratic(-torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    assert measure_epsilon_sharpness(objective).percent == 0


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([5.0, 1.0, 0.5, 0.0], 5.0),
        ([2.0, 2.0, 2.0, 2.0], 2.0),
        ([3.0, 1.0, -1.0, -5.0], 3.0),  # the largest magnitude is that of the negative one
        ([-1.0, -2.0, -3.0, -7.0], -1.0),
        ([0.0, 0.0, 0.0, 0.0], 0.0),
    ],
)
def test_the_largest_eigenvalue_is_the_known_one(values: list[float], largest: float) -> None:
    objective, _ = quadratic(rotated(values, 3), torch.ones(4, dtype=torch.float64))
    found = find_largest_eigenvalue(objective, products=400, tolerance=1e-6)
    assert found.value == pytest.approx(largest, abs=1e-5)
    assert found.residual < 1e-5
    assert found == find_largest_eigenvalue(objective, products=400, tolerance=1e-6), "the same from the same seed"


def test_a_scale_gives_the_eigenvalue_of_the_scaled_hessian() -> None:
    hessian, d = rotated([5.0, 3.0, 1.0, 0.5], 1), torch.tensor([2.0, 0.5, 0.0, 1.0], dtype=torch.float64)
    objective, _ = quadratic(hessian, torch.ones(4, dtype=torch.float64))
    found = find_largest_eigenvalue(objective, scale=[d[:1], d[1:]], products=400, tolerance=1e-6)
    expected = torch.linalg.eigvalsh(torch.diag(d) @ hessian @ torch.diag(d)).max()
    assert found.value == pytest.approx(float(expected), abs=1e-5)


def test_a_residual_says_how_far_an_eigenvalue_is_known() -> None:
    hessian = rotated([5.0, 4.9, 1.0, 0.5], 1)
    objective, _ = quadratic(hessian, torch.ones(4, dtype=torch.float64))
    found = find_largest_eigenvalue(objective, products=3)
    assert found.products == 3
    distance = (torch.linalg.eigvalsh(hessian) - found.value).abs().min()
    assert distance <= abs(found.value) * found.residual
    assert found.residual > 1e-3


def test_a_function_without_curvature() -> None:
    x = torch.ones(3, requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    objective = SharpnessObjective([x, unused], lambda: iter([x.sum()]))
    assert find_largest_eigenvalue(objective) == HessianEigenvalue(0.0, 1, 0.0)


class Net(nn.Module):
    """A convolution, batch norm, a head; in float64, and with nearly nothing added to the variance."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4, eps=1e-30)
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.conv(images)))
        out: Tensor = self.head(hidden.mean(dim=(2, 3)))
        return out


def solved() -> tuple[Net, Tensor, Tensor]:
    """Some steps of descent on random images of three classes."""
    torch.manual_seed(0)
    net, images = Net().double(), torch.randn(30, 1, 6, 6, dtype=torch.float64)
    labels = images.mean(dim=(1, 2, 3)).argsort().argsort() // 10
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return net.eval(), images, labels


def rescaled(net: Net, factor: float) -> None:
    """The same function by other weights: what the batch norm takes out again."""
    with torch.no_grad():
        net.conv.weight.mul_(factor)
        assert net.norm.running_mean is not None
        assert net.norm.running_var is not None
        net.norm.running_mean.mul_(factor)
        net.norm.running_var.mul_(factor**2)


def curve(net: Net, images: Tensor, labels: Tensor, recompute: bool) -> list[float]:
    direction, out = draw_direction(net, 5), []
    for place in (-1.0, -0.3, 0.0, 0.4, 1.0):
        with move_weights(net, {}, [(place, direction)]), torch.no_grad():
            net.norm.train(recompute)
            out.append(float(nn.functional.cross_entropy(net(images), labels)))
            net.norm.eval()
    return out


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_rescaling_a_convolution_before_a_batch_norm_leaves_the_curve(factor: float, recompute: bool) -> None:
    """What filter normalisation is for: runs whose weight decay gave their weights another size can be compared."""
    net, images, labels = solved()
    before = curve(net, images, labels, recompute)
    rescaled(net, factor)
    assert curve(net, images, labels, recompute) == pytest.approx(before, rel=1e-9)
    assert max(before) > 1.3 * before[2]


@pytest.mark.check
def test_the_relative_eigenvalue_stays_and_the_plain_one_and_keskars_do_not() -> None:
    """Dinh et al. 2017: the same function is sharper by smaller weights."""

    def measured(net: Net) -> tuple[float, float, float]:
        parameters = dict(net.named_parameters())
        parts = lambda: iter([nn.functional.cross_entropy(net(images), labels)])  # noqa: E731
        objective = SharpnessObjective(list(parameters.values()), parts)
        norms = compute_filter_norms(net)
        scale = [
            norms[name].expand_as(one) if name in norms else torch.zeros_like(one) for name, one in parameters.items()
        ]
        given = {"products": 300, "tolerance": 1e-7}
        plain = find_largest_eigenvalue(objective, **given).value  # type: ignore[arg-type]
        relative = find_largest_eigenvalue(objective, scale=scale, **given).value  # type: ignore[arg-type]
        return plain, relative, measure_epsilon_sharpness(objective).percent

    net, images, labels = solved()
    plain, relative, keskar = measured(net)
    rescaled(net, 0.01)
    again = measured(net)
    assert again[1] == pytest.approx(relative, rel=1e-4)
    assert again[0] > 10 * plain
    assert again[2] > 1.5 * keskar
