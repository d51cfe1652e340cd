"""Watches any PyTorch training loop: `with headway.watch.watch(loader, model, optimizer) as seen`.

In: a loader, networks and optimizers of the user's script. Out: a `LoopObservation` with a verdict of `headway.doctor`.
Open `loop_watch.py` first; `hooks.py` marks the stages, `findings.py` turns marks into numbers and advice, and
`script_watch.py` (`headway doctor --script`) runs a script under `script_child.py`, which finds the loop by itself.
"""

from __future__ import annotations

from headway.core.lazy_exports import build_lazy_exports

__getattr__, __dir__ = build_lazy_exports(__name__, __file__)
