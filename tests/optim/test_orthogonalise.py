"""Newton-Schulz iteration: what stays, what comes near 1, and that no cheaper way to compute it changes that."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.model.flops import MultiplyAddCounter
from headway.optim import orthogonalise as module
from headway.optim.orthogonalise import (
    POLYNOMIALS,
    SMALLEST_BF16,
    UPPER_ENDS,
    count_multiply_adds,
    multiplies_bf16,
    orthogonalise,
)

LAST_DISTANCE, MARGIN = 0.25, 1.03
REACH = 0.00275
"""Singular values over the Schatten 8-norm from which four rounds bring them into [0.75, 1.25]."""


def evaluate(coefficients: tuple[float, float, float], x: Any) -> Any:
    a, b, c = coefficients
    return a * x + b * x**3 + c * x**5


def find_extremes(coefficients: tuple[float, float, float], upper: float) -> tuple[float, list[float]]:
    """Returns the lower end of a polynomial's interval, and its distances from 1 at both ends and both extremes."""
    a, b, c = coefficients
    inner = sorted(np.sqrt(np.roots([5 * c, 3 * b, a]).real))
    # The lower end is as far below 1 as the first extreme above.
    distance = evaluate(coefficients, inner[0]) - 1
    roots = np.roots([c, 0, b, 0, a, distance - 1])
    lower = min(root.real for root in roots if abs(root.imag) < 1e-9 and 0 < root.real < inner[0])
    return lower, [float(1 - evaluate(coefficients, x)) for x in (lower, *inner, upper)]


def test_each_polynomial_is_the_best_on_its_interval() -> None:
    """Its distance from 1 is largest at four points, with alternating signs: that makes the best one (Chebyshev)."""
    reached = []
    for coefficients, upper in zip(POLYNOMIALS, UPPER_ENDS, strict=True):
        lower, distances = find_extremes(coefficients, upper)
        largest = distances[0]
        assert distances == pytest.approx([largest, -largest, largest, -largest], abs=2e-5)
        reached.append((lower, upper, largest))
    assert reached[0][2] == pytest.approx(LAST_DISTANCE, abs=1e-5)
    for (lower, upper, _), (_, _, distance) in pairwise(reached):
        assert (1 - distance, MARGIN * (1 + distance)) == pytest.approx((lower, upper), abs=2e-5)
    reach = [lower / upper for lower, upper, _ in reached]
    assert reach[3] == pytest.approx(REACH, rel=1e-3)
    # Each round more reaches singular values a quarter as large.
    assert all(one / other == pytest.approx(4.1, abs=0.2) for one, other in pairwise(reach))


