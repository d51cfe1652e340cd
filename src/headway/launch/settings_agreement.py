"""Settings that must be equal on all ranks, compared when the ranks meet."""

from __future__ import annotations

import json

from headway.core.errors import CommunicationError, UsageError
from headway.core.world import World
from headway.launch.handover import LOG, StateCarrier


def agree_on_settings(world: World, carrier: StateCarrier, *, is_joining: bool) -> None:
    """Compares the settings that must be equal on all ranks, and makes choices together, such as the precision.

    Args:
        is_joining: this process was started to join ranks that already train.

    Raises:
        UsageError: settings differ. A newcomer that differs raises it alone and leaves; the others continue.
        CommunicationError: a newcomer leaves.
    """
    control = world.control
    report = [is_joining, carrier.get_shared_settings(), carrier.precision.get_vote()]
    reports = [json.loads(text) for text in control.gather_bytes(json.dumps(report, sort_keys=True).encode())]
    lead_settings = reports[control.ranks.index(0)][1]
    for rank, (joins, settings, _) in zip(control.ranks, reports, strict=True):
        keys = lead_settings.keys() | settings.keys()
        differing = [key for key in keys if settings.get(key) != lead_settings.get(key)]
        if not differing:
            continue
        # A newcomer with other settings must not end the run: it leaves, and the others meet again without it.
        if joins and rank != world.rank:
            raise CommunicationError(f"rank {rank} has other settings than this run and leaves")
        key = min(differing)
        what = f"{key} is {settings.get(key)!r} on rank {rank} and {lead_settings.get(key)!r} on rank 0"
        raise UsageError(what, fix="Start all processes with the same recipe, data and version.")
    if message := carrier.precision.agree_on_votes([vote for _, _, vote in reports]):
        LOG.info(message)
