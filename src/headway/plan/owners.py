"""Loads of links if each weight has an owner, relative to an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from headway.core.owner_shares import assign_evenly, assign_largest_first, find_largest_share


@final
@dataclass(frozen=True)
class OwnerLoads:
    """Loads of the links of owners.

    Attributes:
        largest, least: shares of all bytes that an owner has.
        weights: bytes that the busiest link carries when owners send all weights, over those of an all-reduce.
        gradients: the same of each tensor's gradients on their way to the owner.
        products: share of the optimizer's matrix products that the busiest owner makes; 0: there are none.
    """

    largest: float
    least: float
    weights: float
    gradients: tuple[float, ...]
    products: float


def compute_owner_loads(sizes: Sequence[float], devices: int, products: Sequence[float] = ()) -> OwnerLoads:
    """Computes the loads for tensors of these bytes, at least one, on two or more devices.

    A tensor of more than an equal share travels alone, to its owner. The others share buckets, in which links carry
    both directions at once.

    Args:
        products: multiply-adds of the optimizer's matrix products for each tensor; empty: there are none.
    """
    total, others = sum(sizes), devices - 1
    shares, rest = [0.0] * devices, [0.0] * devices
    is_large = [size > total / devices for size in sizes]
    # With bytes alone both give the same, and this one is faster.
    owners = assign_evenly((sizes, products), devices) if any(products) else assign_largest_first(sizes, devices)
    for size, owner, alone in zip(sizes, owners, is_large, strict=True):
        shares[owner] += size
        rest[owner] += 0.0 if alone else size
    # What a ring sends of an array (Patarasuk and Yuan 2009).
    ring = 2 * others / devices
    busiest = max(others * max(rest), sum(rest) - min(rest)) / (ring * sum(rest)) if any(rest) else 0.0
    return OwnerLoads(
        max(shares) / total,
        min(shares) / total,
        max(others * max(shares), total - min(shares)) / (ring * total),
        tuple(others / ring if alone else busiest for alone in is_large),
        find_largest_share(products, owners) if any(products) else 0.0,
    )
