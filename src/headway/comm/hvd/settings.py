"""What the engine reads from the environment, under Horovod's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from headway.core.errors import UsageError

MEBIBYTE = 1 << 20
DYNAMIC = "DYNAMIC"
"""A HOROVOD_TIMELINE of this name records nothing until `start_timeline` names a file."""


@final
@dataclass(frozen=True)
class Settings:
    """How the ranks agree on what to do next, and how long they wait.

    Attributes:
        fusion_bytes: how much goes into one fused buffer; 0: nothing is fused.
        cycle_s: the least time between two rounds of work handed out.
        stall_s: after it a tensor that some rank has not submitted is warned of; None: never.
        stall_shutdown_s: after it such a tensor ends the job; None: never.
        timeout_s: of a transfer under way, and of meeting the other ranks.
        timeline: the file of the timeline; `DYNAMIC`: none yet; empty: none.
        mark_cycles: whether the timeline shows when work was handed out.
        hierarchical: True, False: whether sums go by host; None: whatever is faster by the measured links.
        interface: the network interface; None: that of the route to the others.
    """

    fusion_bytes: int = 128 * MEBIBYTE
    cycle_s: float = 1e-3
    stall_s: float | None = 60.0
    stall_shutdown_s: float | None = None
    timeout_s: float = 300.0
    timeline: str = ""
    mark_cycles: bool = False
    hierarchical: bool | None = None
    interface: str | None = None

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Settings:
        """From the environment.

        Raises:
            UsageError: a value that is no number, or a negative one.
        """
        off = _read_flag(environ, "HOROVOD_STALL_CHECK_DISABLE") or False
        stall_s = _read_number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", Settings.stall_s or 0.0)
        shutdown_s = _read_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
        return Settings(
            fusion_bytes=int(_read_number(environ, "HOROVOD_FUSION_THRESHOLD", Settings.fusion_bytes)),
            cycle_s=_read_number(environ, "HOROVOD_CYCLE_TIME", Settings.cycle_s * 1e3) / 1e3,
            stall_s=None if off or not stall_s else stall_s,
            # Horovod's own rule: one that is shorter than the time to the warning does nothing.
            stall_shutdown_s=shutdown_s if shutdown_s and not off and shutdown_s >= stall_s else None,
            timeout_s=_read_number(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", Settings.timeout_s),
            timeline=environ.get("HOROVOD_TIMELINE", ""),
            mark_cycles=_read_flag(environ, "HOROVOD_TIMELINE_MARK_CYCLES") or False,
            hierarchical=_read_flag(environ, "HOROVOD_HIERARCHICAL_ALLREDUCE"),
            interface=environ.get("HOROVOD_GLOO_IFACE") or None,
        )


def _read_number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name}={text!r} is no number from 0 on", fix="Mend it, or unset it.")
    return value


def _read_flag(environ: Mapping[str, str], name: str) -> bool | None:
    return _read_number(environ, name, 0.0) > 0 if environ.get(name, "").strip() else None
