"""Newton-Schulz iteration: matrices keep their singular vectors, and their singular values come near 1.

A round multiplies X by p(X X^T), where p(s^2) = a + b s^2 + c s^4, so each singular value s becomes s p(s^2). Three
things make it cheaper than five rounds with the same coefficients (Jordan et al. 2024):

- Each round has its own minimax polynomial (Amsel et al. 2025, "The Polar Express", arXiv 2505.16932), so four rounds
  do the work of five.
- The first round scales X by its Schatten 8-norm (sum s^8)^(1/8), which costs nothing as (X X^T)^2 is known then. It is
  no less than the largest singular value, and for most matrices several times smaller than the Frobenius norm.
- In full precision, if one side of X is at least 1.5 times the other, rounds act on X X^T alone, which is smaller than
  X: all polynomials are multiplied together, and X by their product at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.core.tensor_units import has_bf16_units

ProductPrecision = Literal["auto", "bf16", "fp32"]
"""Precision of matrix products. `auto`: bf16 where the device multiplies it natively, else fp32."""

POLYNOMIALS = (
    (2.550785, -1.799366, 0.395820),
    (3.487366, -2.468025, 0.462380),
    (3.948633, -2.772956, 0.493632),
    (4.086522, -2.862087, 0.502815),
    (4.121751, -2.884729, 0.505150),
    (4.130390, -2.890273, 0.505722),
    (4.132487, -2.891618, 0.505861),
    (4.132994, -2.891944, 0.505894),
)
"""Coefficients (a, b, c) of a s + b s^3 + c s^5 by round, the last round first.