def test_rounds_beyond_the_table_reach_further() -> None:
    assert len(POLYNOMIALS) < 12
    x = torch.diag(torch.tensor([1.0, 1e-6], dtype=torch.float64))
    (found,) = orthogonalise([x], ns_steps=12)
    assert ((found.diagonal() - 1).abs() < LAST_DISTANCE + 1e-3).all()


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 1000))
def test_singular_vectors_stay_and_singular_values_come_near_1(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    (found,) = orthogonalise([matrix])
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.mT @ (found / max(1, rows / columns) ** 0.5) @ right.mT
    values = inner.diagonal()
    torch.testing.assert_close(inner, torch.diag(values), rtol=0, atol=1e-9)
    large = sizes > REACH * sizes.pow(8).sum() ** 0.125
    assert (values[large] - 1).abs().max() <= LAST_DISTANCE + 1e-4


def draw(rows: int, columns: int, spectrum: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a float32 matrix, and its singular vectors."""
    generator = torch.Generator().manual_seed(rows + columns)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    if spectrum == "falling":
        sizes = torch.arange(1, len(sizes) + 1, dtype=torch.float64).reciprocal()
    return ((left * sizes) @ right).float(), left, right


@pytest.mark.parametrize("spectrum", ["random", "falling"])
@pytest.mark.parametrize("shape", [(48, 48), (40, 160), (160, 40), (60, 70)])
def test_bf16_is_as_near_1(shape: tuple[int, int], spectrum: str) -> None:
    """The bars are about what Jordan's five rounds reach in float32, [0.68, 1.2] and 0.2 off in the mean."""
    matrix, left, right = draw(*shape, spectrum)
    (found,) = orthogonalise([matrix], precision="bf16")
    assert found.dtype == torch.float32
    inner = left.mT @ found.double() @ right.mT / max(1, shape[0] / shape[1]) ** 0.5
    sizes = torch.linalg.svdvals(matrix.double())
    values = inner.diagonal()[sizes > 0.01 * sizes[0]]
    assert (values - 1).abs().max() <= LAST_DISTANCE + 0.05
    assert (values - 1).square().mean().sqrt() <= 0.2
    off = (inner - torch.diag(inner.diagonal())).norm() / inner.diagonal().norm()
    assert off <= 0.1


@pytest.mark.parametrize(("shape", "tolerance"), [((140, 150), 1e-4), ((140, 320), 3e-3), ((320, 140), 3e-3)])
def test_float32_is_float64_rounded(shape: tuple[int, int], tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With symmetric products by strips of rows, the last of which is narrower, and on X X^T alone: that squares small
    singular values, whose distance from 1 then has errors of some thousandths."""
    monkeypatch.setattr(module, "STRIP", 32)
    assert min(shape) % 32
    matrix, _, _ = draw(*shape, "falling")
    exact, found = (orthogonalise([one], precision="fp32")[0] for one in (matrix.double(), matrix))
    assert (found - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("shape", [(7, 20), (20, 7), (9, 9)])
def test_rounds_on_the_small_matrix_are_rounds_on_the_whole(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    found = {}
    for wide in (0.0, torch.inf):
        monkeypatch.setattr(module, "WIDE", wide)
        (found[wide],) = orthogonalise([matrix], ns_steps=3)
    torch.testing.assert_close(found[0.0], found[torch.inf], rtol=0, atol=1e-10)


def test_filters_are_flattened_and_keep_their_memory_order() -> None:
    filters = [torch.randn(6, 2, 3, 3), torch.randn(6, 18), torch.randn(40, 2, 2, 2), torch.randn(6, 2, 3, 3)]
    filters.append(filters[0].to(memory_format=torch.channels_last))
    found = orthogonalise(filters, precision="fp32")
    for given_, one in zip(filters, found, strict=True):
        (alone,) = orthogonalise([given_.flatten(1)], precision="fp32")
        torch.testing.assert_close(one.flatten(1), alone, rtol=1e-4, atol=1e-5)
        assert one.shape == given_.shape
        assert one.stride() == given_.stride()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [2.0**-80, 2.0**-45, 2.0**-20, 2.0**60])
def test_zeros_stay_and_no_size_overflows(size: float, precision: Any) -> None:
    matrix = torch.randn(8, 12)
    zeros, found, plain = orthogonalise([torch.zeros(5, 3), size * matrix, matrix], precision=precision)
    assert not zeros.any()
    assert found.isfinite().all()
    if size > 2.0**-50:  # smaller ones come out smaller
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)


def test_auto_is_one_of_both_and_float64_stays() -> None:
    for rows, is_large in ((SMALLEST_BF16, True), (SMALLEST_BF16 - 1, False)):
        matrix = torch.randn(rows, 140)
        expected = orthogonalise(
            [matrix], precision="bf16" if is_large and multiplies_bf16(torch.device("cpu")) else "fp32"
        )[0]
        assert torch.equal(orthogonalise([matrix])[0], expected)
    assert orthogonalise([matrix.double()], precision="bf16")[0].dtype == torch.float64


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(48, 20), (6, 3, 3, 3), (40, 32), (100, 1, 3, 3), (33, 90)])
def test_its_products_are_counted(shape: tuple[int, ...], precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIP", 8)
    for ns_steps in (1, 4):
        matrix = torch.randn(shape)
        with MultiplyAddCounter() as counter:
            orthogonalise([matrix], ns_steps, precision=precision)
        assert counter.total == count_multiply_adds(matrix, ns_steps, precision)
