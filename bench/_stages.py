"""The time of each stage of a batch, as the Loader measures it, in a process that is never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import headway


def rows(pack: Path, batch: int, threads: int, how: dict[str, Any], batches: int) -> list[tuple[str, str]]:
    """The table: wall time of the loader's thread, and thread time of the decoding threads, of one batch."""
    train = headway.open(pack)
    order = headway.Order(len(train), seed=1)
    loader = headway.Loader(train, batch=batch, order=order, stop=batches * batch, threads=threads, **how)
    for _ in loader:
        pass
    train.close()
    stats = loader.stats()
    table = [(f"stage, batch of {batch}", "ms")]
    for name, seconds in stats.stage_s.items():
        table.append((name, f"{seconds / stats.stage_images * batch * 1e3:.3g}"))
    for name in ("check", "decode", "resample"):
        spent = getattr(stats.cores, f"{name}_s") / max(1, stats.cores.images)
        table.append((f"{name}, all {stats.threads} threads", f"{spent * batch * 1e3:.3g}"))
    return table
