"""Division of whole tensors over owners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.owner_shares import assign_evenly, assign_largest_first, find_largest_share

SIZES = st.lists(st.integers(0, 20), min_size=1, max_size=20)


def test_shares_are_about_equal() -> None:
    sizes = [float(size) for size in range(1, 60)]
    assert find_largest_share(sizes, assign_largest_first(sizes, 7)) <= 4 / 3 / 7
    # Of equal tensors the first goes to the first owner.
    assert assign_largest_first([2.0, 2.0, 2.0], 3) == [0, 1, 2]


@given(SIZES, st.integers(1, 5))
def test_with_one_kind_of_size_the_largest_goes_first(sizes: list[int], owners: int) -> None:
    assert assign_evenly([sizes], owners) == assign_largest_first(sizes, owners)
    # Nor does a kind that no tensor has count.
    assert assign_evenly([sizes, [0] * len(sizes)], owners) == assign_largest_first(sizes, owners)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=20), st.integers(1, 5))
def test_no_owner_has_more_than_a_fair_share_and_the_largest_tensor(
    tensors: list[tuple[int, int]], owners: int
) -> None:
    """Of both kinds together: each goes to an owner with no more of them than the mean."""
    kinds = list(zip(*tensors, strict=True))
    chosen = assign_evenly(kinds, owners)
    totals = [sum(kind) or 1 for kind in kinds]
    together = [sum(size / total for size, total in zip(tensor, totals, strict=True)) for tensor in tensors]
    for kind in kinds:
        assert find_largest_share(kind, chosen) <= 2 / owners + max(together) + 1e-9


def test_work_and_bytes_that_lie_in_different_tensors_are_both_divided() -> None:
    sizes, work = [8, 8, 1, 1], [0, 0, 5, 5]
    chosen = assign_evenly([sizes, work], 2)
    assert find_largest_share(sizes, chosen) == find_largest_share(work, chosen) == pytest.approx(0.5)


def test_no_sizes_have_no_share() -> None:
    assert find_largest_share([], []) == find_largest_share([0, 0], [0, 1]) == 0
