"""Losses of a step beside the rates of the catalog: contention, jitter, slower links, exchange that nothing hides.

Single losses are rarely measured. Published runs teach how large they are and how much they vary (catalog/losses.yaml);
measured runs of the planned job narrow that down (`calibration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, final

from headway.core.collectives import Link, Network
from headway.plan.catalogs import read_catalog

# Whose losses: those of any framework, or those of Headway's own loop, whose exchange overlaps with backward.
Software = Literal["field", "headway"]


@final
@dataclass(frozen=True)
class StepLosses:
    """Losses of a step. The defaults lose nothing."""

    # Additional share of the compute time for each doubling of a node's devices: they share cores, memory and power.
    contention: float = 0.0
    # Standard deviation of a device's compute time over its mean.
    jitter: float = 0.0
    # Bandwidth inside a node and between nodes, over that of the cluster's links.
    inside: float = 1.0
    between: float = 1.0
    # Share of the exchange that overlaps with the backward pass. The rest follows it.
    hidden: float = 1.0

    def slow_links(self, network: Network) -> Network:
        """Returns the network with the bandwidths that messages really get."""
        near, far = network.inside, network.between
        return replace(
            network,
            inside=Link(near.latency_s, near.bandwidth_bytes_s * self.inside),
            between=Link(far.latency_s, far.bandwidth_bytes_s * self.between),
        )


@final
@dataclass(frozen=True)
class LossPriors:
    """Likely losses.

    Attributes:
        losses: medians.
        spreads: standard deviations of the logarithms of fixed time and losses, in the order of
            `calibration.PARAMETERS` from the fixed time on; of `hidden`, that of the logit.
        fixed: median of the fixed time of a step over `compute.estimate_fixed_s`.
        band: by how many times the errors of published predictions exceed those of the spreads.
    """

    losses: StepLosses
    spreads: Sequence[float]
    fixed: float
    band: float


def build_priors(entries: dict[str, Any]) -> LossPriors:
    """Builds priors from the entries of catalog/losses.yaml: {name: [median, spread], band: factor}."""
    names = ("contention", "jitter", "inside", "between", "hidden")
    losses = StepLosses(**{name: float(entries[name][0]) for name in names})
    spreads = tuple(float(entries[name][1]) for name in ("fixed", *names))
    return LossPriors(losses, spreads, float(entries["fixed"][0]), float(entries["band"]))


@cache
def load_priors(software: Software) -> LossPriors:
    """Loads the priors of the catalog."""
    return build_priors(read_catalog("losses")[software])
