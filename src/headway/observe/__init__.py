"""Measures: what is seen of a run while it trains, and of anybody's training loop. Loaded when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy_exports import build_lazy_exports

if TYPE_CHECKING:
    from headway.observe.watch_result import Observed as Observed
    from headway.observe.watching import Watch as Watch
    from headway.observe.watching import watch as watch

_HOMES = {"Observed": "watch_result", "Watch": "watching", "watch": "watching"}


__getattr__, __dir__ = build_lazy_exports(__name__, _HOMES)
