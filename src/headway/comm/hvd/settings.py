"""Settings of the engine, from environment variables with Horovod's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from headway.core.errors import UsageError

MEBIBYTE = 1 << 20

# HOROVOD_TIMELINE=DYNAMIC records nothing until `start_timeline` names a file.
DYNAMIC = "DYNAMIC"


@final
@dataclass(frozen=True)
class Settings:
    """Settings of negotiation, and timeouts.

    Attributes:
        fusion_bytes: largest size of a fused buffer; 0: nothing is fused.
        cycle_s: shortest time between two rounds that are handed out.
        stall_s: time after which a warning names a tensor that some rank has not submitted; None: never.
        stall_shutdown_s: time after which such a tensor ends the job; None: never.
        timeout_s: time limit of a transfer, and of the rendezvous with the other ranks.
        timeline: file of the timeline; `DYNAMIC`: none yet; empty: none.
        mark_cycles: True if the timeline shows when rounds were handed out.
        hierarchical: True if sums go by host, False if not; None: the faster way by the measured links.
        interface: network interface; None: the one that leads to the other ranks.
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
        """Reads the settings from the environment. Raises UsageError if a value is not a number, or negative."""
        is_disabled = _read_flag(environ, "HOROVOD_STALL_CHECK_DISABLE") or False
        stall_s = _read_number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", Settings.stall_s or 0.0)
        shutdown_s = _read_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
        return Settings(
            fusion_bytes=int(_read_number(environ, "HOROVOD_FUSION_THRESHOLD", Settings.fusion_bytes)),
            cycle_s=_read_number(environ, "HOROVOD_CYCLE_TIME", Settings.cycle_s * 1e3) / 1e3,
            stall_s=None if is_disabled or not stall_s else stall_s,
            # Horovod's own rule: a shutdown time below the warning time does nothing.
            stall_shutdown_s=shutdown_s if shutdown_s and not is_disabled and shutdown_s >= stall_s else None,
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
    # Written such that NaN is refused, too.
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name}={text!r} is not a number from 0 on", fix="Set it to such a number, or unset it.")
    return value


def _read_flag(environ: Mapping[str, str], name: str) -> bool | None:
    return _read_number(environ, name, 0.0) > 0 if environ.get(name, "").strip() else None