Each is the odd polynomial of degree 5 that is nearest to 1 on its interval [l, u]: its largest distance from 1 is the
smallest. That of the last one is 0.25. The one before is as far from 1 as to fill, with a margin of 3 % for rounding,
the interval of the next: l / u = (1 - distance) / (1.03 (1 + distance)). So n rounds bring singular values from the
widest range into [0.75, 1.25]: from 0.0027 of the Schatten 8-norm on with four rounds, from 0.0007 with five. That norm
is 1 to n^(1/8) times the largest of n singular values: 2.2 times if 512 are alike.
"""

UPPER_ENDS = (1.734782, 1.966194, 2.036235, 2.054184, 2.058589, 2.059658, 2.059917, 2.059980)
"""Upper end u of the interval of each polynomial; the first round scales the Schatten 8-norm to its u."""

STRIP = 128
"""Rows that are computed at once of a product that is known to be symmetric; only columns from the diagonal on."""

SMALLEST_BF16 = 128
"""Rows and columns from which a CPU with AMX multiplies faster in bf16."""

FEWEST_STRIPS = 4

WIDE = 1.5
"""Columns / rows from which rounds on X X^T need fewer multiplications than rounds on X."""

SMALLEST_TRACE = 1e-30
"""A lower bound of the trace of X X^T: matrices with a Frobenius norm below 1e-15 come out smaller than others."""

SMALLEST_SIZE = 1e-4
"""A lower bound of (sum s^8)^(1/4) with sum s^2 = 1, for matrices of up to 200,000 rows. Zeros are divided by it."""


@cache
def multiplies_bf16(device: torch.device) -> bool:
    """Returns True if matrix products are several times as fast in bf16 as in fp32 on a device."""
    if device.type == "cuda":
        return has_bf16_units(device)
    # AVX-512 alone has products of bf16 too, at no more than twice the rate of fp32.
    return device.type == "cpu" and torch.cpu._is_amx_tile_supported()


@torch.no_grad()
def orthogonalise(
    matrices: Sequence[Tensor], ns_steps: int = 4, *, precision: ProductPrecision = "auto"
) -> list[Tensor]:
    """Returns matrices with the same singular vectors, and singular values near sqrt(max(1, rows / columns)).

    Args:
        matrices: tensors of two dimensions or more, flattened to [rows, columns]; the results have their shapes.
        ns_steps: rounds. Singular values end in [0.75, 1.25] times that number, small ones excepted: see POLYNOMIALS.
        precision: of the products. float64 matrices have products of float64.
    """
    results: list[Tensor | None] = [None] * len(matrices)
    # On a GPU matrices of one shape go as one batch, with one kernel in place of many. On a CPU each goes alone, so
    # that its bits do not depend on what else a rank steps.
    indices_by_batch: dict[tuple[int, ...], list[int]] = {}
    ordered = [_put_channels_last(matrix) for matrix in matrices]
    for index, matrix in enumerate(ordered):
        shape = (len(matrix), matrix[0].numel())
        indices_by_batch.setdefault(shape if matrix.is_cuda else (index,), []).append(index)
    for indices in indices_by_batch.values():
        first = ordered[indices[0]]
        uses_bf16 = precision == "bf16" or (precision == "auto" and _is_faster_in_bf16(first))
        dtype = torch.bfloat16 if uses_bf16 and first.dtype == torch.float32 else first.dtype
        flat = [ordered[index].flatten(1).to(dtype) for index in indices]
        batch = flat[0] if len(flat) == 1 else torch.stack(flat)
        found = _iterate(batch, ns_steps).to(first.dtype)
        for index, matrix in zip(indices, [found] if len(flat) == 1 else found.unbind(), strict=True):
            result = matrix.view(ordered[index].shape)
            results[index] = result if ordered[index] is matrices[index] else result.movedim(-1, 1)
    return results  # type: ignore[return-value]


def _is_faster_in_bf16(matrix: Tensor) -> bool:
    # On a CPU a product of bf16 takes a tenth of a millisecond to begin, in which fp32 is done with a small one.
    is_large = not matrix.is_cpu or min(len(matrix), matrix[0].numel()) >= SMALLEST_BF16
    return is_large and multiplies_bf16(matrix.device)


def count_multiply_adds(matrix: Tensor, ns_steps: int, precision: ProductPrecision) -> int:
    """Counts the multiply-adds in which `orthogonalise` brings a matrix to equal singular values.

    All processes of a run must count alike, whatever their processors: `auto` counts as fp32 on CPUs, as bf16 on GPUs.
    """
    short, long = sorted((len(matrix), matrix[0].numel()))
    uses_bf16 = matrix.dtype == torch.float32 and (precision == "bf16" or (precision == "auto" and matrix.is_cuda))
    # Columns of a symmetric product that are computed, on average over its rows.
    columns = float(short)
    if not matrix.is_cuda and not uses_bf16 and short >= FEWEST_STRIPS * STRIP:
        columns = sum(min(STRIP, short - start) * (short - start) for start in range(0, short, STRIP)) / short
    from_gram = not uses_bf16 and long >= WIDE * short
    # Either each round multiplies X twice, for X X^T and for the next X, and squares X X^T; or the first one alone does
    # so, and each later one makes four products of the size of X X^T.
    grams, squares = (1, 1 + 4 * (ns_steps - 1)) if from_gram else (ns_steps, ns_steps)
    products = 1 if from_gram else ns_steps
    return round(short * (columns * (grams * long + squares * short) + products * short * long))


def check_precision(name: str, precision: object) -> None:
    """Raises UsageError if a precision is not one of ProductPrecision.

    Args:
        name: name of the optimizer.
    """
    if precision not in ("auto", "bf16", "fp32"):
        raise UsageError(f"{name} has ns_precision={precision!r}", fix="Set it to one of auto, bf16, fp32.")


def _put_channels_last(matrix: Tensor) -> Tensor:
    """Returns a view of filters whose columns have the order of memory, or the tensor itself."""
    # The order of the columns does not matter, and another one than that of memory would be a slow copy.
    if matrix.ndim == 4 and not matrix.is_contiguous() and matrix.is_contiguous(memory_format=torch.channels_last):
        return matrix.movedim(1, -1)
    return matrix


def _iterate(x: Tensor, ns_steps: int) -> Tensor:
    """Returns matrices [..., rows, columns] after all rounds, times sqrt(max(1, rows / columns))."""
    rows, columns = x.shape[-2:]
    is_tall = rows > columns
    # The smaller of X X^T and X^T X.
    gram = _multiply_symmetric(x.mT, x) if is_tall else _multiply_symmetric(x, x.mT)
    # Rounds beyond the table have its last entry, which they all come near.
    last = len(POLYNOMIALS) - 1
    coefficients = [POLYNOMIALS[min(left, last)] for left in reversed(range(ns_steps))]
    upper = UPPER_ENDS[min(ns_steps - 1, last)]
    wide = torch.promote_types(x.dtype, torch.float32)
    # Divided by its trace first, so that no square leaves the range of the type. Zeros are divided by SMALLEST_TRACE.
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=wide)[..., None, None].clamp(min=SMALLEST_TRACE)
    gram = gram.div_(trace)
    square = _multiply_symmetric(gram, gram)
    size = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=wide).sqrt()
    scale = upper**2 / size.clamp(min=SMALLEST_SIZE)
    gram, square = gram.mul_(scale), square.mul_(scale.square())
    product = _combine(gram, square, coefficients[0])
    # The scale of X, and in the last product that of the result.
    first, last_scale = (scale / trace).sqrt(), max(1, rows / columns) ** 0.5
    # bf16 does not hold X X^T exactly enough: with it each round begins from X.
    if x.dtype != torch.bfloat16 and max(rows, columns) >= WIDE * min(rows, columns):
        factor = product
        for triple in coefficients[1:]:
            gram = _multiply_symmetric(_multiply_symmetric(gram, product), product)
            product = _evaluate(gram, triple)
            factor = _multiply_symmetric(product, factor)
        factor = factor * (first * last_scale)
    else:
        factor = product * first
        for triple in coefficients[1:]:
            x = _multiply(x, factor.to(x.dtype), is_tall=is_tall)
            gram = _multiply_symmetric(x.mT, x) if is_tall else _multiply_symmetric(x, x.mT)
            factor = _evaluate(gram, triple)
        factor = factor * last_scale
    return _multiply(x, factor.to(x.dtype), is_tall=is_tall)


def _multiply(x: Tensor, factor: Tensor, *, is_tall: bool) -> Tensor:
    """Returns factor @ x, or x @ factor for tall matrices: either has the memory order of x."""
    return x @ factor if is_tall else factor @ x


def _combine(gram: Tensor, square: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """Returns a I + b G + c G^2; the memory of G^2 is overwritten."""
    a, b, c = coefficients
    result = square.mul_(c).add_(gram, alpha=b)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def _evaluate(gram: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """Returns a I + b G + c G^2."""
    a, b, c = coefficients
    if _goes_by_strips(gram):
        return _combine(gram, _multiply_symmetric(gram, gram), coefficients)
    # In one pass, and in bf16 with one rounding: the terms nearly cancel for the largest singular values.
    add_product = torch.baddbmm if gram.ndim > 2 else torch.addmm
    result = add_product(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def _multiply_symmetric(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right, which is known to be symmetric."""
    if not _goes_by_strips(left):
        return left @ right
    # From the diagonal on alone: with many strips half of the multiplications.
    rows = len(left)
    result = left.new_empty(rows, rows)
    for start in range(0, rows, STRIP):
        stop = start + STRIP
        torch.mm(left[start:stop], right[:, start:], out=result[start:stop, start:])
        result[stop:, start:stop] = result[start:stop, stop:].mT
    return result


def _goes_by_strips(left: Tensor) -> bool:
    """Returns True if half of a symmetric product is faster than all of it."""
    # bf16 products of a strip are too short, and a GPU would wait for kernels to start.
    return left.is_cpu and left.dtype != torch.bfloat16 and left.ndim == 2 and len(left) >= FEWEST_STRIPS * STRIP
