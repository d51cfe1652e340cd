"""Loads of the links of owners, against what is known of them."""

from __future__ import annotations

import pytest

from headway.plan.owners import compute_owner_loads


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_equal_shares_take_half_of_an_all_reduce_each_way(devices: int) -> None:
    loads = compute_owner_loads([5.0] * 4 * devices, devices)
    assert loads.largest == loads.least == pytest.approx(1 / devices)
    assert loads.weights == pytest.approx(0.5)
    assert loads.gradients == pytest.approx([0.5] * 4 * devices)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_one_tensor_goes_to_its_owner_from_all_others(devices: int) -> None:
    loads = compute_owner_loads([7.0], devices)
    # (N - 1) times as much as the tensor; an all-reduce carries 2 (N - 1)/N of it.
    assert loads.weights == pytest.approx(devices / 2)
    assert loads.gradients == pytest.approx([devices / 2])


def test_a_large_tensor_shares_no_time_with_the_others() -> None:
    """Of 10 bytes on two devices 6 go one way, then 4 the other; weights travel both ways at once."""
    loads = compute_owner_loads([1.0, 6.0, 3.0], 2)
    assert loads.gradients == pytest.approx([1.0] * 3)
    assert loads.weights == pytest.approx(0.6)
