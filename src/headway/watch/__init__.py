"""Watches any PyTorch training loop: `with headway.watch.watch(loader, model, optimizer) as seen`.

In: a loader, networks and optimizers of the user's script. Out: a `LoopObservation` with a verdict of `headway.doctor`.
Open `loop_watch.py` first; `hooks.py` marks the stages, `findings.py` turns marks into numbers and advice, and
`script_child.py` finds the loop of a script by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy_exports import build_lazy_exports
from headway.doctor.loop_observation import LoopObservation as LoopObservation

if TYPE_CHECKING:
    from headway.watch.loop_watch import LoopWatch as LoopWatch
    from headway.watch.loop_watch import watch as watch

_HOMES = {"LoopWatch": "loop_watch", "watch": "loop_watch"}


# A type checker that saw `__getattr__` would accept every name.
if not TYPE_CHECKING:
    __getattr__, __dir__ = build_lazy_exports(__name__, _HOMES)
