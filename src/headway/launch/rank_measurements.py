"""Measurements of the ranks at their start, which later generations take over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from headway.comm.algorithm_choice import AlgorithmTrial
from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.links import MeasuredLinks
from headway.core.world import World


class RankMeasurements(NamedTuple):
    """Measurements that the next generation keeps, the same on all ranks.

    Attributes:
        links: latency and bandwidth inside and between hosts.
        trials: measured cost of each all-reduce algorithm that differs on this world.
        order: names of the parameters, in the order in which their gradients become ready; None before the first step.
        wire: wire format of the gradients.
    """

    links: MeasuredLinks
    trials: dict[Algorithm, AlgorithmTrial]
    order: Sequence[str] | None
    wire: Wire


def broadcast_measurements(world: World, own: RankMeasurements | None) -> RankMeasurements | None:
    """Returns rank 0's measurements from an earlier generation on every rank; None if it has none.

    Args:
        own: those of this rank.
    """
    # Newcomers have no measurements, and measuring again would hold up the run: they take those of rank 0.
    data = b""
    if world.is_lead and own is not None:
        links, trials, *rest = own
        trial_trees = {name: asdict(trial) for name, trial in trials.items()}
        data = json.dumps([links.to_json(), trial_trees, *rest]).encode()
    if not (received := world.control.broadcast_bytes(data)):
        return None
    links, trials, *rest = json.loads(received)
    return RankMeasurements(
        MeasuredLinks.from_json(links), {name: AlgorithmTrial(**trial) for name, trial in trials.items()}, *rest
    )
