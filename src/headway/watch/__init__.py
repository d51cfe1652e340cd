"""Watches any PyTorch training loop through hooks: `with headway.watch.watch(loader, model, optimizer) as seen`.

In: a loader, networks and optimizers of the user's own script. Out: an `Observed`, with a verdict of `headway.doctor`.
Read `watching.py` first; `hooks.py` marks the stages, `findings.py` turns marks into numbers and advice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy_exports import build_lazy_exports
from headway.doctor.loop_observation import Observed as Observed

if TYPE_CHECKING:
    from headway.watch.watching import Watch as Watch
    from headway.watch.watching import watch as watch

_HOMES = {"Watch": "watching", "watch": "watching"}


__getattr__, __dir__ = build_lazy_exports(__name__, _HOMES)
